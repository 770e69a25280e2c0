"""From a batch to micro-batches on a device: which samples go together, and their tensors.

Only tokens in the loss mask are ever given to the head. The first token of a sequence has nothing
before it that could predict it, so it never counts, whatever its mask says. What the samples of a
group begin with can be in a pack once (prefix.py): then they stay together, and several counted
tokens are predicted by one row.

Legend: B samples, N tokens of a batch, T those of them that count; those of a pack
are named N too, and are fewer where beginnings are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollick.algorithms.losses import LossInputs
from rollick.data.batch import Batch
from rollick.models.attention import ROOT, PackedLayout
from rollick.models.deterministic import padded_rows
from rollick.models.prefix import (
    PrefixPlan,
    members_by_group,
    plan_prefixes,
    plan_whole,
    shared_lengths,
)

FILLER_TOKEN = 0
"""Stands in the rows that fill up a pack; nothing is computed from them."""


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """The model's inputs of a micro-batch, and its counted tokens by sample, then position."""

    token_ids_N: torch.Tensor
    layout: PackedLayout
    rows_T: torch.Tensor
    """Where each counted token's predecessor is computed: the hidden state that predicts it."""
    targets_T: torch.Tensor
    temperature_T: torch.Tensor
    sequence_T: torch.Tensor
    places_T: npt.NDArray[np.int64]
    """Where the counted tokens are in the micro-batch's arrays."""
    last_rows_B: torch.Tensor
    """Where the last token of each sample is computed."""


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


