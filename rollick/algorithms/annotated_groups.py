"""Group operations that need a batch's annotations: copy them, mask untrained members, subtract
the KL penalty.

`rows` maps each sample to its rows of the batch (Batch.rows_by_sample). A member without rows is
not trained on and has no annotations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollick.data.batch import Batch
from rollick.types import Annotations, FloatArray, Group, SampleId, Score, ScoredSample

RowRanges = Mapping[SampleId, range]


def annotate_group(group: Group, batch: Batch, rows: RowRanges) -> Group:
    """Add the batch's log-probs and values to the group's members."""
    offsets, last_B = batch.offsets_B1, batch.last_values_B

    def annotations_of(uid: SampleId) -> Annotations:
        sample_rows = rows.get(uid)
        if sample_rows is None:
            return Annotations()
        span = slice(offsets[sample_rows.start], offsets[sample_rows.stop])

        def select(values_N: FloatArray | None) -> FloatArray | None:
            return None if values_N is None else values_N[span]

        return Annotations(
            old=select(batch.old_logprobs_N),
            reference=select(batch.reference_logprobs_N),
            teacher=select(batch.teacher_logprobs_N),
            values=select(batch.values_N),
            last_value=0.0 if last_B is None else float(last_B[sample_rows.stop - 1]),
        )

    return _with_members(
        group, (replace(m, annotations=annotations_of(m.sample.uid)) for m in group.members)
    )


def drop_untrained_members(group: Group, rows: RowRanges) -> Group:
    """Mark the scores of members without rows as failed, so that no statistic uses them."""
    failed = Score.failed("not trained on")
    return _with_members(
        group, (m if m.sample.uid in rows else replace(m, score=failed) for m in group.members)
    )


def subtract_kl_penalty(groups: Sequence[Group], coefficient: float) -> tuple[list[Group], float]:
    """Subtract coefficient * KL (k1 estimator) per token. Also returns the summed KL."""
    total = 0.0

    def apply_penalty(member: ScoredSample) -> ScoredSample:
        nonlocal total
        if not member.score.ok:
            return member
        kl_T = _k1_to_reference(member)
        total += float(kl_T.sum())
        penalty_T = coefficient * kl_T
        return replace(
            member,
            score=replace(member.score, value=member.score.value - float(penalty_T.sum())),
            annotations=replace(member.annotations, penalty=penalty_T),
        )

    penalised = [_with_members(group, map(apply_penalty, group.members)) for group in groups]
    return penalised, total


def _k1_to_reference(member: ScoredSample) -> npt.NDArray[np.float64]:
    """log pi_old - log pi_ref of trained tokens, else 0; without pi_old, uses mu (the engine)."""
    sample, annotations = member.sample, member.annotations
    assert annotations.reference is not None, "a KL in the reward needs reference log-probs"
    old_T = sample.logprobs if annotations.old is None else annotations.old
    kl_T = np.zeros(sample.length)
    trained = np.flatnonzero(sample.loss_mask)
    kl_T[trained] = old_T[trained].astype(np.float64) - annotations.reference[trained]
    return kl_T


def _with_members(group: Group, members: Iterable[ScoredSample]) -> Group:
    return replace(group, members=tuple(members))
