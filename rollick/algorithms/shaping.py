"""Score shaping: changes scores before advantages are computed. By default nothing changes.

    score -> + length penalty -> (score - mean) / std -> clip -> advantage

Failed scores are neither changed nor counted; the parts of a score do not change. `trained_members`
selects the samples that collate trains on: the others enter neither the sum nor the denominator of
the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from rollick.algorithms.score_statistics import RunningStatistics, mean, sample_std
from rollick.config.schema.advantages import ShapingConfig
from rollick.types import Group

Source = Literal["none", "group", "batch", "running"]
"""Which scores a mean or std is computed from."""

EPSILON = 1e-6


def penalise_length(group: Group, options: ShapingConfig, *, max_tokens: int) -> Group:
    """Add weight * soft_length_penalty to each score. Without a limit returns `group` itself."""
    limit = max_tokens if options.length_limit == "max_tokens" else options.length_limit
    if not limit:
        return group
    buffer, weight = options.length_buffer * limit, options.length_weight
    lengths = [sample.response_length for sample in group.samples]
    penalties = [soft_length_penalty(length, limit=limit, buffer=buffer) for length in lengths]
    pairs = zip(group.scores, penalties, strict=True)
    return _with_scores(group, [score + weight * penalty for score, penalty in pairs])


def soft_length_penalty(length: float, *, limit: float, buffer: float) -> float:
    """0 up to limit - buffer, then linear down to -1 at the limit and beyond.

    A hard cut would punish a correct but long response like a wrong one (DAPO, arXiv 2503.14476).
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def normalise_scores(
    groups: Sequence[Group], options: ShapingConfig, running: RunningStatistics
) -> Sequence[Group]:
    """(score - mean) / (std + epsilon), then clipped to +-clip (0: no clip).

    Scores with a std of 0 are not divided. `running` must already include the scores of these
    groups.
    """
    if (options.mean, options.std, options.clip) == ("none", "none", 0.0):
        return groups
    clip = options.clip
    batch_scores = valid_scores(groups)

    def shape_scores(group: Group) -> list[float]:
        mean_score, _ = _mean_and_std(options.mean, group.valid_scores, batch_scores, running)
        _, std = _mean_and_std(options.std, group.valid_scores, batch_scores, running)
        scale = std + EPSILON if std > 0 else 1.0
        values = [(score - mean_score) / scale for score in group.scores]
        return [max(-clip, min(clip, value)) for value in values] if clip else values

    return [_with_scores(group, shape_scores(group)) for group in groups]


def valid_scores(groups: Sequence[Group]) -> list[float]:
    """All scores that did not fail, in order."""
    return [score for group in groups for score in group.valid_scores]


def trained_members(
    group: Group, *, drop_truncated: bool = False, difficulty: tuple[float, float] | None = None
) -> list[bool]:
    """Marks the members to train on: with a valid score, and not truncated if `drop_truncated`.

    `difficulty` is the inclusive range of the group's mean score; outside it no member is marked.
    """
    in_range = difficulty is None or difficulty[0] <= mean(group.valid_scores) <= difficulty[1]
    return [
        in_range and member.score.ok and not (drop_truncated and member.sample.truncated)
        for member in group.members
    ]


def _mean_and_std(
    source: Source, in_group: Sequence[float], in_batch: Sequence[float], running: RunningStatistics
) -> tuple[float, float]:
    if source == "none":
        return 0.0, 0.0
    if source == "running":
        return running.mean, running.std
    values = in_group if source == "group" else in_batch
    return mean(values), sample_std(values)


def _with_scores(group: Group, scores: Iterable[float]) -> Group:
    """The group with these values of its members' scores; failed scores stay."""
    pairs = zip(group.members, scores, strict=True)
    members = [replace(m, score=replace(m.score, value=v)) if m.score.ok else m for m, v in pairs]
    return replace(group, members=tuple(members))