def plan_shared_microbatches(
    lengths: Sequence[int], *, groups: Sequence[int], shared: Sequence[int], tokens: int
) -> list[list[int]]:
    """Cut samples into parts of at most `tokens` tokens; `shared` is how many of its first ones
    a sample has in common with its group, which count once.

    A group is cut only if it is larger than a part, and its shared tokens then count (and are
    computed) in each piece. Largest first, each into the first part that has room for it.
    """
    pieces = [
        piece
        for members in members_by_group(groups)
        for piece in _pieces(members, lengths, shared=shared, tokens=tokens)
    ]
    parts: list[list[int]] = []
    room: list[int] = []
    for size, piece in sorted(pieces, key=lambda sized: -sized[0]):
        part = next((number for number, left in enumerate(room) if size <= left), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(tokens)
        parts[part] += piece
        room[part] -= size
    return parts


def _pieces(
    members: Sequence[int], lengths: Sequence[int], *, shared: Sequence[int], tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """(tokens, samples) of each piece of a group, longest samples first."""
    piece: list[int] = []
    size = 0
    for place in sorted(members, key=lambda b: -lengths[b]):
        own = lengths[place] - shared[place]
        if piece and size + own > tokens:
            yield size, piece
            piece = []
        size = size + own if piece else lengths[place]
        piece.append(place)
    yield size, piece


def microbatches(
    batch: Batch,
    *,
    tokens: int,
    by_uid: bool,
    share_prefix: bool = False,
    keep_groups: bool = False,
) -> list[list[int]]:
    """The samples of each micro-batch. Those without a counted token are in none.

    `by_uid` cuts them in the order of their ids and shares nothing, so that no sample's bits
    depend on others. `keep_groups` never cuts a group, however large.
    """
    _, sequence_T = counted_tokens(batch)
    useful: list[int] = np.unique(sequence_T).tolist()
    if by_uid:
        useful.sort(key=lambda b: batch.uids[b])
    lengths = [int(batch.lengths_B[b]) for b in useful]
    groups = [int(batch.group_B[b]) for b in useful]
    shares = share_prefix and not by_uid
    shared = sample_prefixes(batch.take(useful)).tolist() if shares else [0] * len(useful)
    if keep_groups:
        whole = members_by_group(groups)
        sizes = [_size(members, lengths, shared) for members in whole]
        cuts = plan_microbatches(sizes, tokens=tokens, keep_order=by_uid)
        parts = [[place for number in cut for place in whole[number]] for cut in cuts]
    elif shares:
        parts = plan_shared_microbatches(lengths, groups=groups, shared=shared, tokens=tokens)
    else:
        parts = plan_microbatches(lengths, tokens=tokens, keep_order=by_uid)
    return [[useful[place] for place in part] for part in parts]


def _size(members: Sequence[int], lengths: Sequence[int], shared: Sequence[int]) -> int:
    """Tokens of a whole group, the shared ones once."""
    return shared[members[0]] + sum(lengths[b] - shared[b] for b in members)


def counted_tokens(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(place, sample) of each token in the loss mask that something comes before."""
    counted_N = batch.loss_mask_N.copy()
    counted_N[batch.offsets_B1[:-1]] = False
    sequence_N = np.repeat(np.arange(batch.samples), batch.lengths_B)
    return np.flatnonzero(counted_N), sequence_N[counted_N]


def pack(
    batch: Batch,
    *,
    device: str,
    deterministic: bool,
    share_prefix: bool = False,
    fixed: bool = False,
    min_rows: int = 0,
) -> Pack:
    """The model's inputs. Deterministic packs share nothing, and have whole tiles of rows: see
    deterministic.py. `fixed` ones attend as an engine does: see fixed.py. Smaller ones than
    `min_rows` are filled up; with it, a batch without samples can be packed."""
    places_T, sequence_T = counted_tokens(batch)
    shares = share_prefix and not deterministic and batch.samples > 0
    plan = _plan(batch, share_prefix=shares)
    computed = len(plan.source_C)
    filler = padded_rows(computed) - computed if deterministic else max(0, min_rows - computed)
    filling = [filler] if filler else []
    token_ids_N = np.concatenate(
        [batch.token_ids_N[plan.source_C], np.full(filler, FILLER_TOKEN, np.int32)]
    )
    # Greedy samples (temperature 0) have their log-probs at temperature 1, as in the engine.
    temperature_B = np.where(batch.temperature_B > 0, batch.temperature_B, 1.0)

    def on_device(values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device, dtype)

    return Pack(
        token_ids_N=on_device(token_ids_N, torch.int64),
        layout=PackedLayout.of(
            [*plan.lengths, *filling],
            parents=[*plan.parents, *(ROOT for _ in filling)],
            device=device,
            per_sequence=deterministic,
            fixed=fixed,
        ),
        rows_T=on_device(plan.row_N[places_T - 1], torch.int64),
        targets_T=on_device(batch.token_ids_N[places_T], torch.int64),
        temperature_T=on_device(temperature_B[sequence_T], torch.float64),
        sequence_T=on_device(sequence_T, torch.int64),
        places_T=places_T,
        last_rows_B=on_device(plan.row_N[batch.offsets_B1[1:] - 1], torch.int64),
    )


def _plan(batch: Batch, *, share_prefix: bool) -> PrefixPlan:
    if not share_prefix:
        return plan_whole(batch.lengths_B)
    return plan_prefixes(batch.lengths_B, group_B=batch.group_B, shared_B=sample_prefixes(batch))


def sample_prefixes(batch: Batch) -> npt.NDArray[np.int64]:
    """Tokens that each sample begins with like all of its group, none of them counted: the last
    of them is the row that predicts each one's first own token."""
    places_T, sequence_T = counted_tokens(batch)
    samples, first = np.unique(sequence_T, return_index=True)
    limit_B = batch.lengths_B.astype(np.int64) - 1
    limit_B[samples] = places_T[first] - batch.offsets_B1[samples]
    return shared_lengths(
        batch.token_ids_N, batch.lengths_B, group_B=batch.group_B, limit_B=limit_B
    )


def loss_inputs(
    batch: Batch,
    packed: Pack,
    logprobs_T: torch.Tensor,
    *,
    entropy_T: torch.Tensor | None = None,
    student_TK: torch.Tensor | None = None,
) -> LossInputs:
    """What the loss sees of a micro-batch. Without log-probs of an old policy mu stands for it."""
    device, dtype = logprobs_T.device, logprobs_T.dtype

    def counted(values_N: npt.NDArray[Any] | None) -> torch.Tensor | None:
        return None if values_N is None else numbers(values_N)

    def numbers(values_N: npt.NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(values_N[packed.places_T]).to(device, dtype)

    def marks(values_T: npt.NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(values_T).to(device, torch.int64)

    behaviour_T = numbers(batch.logprobs_N)
    old_T = counted(batch.old_logprobs_N)
    scores_N = None if batch.scores_B is None else np.repeat(batch.scores_B, batch.lengths_B)
    _, pair_B = np.unique(batch.group_B, return_inverse=True)
    component_N = batch.component_N
    return LossInputs(
        logprobs_T=logprobs_T,
        old_T=behaviour_T if old_T is None else old_T,
        behaviour_T=behaviour_T,
        advantages_T=numbers(batch.advantages_N),
        weights_T=numbers(batch.weights_N),
        sequence_T=packed.sequence_T,
        reference_T=counted(batch.reference_logprobs_N),
        segment_T=marks(turns(packed.places_T)),
        scores_T=counted(scores_N),
        pair_T=marks(np.repeat(pair_B, batch.lengths_B)[packed.places_T]),
        age_T=marks(batch.version - batch.versions_N[packed.places_T].astype(np.int64)),
        teacher_TK=counted(batch.teacher_top_NK),
        student_TK=student_TK,
        entropy_T=entropy_T,
        component_T=None if component_N is None else marks(component_N[packed.places_T]),
        kl_weights_T=counted(batch.kl_weights_N),
        entropy_weights_T=counted(batch.entropy_weights_N),
    )


def turns(places_T: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of each token's run of neighbours. No run goes over the border of a sample: the
    first token of a sample never counts."""
    return np.cumsum(np.diff(places_T, prepend=places_T[:1]) > 1, dtype=np.int64)
