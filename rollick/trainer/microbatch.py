"""Divides a batch into micro-batches, and packs each of them on a device.

Only tokens in the loss mask reach the head. The first token of a sequence is never trained: no
token before it predicts it. A prefix that a group's samples share can be in a pack once
(models/attention/shared_prefix.py); one row then predicts several trained tokens.

Legend: B samples, N tokens of a batch, T trained ones; the tokens of a pack are also named N, and
are fewer where prefixes are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollick.algorithms.losses import LossInputs
from rollick.data.batch import Batch
from rollick.models.attention.shared_prefix import (
    members_by_group,
    plan_prefixes,
    plan_unshared,
    shared_lengths,
)
from rollick.models.attention.varlen import ROOT, PackedLayout
from rollick.models.decoder.batch_invariant import round_up_to_tile


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """The model's inputs of a micro-batch, and its trained tokens by sample, then position."""

    token_ids_N: Tensor
    layout: PackedLayout
    rows_T: Tensor
    """The row of each trained token's predecessor: the hidden state that predicts it."""
    targets_T: Tensor
    temperature_T: Tensor
    sequence_T: Tensor
    indices_T: npt.NDArray[np.int64]
    """The indices of the trained tokens in the micro-batch's arrays."""
    last_rows_B: Tensor
    """The row of each sample's last token."""


def plan_microbatches(
    lengths: Sequence[int], *, tokens: int, keep_order: bool = False
) -> list[list[int]]:
    """Divide samples into parts of at most `tokens` tokens; a longer sample is a part alone.

    Longest first: equal lengths become adjacent (one attention call), and a part that does not fit
    into memory fails early in the step. `keep_order` keeps the order of `lengths`.
    """
    samples = range(len(lengths))
    parts: list[list[int]] = []
    used = tokens
    for b in samples if keep_order else sorted(samples, key=lambda b: -lengths[b]):
        if used + lengths[b] > tokens or not parts:
            parts.append([])
            used = 0
        parts[-1].append(b)
        used += lengths[b]
    return parts


def plan_shared_microbatches(
    lengths: Sequence[int], *, groups: Sequence[int], shared: Sequence[int], tokens: int
) -> list[list[int]]:
    """Divide samples into parts of at most `tokens` tokens; the first `shared` tokens of a group's
    samples are equal and count once.

    A group is divided only if it is larger than a part, and its shared tokens are then computed in
    each piece. Largest first, each into the first part with enough room.
    """
    pieces = [
        piece
        for members in members_by_group(groups)
        for piece in _split_group(members, lengths, shared=shared, tokens=tokens)
    ]
    parts: list[list[int]] = []
    free: list[int] = []
    for size, piece in sorted(pieces, key=lambda sized: -sized[0]):
        target = next((index for index, room in enumerate(free) if size <= room), len(parts))
        if target == len(parts):
            parts.append([])
            free.append(tokens)
        parts[target] += piece
        free[target] -= size
    return parts


