"""Groups and their advantages to one Batch; examples to one Batch (SFT).

Pure. The order of a batch depends on sample ids alone, never on who finished first. A sample
whose score failed, or that has no trained token, is not in the batch, and so in no denominator.

Shapes: B samples, N tokens over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollick.data.batch import Batch
from rollick.errors import DataError
from rollick.types import (
    NOT_SAMPLED,
    BoolArray,
    FloatArray,
    Group,
    IntArray,
    Sample,
    SampleId,
    ScoredSample,
)

Aggregation = Callable[..., npt.NDArray[np.float64]]
"""(counts_B of trained tokens, group_B, *, max_tokens) -> weight of each trained token, [B]."""

Advantage = float | FloatArray
"""One number for all tokens of a sample, or one for each of them."""

Example = tuple[IntArray, BoolArray]
"""Token ids and what of them is trained on (`ChatCodec.encode_example`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A sample on its way into a batch, with what is trained of it."""

    uid: SampleId
    token_ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    advantages: FloatArray
    temperature: float

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.mask))


def collate(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Advantage]],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    drop_truncated: bool = False,
) -> Batch:
    """The batch of all trainable samples. `advantages` has an entry for every member."""
    _check_counts(groups, advantages)
    entries: list[_Entry] = []
    for group, of_group in zip(groups, advantages, strict=True):
        for member, advantage in zip(group.members, of_group, strict=True):
            mask = _trained_mask(member, drop_truncated=drop_truncated)
            if mask.any():
                entries.append(_entry(member.sample, mask, advantage))
    if not entries:
        raise _nothing_to_train(groups, drop_truncated=drop_truncated)
    return _pack(entries, aggregation=aggregation, max_tokens=max_tokens)


def examples_to_batch(
    examples: Sequence[Example],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    first: int = 0,
) -> Batch:
    """The batch of examples to imitate; each is a group of its own, numbered from `first`."""
    entries: list[_Entry] = []
    for number, (token_ids, mask) in enumerate(examples, start=first):
        if len(token_ids) != len(mask):
            raise DataError(f"example {number} has {len(token_ids)} ids and {len(mask)} marks")
        trained = _without_first(mask)
        if trained.any():
            entries.append(_example_entry(SampleId(number, 0), token_ids, trained))
    if not entries:
        raise DataError(
            f"none of the {len(examples)} examples has a token to train on",
            fix="check the completion column and the length limits",
        )
    return _pack(entries, aggregation=aggregation, max_tokens=max_tokens)


def _check_counts(groups: Sequence[Group], advantages: Sequence[Sequence[Advantage]]) -> None:
    if len(groups) != len(advantages):
        raise DataError(
            f"the advantage function gave {len(advantages)} lists for {len(groups)} groups",
            fix="return one list for each group, with one entry for each member",
        )
    for group, of_group in zip(groups, advantages, strict=True):
        if len(group.members) != len(of_group):
            raise DataError(
                f"the advantage function gave {len(of_group)} values for group {group.uid}, "
                f"which has {len(group.members)} members",
                fix="return one value for each member, also for those whose score failed",
            )


def _trained_mask(member: ScoredSample, *, drop_truncated: bool) -> BoolArray:
    sample = member.sample
    if not member.score.ok or (drop_truncated and sample.truncated):
        return np.zeros(sample.length, np.bool_)
    return _without_first(sample.loss_mask)


def _without_first(mask: BoolArray) -> BoolArray:
    """Nothing comes before the first token, so the model gives it no probability."""
    trained = np.array(mask, dtype=np.bool_)
    trained[:1] = False
    return trained


def _entry(sample: Sample, mask: BoolArray, advantage: Advantage) -> _Entry:
    values = np.asarray(advantage, dtype=np.float64)
    if values.shape not in ((), (sample.length,)):
        raise DataError(
            f"the advantage of sample {sample.uid} has the shape {values.shape}, "
            f"and the sample {sample.length} tokens",
            fix="return a number, or one value for each token, prompt included",
        )
    # Outside the mask nothing is multiplied by these; zeros keep stray NaNs out of sums.
    values_T = np.where(mask, values, 0.0)
    if not np.isfinite(values_T).all():
        raise DataError(
            f"the advantage of sample {sample.uid} is not finite",
            fix="leave members with a failed score out of means (score.ok is False)",
        )
    return _Entry(
        uid=sample.uid,
        token_ids=sample.token_ids,
        mask=mask,
        logprobs=sample.logprobs,
        versions=sample.versions,
        advantages=values_T,
        temperature=sample.temperature,
    )


def _example_entry(uid: SampleId, token_ids: IntArray, mask: BoolArray) -> _Entry:
    length = len(token_ids)
    return _Entry(
        uid=uid,
        token_ids=token_ids,
        mask=mask,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, NOT_SAMPLED, np.int32),
        advantages=mask.astype(np.float64),
        temperature=1.0,
    )


def _pack(entries: Iterable[_Entry], *, aggregation: Aggregation, max_tokens: int) -> Batch:
    ordered = sorted(entries, key=lambda entry: entry.uid)
    uids = tuple(entry.uid for entry in ordered)
    assert len(set(uids)) == len(uids), "a sample is in the batch twice"
    counts_B = np.array([entry.trained for entry in ordered], np.int64)
    group_B = np.array([entry.uid.group for entry in ordered], np.int32)
    weights_B = aggregation(counts_B, group_B, max_tokens=max_tokens)
    weights = [np.where(e.mask, w, 0.0) for e, w in zip(ordered, weights_B, strict=True)]
    return Batch(
        token_ids_N=np.concatenate([entry.token_ids for entry in ordered]),
        lengths_B=np.array([len(entry.token_ids) for entry in ordered], np.int32),
        uids=uids,
        group_B=group_B,
        temperature_B=np.array([entry.temperature for entry in ordered], np.float64),
        loss_mask_N=np.concatenate([entry.mask for entry in ordered]),
        logprobs_N=np.concatenate([entry.logprobs for entry in ordered]),
        versions_N=np.concatenate([entry.versions for entry in ordered]),
        advantages_N=np.concatenate([entry.advantages for entry in ordered]),
        weights_N=np.concatenate(weights),
    )


def _nothing_to_train(groups: Sequence[Group], *, drop_truncated: bool) -> DataError:
    members = [member for group in groups for member in group.members]
    failed = sum(not member.score.ok for member in members)
    truncated = sum(member.sample.truncated for member in members) if drop_truncated else 0
    return DataError(
        f"none of {len(members)} samples in {len(groups)} groups has a token to train on: "
        f"{failed} failed scores, {truncated} truncated and dropped",
        fix="look at the failed scores; with drop_truncated, raise sampling.max_tokens",
    )
