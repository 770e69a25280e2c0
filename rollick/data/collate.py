"""Groups to one Batch; examples to one Batch (SFT, distillation, DPO).

Pure. The order of a batch depends on sample ids alone, never on who finished first. A sample
whose score failed, or that has no trained token, is not in the batch, and so in no denominator.
Advantages and weights of groups come later (pipelines/credit.py): they may look at what models
say of the batch's tokens.

Shapes: B samples, N tokens over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
    SampleId,
    ScoredSample,
)

Aggregation = Callable[..., npt.NDArray[np.float64]]
"""(counts_B of trained tokens, group_B, *, max_tokens) -> weight of each trained token, [B]."""

Chosen = Callable[[Group], Sequence[bool]]
"""Which members of a group are trained on, of those that are judged."""

Example = tuple[IntArray, BoolArray]
"""Token ids and what of them is trained on (`ChatCodec.encode_example`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A segment of a sample on its way into a batch, with what is trained of it."""

    uid: SampleId
    token_ids: IntArray
    mask: BoolArray
    logprobs: FloatArray
    versions: IntArray
    temperature: float
    score: float = 0.0
    segment: int = 0

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.mask))


def collate(groups: Sequence[Group], *, chosen: Chosen | None = None, version: int = 0) -> Batch:
    """The batch of all trainable samples, without advantages and weights (they are 0)."""
    entries: list[_Entry] = []
    for group in groups:
        picks = chosen(group) if chosen is not None else [True] * len(group.members)
        for member, pick in zip(group.members, picks, strict=True):
            if pick and member.score.ok and _without_first(member.sample.loss_mask).any():
                entries += _segments(member)
    if not entries:
        raise _nothing_to_train(groups)
    return _pack(entries, version=version)


def weigh(
    batch: Batch,
    aggregation: Aggregation,
    *,
    max_tokens: int,
    among_N: BoolArray | None = None,
) -> npt.NDArray[np.float64]:
    """[N]: the weight of each trained token among those of `among_N` (default: all); else 0."""
    kept_N = batch.loss_mask_N if among_N is None else batch.loss_mask_N & among_N
    kept = replace(batch, loss_mask_N=kept_N)
    weights_B = aggregation(kept.trained_B, batch.group_B, max_tokens=max_tokens)
    return np.where(kept_N, np.repeat(weights_B, batch.lengths_B), 0.0)


def examples_to_batch(
    examples: Sequence[Sequence[Example]],
    *,
    aggregation: Aggregation,
    max_tokens: int,
    first: int = 0,
) -> Batch:
    """The batch of answers to imitate. Each entry is a group, numbered from `first`: one answer,
    or the better and the worse of a pair, which get the advantages 1 and -1."""
    entries: list[_Entry] = []
    for number, group in enumerate(examples, start=first):
        for place, (token_ids, mask) in enumerate(group):
            uid = SampleId(number, place)
            if len(token_ids) != len(mask):
                raise DataError(f"example {uid} has {len(token_ids)} ids and {len(mask)} marks")
            trained = _without_first(mask)
            if trained.any():
                entries.append(_example_entry(uid, token_ids, trained))
    if not entries:
        raise DataError(
            f"none of the {len(examples)} examples has a token to train on",
            fix="check the completion column and the length limits",
        )
    batch = _pack(entries, version=0)
    better_B = np.array([1.0 if uid.index == 0 else -1.0 for uid in batch.uids])
    advantages_N = np.where(batch.loss_mask_N, np.repeat(better_B, batch.lengths_B), 0.0)
    weights_N = weigh(batch, aggregation, max_tokens=max_tokens)
    return replace(batch, advantages_N=advantages_N, weights_N=weights_N, scores_B=better_B)


def _without_first(mask: BoolArray) -> BoolArray:
    """Nothing comes before the first token, so the model gives it no probability."""
    trained = np.array(mask, dtype=np.bool_)
    trained[:1] = False
    return trained


def _segments(member: ScoredSample) -> list[_Entry]:
    """All of them, in order: the tokens of a sample stay neighbours."""
    sample = member.sample
    return [
        _Entry(
            uid=sample.uid,
            token_ids=sample.token_ids[span],
            mask=_without_first(sample.loss_mask[span]),
            logprobs=sample.logprobs[span],
            versions=sample.versions[span],
            temperature=sample.temperature,
            score=member.score.value,
            segment=number,
        )
        for number, span in enumerate(sample.segments)
    ]


def _example_entry(uid: SampleId, token_ids: IntArray, mask: BoolArray) -> _Entry:
    length = len(token_ids)
    return _Entry(
        uid=uid,
        token_ids=token_ids,
        mask=mask,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, NOT_SAMPLED, np.int32),
        temperature=1.0,
    )


def _pack(entries: Iterable[_Entry], *, version: int) -> Batch:
    ordered = sorted(entries, key=lambda entry: (entry.uid, entry.segment))
    uids = tuple(entry.uid for entry in ordered)
    known = {(entry.uid, entry.segment) for entry in ordered}
    assert len(known) == len(ordered), "a sample is in the batch twice"
    lengths = [len(entry.token_ids) for entry in ordered]
    return Batch(
        token_ids_N=np.concatenate([entry.token_ids for entry in ordered]),
        lengths_B=np.array(lengths, np.int32),
        uids=uids,
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
        fix="look at the failed scores; with rollout.drop_truncated, raise sampling.max_tokens; "
        "widen algorithm.shaping.difficulty",
    )