def _split_group(
    members: Sequence[int], lengths: Sequence[int], *, shared: Sequence[int], tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """(tokens, samples) of each piece of a group, longest samples first."""
    piece: list[int] = []
    size = 0
    for b in sorted(members, key=lambda b: -lengths[b]):
        added = lengths[b] - shared[b]
        if piece and size + added > tokens:
            yield size, piece
            piece = []
        size = size + added if piece else lengths[b]
        piece.append(b)
    yield size, piece


def microbatches(
    batch: Batch,
    *,
    tokens: int,
    by_uid: bool,
    share_prefix: bool = False,
    keep_groups: bool = False,
) -> list[list[int]]:
    """The samples of each micro-batch; omits samples without a trained token.

    `by_uid` orders them by id and shares no prefixes, so that results are bitwise independent of
    the other samples. `keep_groups` never divides a group.
    """
    _, sequence_T = trained_tokens(batch)
    trained: list[int] = np.unique(sequence_T).tolist()
    if by_uid:
        trained.sort(key=lambda b: batch.uids[b])
    lengths = [int(batch.lengths_B[b]) for b in trained]
    groups = [int(batch.group_B[b]) for b in trained]
    uses_prefixes = share_prefix and not by_uid
    shared = sample_prefixes(batch.take(trained)).tolist() if uses_prefixes else [0] * len(trained)
    if keep_groups:
        members = members_by_group(groups)
        # The shared tokens of a group count once.
        sizes = [shared[m[0]] + sum(lengths[b] - shared[b] for b in m) for m in members]
        group_parts = plan_microbatches(sizes, tokens=tokens, keep_order=by_uid)
        parts = [[b for group in part for b in members[group]] for part in group_parts]
    elif uses_prefixes:
        parts = plan_shared_microbatches(lengths, groups=groups, shared=shared, tokens=tokens)
    else:
        parts = plan_microbatches(lengths, tokens=tokens, keep_order=by_uid)
    return [[trained[b] for b in part] for part in parts]


def trained_tokens(batch: Batch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(index, sample) of each token in the loss mask, except first tokens."""
    trained_N = batch.loss_mask_N.copy()
    trained_N[batch.offsets_B1[:-1]] = False
    sequence_N = np.repeat(np.arange(batch.rows), batch.lengths_B)
    return np.flatnonzero(trained_N), sequence_N[trained_N]


def pack(
    batch: Batch,
    *,
    device: str,
    deterministic: bool,
    share_prefix: bool = False,
    batch_invariant: bool = False,
    min_rows: int = 0,
) -> PackedBatch:
    """Pack a micro-batch. `deterministic`: share no prefixes and pad to full tiles
    (`round_up_to_tile`). `batch_invariant`: use the engine's attention kernel. `min_rows`: pad to
    this size; an empty batch needs it."""
    indices_T, sequence_T = trained_tokens(batch)
    plan = plan_unshared(batch.lengths_B)
    if share_prefix and not deterministic and batch.rows:
        shared_B = sample_prefixes(batch)
        plan = plan_prefixes(batch.lengths_B, group_B=batch.group_B, shared_B=shared_B)
    num_tokens = len(plan.source_C)
    num_rows = round_up_to_tile(num_tokens) if deterministic else max(num_tokens, min_rows)
    padding_rows = num_rows - num_tokens
    padding = [padding_rows] if padding_rows else []
    # The results of padding rows are ignored.
    token_ids_N = np.pad(batch.token_ids_N[plan.source_C], (0, padding_rows))
    # Log-probs of greedy samples (temperature 0) are at temperature 1, as in the engine.
    temperature_B = np.where(batch.temperature_B > 0, batch.temperature_B, 1.0)

    def on_device(values: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device, dtype)

    return PackedBatch(
        token_ids_N=on_device(token_ids_N, torch.int64),
        layout=PackedLayout.of(
            [*plan.lengths, *padding],
            parents=[*plan.parents, *(ROOT for _ in padding)],
            device=device,
            per_sequence=deterministic,
            batch_invariant=batch_invariant,
        ),
        rows_T=on_device(plan.packed_index_N[indices_T - 1], torch.int64),
        targets_T=on_device(batch.token_ids_N[indices_T], torch.int64),
        temperature_T=on_device(temperature_B[sequence_T], torch.float64),
        sequence_T=on_device(sequence_T, torch.int64),
        indices_T=indices_T,
        last_rows_B=on_device(plan.packed_index_N[batch.offsets_B1[1:] - 1], torch.int64),
    )


def sample_prefixes(batch: Batch) -> npt.NDArray[np.int64]:
    """Length of the prefix that each sample shares with its group, without trained tokens. Its
    last row predicts the first token of each sample after the prefix."""
    indices_T, sequence_T = trained_tokens(batch)
    samples, first = np.unique(sequence_T, return_index=True)
    limit_B = batch.lengths_B.astype(np.int64) - 1
    limit_B[samples] = indices_T[first] - batch.offsets_B1[samples]
    return shared_lengths(
        batch.token_ids_N, batch.lengths_B, group_B=batch.group_B, limit_B=limit_B
    )


def loss_inputs(
    batch: Batch,
    packed: PackedBatch,
    logprobs_T: Tensor,
    *,
    entropy_T: Tensor | None = None,
    student_TK: Tensor | None = None,
) -> LossInputs:
    """The inputs of the loss. The behaviour policy's log-probs replace missing ones of the old
    policy."""
    device, dtype = logprobs_T.device, logprobs_T.dtype

    def floats(values_N: npt.NDArray[Any]) -> Tensor:
        return torch.as_tensor(values_N[packed.indices_T]).to(device, dtype)

    def optional_floats(values_N: npt.NDArray[Any] | None) -> Tensor | None:
        return None if values_N is None else floats(values_N)

    def integers(values_T: npt.NDArray[Any]) -> Tensor:
        return torch.as_tensor(values_T).to(device, torch.int64)

    behaviour_T = floats(batch.logprobs_N)
    old_T = optional_floats(batch.old_logprobs_N)
    # A turn is a run of consecutive tokens. No run spans two samples, because the first token of a
    # sample is never trained.
    turn_T = np.cumsum(np.diff(packed.indices_T, prepend=packed.indices_T[:1]) > 1)
    scores_N = None if batch.scores_B is None else np.repeat(batch.scores_B, batch.lengths_B)
    _, pair_B = np.unique(batch.group_B, return_inverse=True)
    component_N = batch.component_N
    return LossInputs(
        logprobs_T=logprobs_T,
        old_T=behaviour_T if old_T is None else old_T,
        behaviour_T=behaviour_T,
        advantages_T=floats(batch.advantages_N),
        weights_T=floats(batch.weights_N),
        sequence_T=packed.sequence_T,
        reference_T=optional_floats(batch.reference_logprobs_N),
        turn_T=integers(turn_T),
        scores_T=optional_floats(scores_N),
        pair_T=integers(np.repeat(pair_B, batch.lengths_B)[packed.indices_T]),
        age_T=integers(batch.version - batch.versions_N[packed.indices_T].astype(np.int64)),
        teacher_TK=optional_floats(batch.teacher_top_NK),
        student_TK=student_TK,
        entropy_T=entropy_T,
        component_T=None if component_N is None else integers(component_N[packed.indices_T]),
        kl_weights_T=optional_floats(batch.kl_weights_N),
        entropy_weights_T=optional_floats(batch.entropy_weights_N),
    )
