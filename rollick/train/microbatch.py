"""From a batch to micro-batches on a device: which samples go together, and their tensors.

Only tokens in the loss mask are ever given to the head. The first token of a sequence has nothing
before it that could predict it, so it never counts, whatever its mask says.

Legend: B samples, N tokens of a batch or pack, T those of them that count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollick.algorithms.losses import LossInputs
from rollick.data.batch import Batch
from rollick.models.attention import PackedLayout
from rollick.models.deterministic import padded_rows
from rollick.types import FloatArray

FILLER_TOKEN = 0
"""Stands in the rows that fill up a pack; nothing is computed from them."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The model's inputs of a micro-batch. Token n is predicted by the hidden state at n - 1."""

    token_ids_N: torch.Tensor
    layout: PackedLayout
    rows_T: torch.Tensor
    targets_T: torch.Tensor
    temperature_T: torch.Tensor
    sequence_T: torch.Tensor
    places_T: npt.NDArray[np.int64]
    """Where the counted tokens are in the micro-batch's arrays."""


def plan_microbatches(
    lengths: Sequence[int], *, tokens: int, keep_order: bool = False
) -> list[list[int]]:
    """Cut samples into parts of at most `tokens` tokens; a longer sample goes alone.

    Longest first: equal lengths become neighbours (one attention call), and a part that does not
    fit into memory fails at once and not late in the step. `keep_order` cuts as they come.
    """
    places = range(len(lengths))
    parts: list[list[int]] = []
    used = tokens
    for place in places if keep_order else sorted(places, key=lambda b: -lengths[b]):
        if used + lengths[place] > tokens or not parts:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += lengths[place]
    return parts


def microbatches(batch: Batch, *, tokens: int, by_uid: bool) -> list[list[int]]:
    """The samples of each micro-batch. Those without a counted token are in none."""
    _, sequence_T = counted_tokens(batch)
    useful: list[int] = np.unique(sequence_T).tolist()
    if by_uid:
        useful.sort(key=lambda b: batch.uids[b])
    lengths = [int(batch.lengths_B[b]) for b in useful]
    parts = plan_microbatches(lengths, tokens=tokens, keep_order=by_uid)
    return [[useful[place] for place in part] for part in parts]


def counted_tokens(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(place, sample) of each token in the loss mask that something comes before."""
    counted_N = batch.loss_mask_N.copy()
    counted_N[batch.offsets_B1[:-1]] = False
    sequence_N = np.repeat(np.arange(batch.samples), batch.lengths_B)
    return np.flatnonzero(counted_N), sequence_N[counted_N]


def pack(batch: Batch, *, device: str, deterministic: bool) -> Pack:
    """The model's inputs. Deterministic packs have whole tiles of rows: see deterministic.py."""
    places_T, sequence_T = counted_tokens(batch)
    filler = padded_rows(batch.tokens) - batch.tokens if deterministic else 0
    lengths = [*batch.lengths_B.tolist(), *([filler] if filler else [])]
    token_ids_N = np.concatenate([batch.token_ids_N, np.full(filler, FILLER_TOKEN, np.int32)])
    # Greedy samples (temperature 0) have their log-probs at temperature 1, as in the engine.
    temperature_B = np.where(batch.temperature_B > 0, batch.temperature_B, 1.0)

    def on_device(values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device, dtype)

    return Pack(
        token_ids_N=on_device(token_ids_N, torch.int64),
        layout=PackedLayout.of(lengths, device=device, per_sequence=deterministic),
        rows_T=on_device(places_T - 1, torch.int64),
        targets_T=on_device(batch.token_ids_N[places_T], torch.int64),
        temperature_T=on_device(temperature_B[sequence_T], torch.float64),
        sequence_T=on_device(sequence_T, torch.int64),
        places_T=places_T,
    )


def loss_inputs(
    batch: Batch, packed: Pack, logprobs_T: torch.Tensor, *, old_is_behaviour: bool
) -> LossInputs:
    """What the loss sees of a micro-batch.

    pi_old is what the batch carries; else the behaviour policy, if the correction says so; else
    the present one, as at the first step on a batch.
    """

    def counted(values_N: FloatArray) -> torch.Tensor:
        return torch.as_tensor(values_N[packed.places_T]).to(logprobs_T.device, logprobs_T.dtype)

    behaviour_T = counted(batch.logprobs_N)
    if batch.old_logprobs_N is not None:
        old_T = counted(batch.old_logprobs_N)
    else:
        old_T = behaviour_T if old_is_behaviour else logprobs_T.detach()
    reference_N = batch.reference_logprobs_N
    return LossInputs(
        logprobs_T=logprobs_T,
        old_T=old_T,
        behaviour_T=behaviour_T,
        advantages_T=counted(batch.advantages_N),
        weights_T=counted(batch.weights_N),
        sequence_T=packed.sequence_T,
        reference_T=None if reference_N is None else counted(reference_N),
        segment_T=torch.as_tensor(turns(packed.places_T)).to(logprobs_T.device),
    )


def turns(places_T: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of each token's run of neighbours. No run goes over the border of a sample: the
    first token of a sample never counts."""
    return np.cumsum(np.diff(places_T, prepend=places_T[:1]) > 1, dtype=np.int64)
