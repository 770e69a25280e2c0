"""Builds a Batch from groups, or from given answers (SFT, distillation, DPO). Pure functions.

Samples are ordered by id, never by completion time. A sample whose score failed, or without a
trained token, is not in the batch and therefore in no denominator. Advantages and weights of groups
are assigned later (algorithms/credit.py), because they may use model outputs for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rollick.data.batch import Batch
from rollick.errors import DataError
from rollick.types import NOT_SAMPLED, BoolArray, FloatArray, Group, IntArray, Sample, SampleId

Aggregation = Callable[..., npt.NDArray[np.float64]]
"""(trained tokens of each sample, its group, *, max_tokens) -> weight of each trained token."""

SelectMembers = Callable[[Group], Sequence[bool]]
"""Marks the members of a group to train on. Members whose score failed are always left out."""

Example = tuple[IntArray, BoolArray]
"""Token ids and a mask of the tokens to train on (`ChatCodec.encode_example`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A row of the batch: one segment of a sample."""

    uid: SampleId
    token_ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperature: float
    score: float = 0.0
    segment: int = 0


def collate(
    groups: Sequence[Group], *, select_members: SelectMembers | None = None, version: int = 0
) -> Batch:
    """The batch of all trainable samples. Advantages and weights are 0."""
    entries: list[_Entry] = []
    for group in groups:
        selected = select_members(group) if select_members else [True] * len(group.members)
        for member, is_selected in zip(group.members, selected, strict=True):
            sample, score = member.sample, member.score
            if is_selected and score.ok and _mask_first_token(sample.loss_mask).any():
                entries += _segments(sample, score.value)
    if not entries:
        raise _nothing_to_train(groups)
    return _pack(entries, version=version)


def token_weights(
    batch: Batch, aggregation: Aggregation, *, max_tokens: int, among_N: BoolArray | None = None
) -> npt.NDArray[np.float64]:
    """[N] the weight of each trained token in `among_N` (default: all); 0 for other tokens. A
    sample with several segments, such as an episode with a window, counts once."""
    kept_N = batch.loss_mask_N if among_N is None else batch.loss_mask_N & among_N
    trained_B = replace(batch, loss_mask_N=kept_N).trained_B
    first_S = np.array([rows.start for rows in batch.rows_by_sample().values()], np.int64)
    counts_S = np.add.reduceat(trained_B, first_S)
    weights_S = aggregation(counts_S, batch.group_B[first_S], max_tokens=max_tokens)
    rows_S = np.diff(np.append(first_S, batch.rows))
    weights_B = np.repeat(weights_S, rows_S)
    return np.where(kept_N, np.repeat(weights_B, batch.lengths_B), 0.0)


def examples_to_batch(
    examples: Sequence[Sequence[Example]],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    are_segments: bool = False,
) -> Batch:
    """The batch of given answers. Each entry is a group: one answer, or the chosen and the rejected
    answer of a pair, which get the advantages 1 and -1. With `are_segments` an entry is one answer,
    as the segments of an episode."""
    entries: list[_Entry] = []
    for number, group in enumerate(examples):
        for index, (token_ids, mask) in enumerate(group):
            uid = SampleId(number, 0 if are_segments else index)
            length, trained = len(token_ids), _mask_first_token(mask)
            if length != len(mask):
                raise DataError(f"example {uid} has {length} token ids and a mask of {len(mask)}")
            if trained.any():
                versions = np.full(length, NOT_SAMPLED, np.int32)
                logprobs = np.zeros(length, np.float32)
                row = _Entry(uid, token_ids, trained, logprobs, versions, 1.0, segment=index)
                entries.append(row)
    if not entries:
        raise DataError(
            f"none of the {len(examples)} examples has a token to train on",
            fix="check the completion column and the length limits",
        )
    batch = _pack(entries, version=0)
    better_B = np.array([1.0 if uid.index == 0 else -1.0 for uid in batch.uids])
    advantages_N = np.where(batch.loss_mask_N, np.repeat(better_B, batch.lengths_B), 0.0)
    weights_N = token_weights(batch, aggregation, max_tokens=max_tokens)
    return replace(batch, advantages_N=advantages_N, weights_N=weights_N, scores_B=better_B)


def _mask_first_token(mask: BoolArray) -> BoolArray:
    """Mask the first token: it has no prefix, so the model gives it no probability."""
    trained = np.array(mask, dtype=np.bool_)
    trained[:1] = False
    return trained


def _segments(sample: Sample, score: float) -> list[_Entry]:
    return [
        _Entry(
            uid=sample.uid,
            token_ids=sample.token_ids[span],
            mask=_mask_first_token(sample.loss_mask[span]),
            logprobs=sample.logprobs[span],
            versions=sample.versions[span],
            temperature=sample.temperature,
            score=score,
            segment=number,
        )
        for number, span in enumerate(sample.segments)
    ]


def _pack(entries: Iterable[_Entry], *, version: int) -> Batch:
    ordered = sorted(entries, key=lambda entry: (entry.uid, entry.segment))
    distinct = {(entry.uid, entry.segment) for entry in ordered}
    assert len(distinct) == len(ordered), "a sample is in the batch twice"
    lengths = [len(entry.token_ids) for entry in ordered]
    return Batch(
        token_ids_N=np.concatenate([entry.token_ids for entry in ordered]),
        lengths_B=np.array(lengths, np.int32),
        uids=tuple(entry.uid for entry in ordered),
        group_B=np.array([entry.uid.group for entry in ordered], np.int32),
        temperature_B=np.array([entry.temperature for entry in ordered], np.float64),
        loss_mask_N=np.concatenate([entry.mask for entry in ordered]),
        logprobs_N=np.concatenate([entry.logprobs for entry in ordered]),
        versions_N=np.concatenate([entry.versions for entry in ordered]),
        advantages_N=np.zeros(sum(lengths)),
        weights_N=np.zeros(sum(lengths)),
        scores_B=np.array([entry.score for entry in ordered], np.float64),
        version=version,
    )


def _nothing_to_train(groups: Sequence[Group]) -> DataError:
    members = [member for group in groups for member in group.members]
    failed = sum(not member.score.ok for member in members)
    truncated = sum(member.sample.truncated for member in members)
    return DataError(
        f"none of {len(members)} samples in {len(groups)} groups has a token to train on: "
        f"{failed} failed scores, {truncated} truncated",
        fix="check the failed scores; with rollout.drop_truncated, raise sampling.max_tokens; "
        "widen algorithm.shaping.difficulty",
    )
