"""Shaping: what happens to scores before they become advantages. Pure; the default is nothing.

    score -> + length penalty -> (score - mean) / std -> clip -> advantage

Mean and std come each from the group, the batch, running statistics or nowhere. Only judged
scores are changed and counted; the parts of a score stay as the rewards gave them. Masks say what
is trained on at all: a masked sample must enter neither sum nor denominator, so they are for
collate and selection, and no score is changed for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from rollick.algorithms.moments import mean, spread
from rollick.config.advantages import ShapingConfig
from rollick.errors import ConfigError
from rollick.types import Group, ScoredSample

Source = Literal["none", "group", "batch", "running"]
"""Where a mean or a std comes from."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and spread of every score so far; a few numbers, so that a checkpoint can hold them."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1); 0 before there are two scores."""
        return sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def updated(self, values: Iterable[float]) -> RunningMoments:
        """With these scores, too. One by one (Welford): a sum of squares would lose its digits."""
        count, middle, squares = self.count, self.mean, self.squares
        for value in values:
            count += 1
            step = value - middle
            middle += step / count
            squares += step * (value - middle)
        return RunningMoments(count, middle, squares)

    def to_state(self) -> dict[str, float]:
        """As JSON can hold it."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> RunningMoments:
        """The opposite of to_state; a missing key is an error, never a default."""
        return cls(int(state["count"]), float(state["mean"]), float(state["squares"]))


def shape_scores(
    groups: Sequence[Group],
    options: ShapingConfig,
    *,
    max_tokens: int,
    running: RunningMoments | None = None,
) -> Sequence[Group]:
    """The groups with the scores that the recipe's algorithm.shaping makes of them.

    max_tokens: what length_limit means by that word. running: with the scores of these groups.
    """
    groups = penalise_length(groups, options, max_tokens=max_tokens)
    return normalise_scores(
        groups, mean_from=options.mean, std_from=options.std, clip=options.clip, running=running
    )


def penalise_length(
    groups: Sequence[Group], options: ShapingConfig, *, max_tokens: int
) -> Sequence[Group]:
    """Score + weight * soft length penalty of the drawn tokens; the groups as they are without."""
    limit = max_tokens if options.length_limit == "max_tokens" else options.length_limit
    if not limit:
        return groups
    buffer = options.length_buffer * limit

    def penalised(member: ScoredSample) -> float:
        length = member.sample.response_length
        penalty = soft_length_penalty(length, limit=limit, buffer=buffer)
        return member.score.value + options.length_weight * penalty

    return [
        _with_scores(group, [penalised(member) for member in _judged(group)]) for group in groups
    ]


def soft_length_penalty(length: float, *, limit: float, buffer: float) -> float:
    """0 up to limit - buffer, then linear to -1 at the limit; -1 beyond.

    A hard cut would punish a sound but long line of thought like a wrong one (DAPO, arXiv
    2503.14476).
    """
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def normalise_scores(
    groups: Sequence[Group],
    *,
    mean_from: Source = "none",
    std_from: Source = "none",
    clip: float = 0.0,
    epsilon: float = 1e-6,
    running: RunningMoments | None = None,
) -> Sequence[Group]:
    """(score - mean) / (std + epsilon), then within +-clip (0 is off).

    Each of mean and std is from its own source. Scores without any spread have no scale: they
    are not divided. Update running statistics first, so that the first batch is in them.
    """
    if (mean_from, std_from, clip) == ("none", "none", 0.0):
        return groups
    batch = judged_scores(groups)

    def shaped(scores: Sequence[float]) -> list[float]:
        middle, std = 0.0, 0.0
        if mean_from != "none":
            middle = _moments(mean_from, scores, batch, running)[0]
        if std_from != "none":
            std = _moments(std_from, scores, batch, running)[1]
        scale = std + epsilon if std > 0 else 1.0
        values = [(score - middle) / scale for score in scores]
        return [max(-clip, min(clip, value)) for value in values] if clip else values

    return [_with_scores(group, shaped(_scores(group))) for group in groups]


def judged_scores(groups: Sequence[Group]) -> list[float]:
    """Every score that is a judgement, in order."""
    return [score for group in groups for score in _scores(group)]


def trained_members(
    group: Group, *, drop_truncated: bool = False, difficulty: tuple[float, float] | None = None
) -> list[bool]:
    """Which members are trained on: judged, not truncated, of a prompt that is neither too hard
    nor too easy (the mean of its judged scores within `difficulty`, ends included).
    """
    scores = _scores(group)
    suits = difficulty is None or difficulty[0] <= mean(scores) <= difficulty[1]
    return [
        suits and member.score.ok and not (drop_truncated and member.sample.truncated)
        for member in group.members
    ]


def _moments(
    source: Source, own: Sequence[float], batch: Sequence[float], running: RunningMoments | None
) -> tuple[float, float]:
    if source == "running":
        if running is None:
            raise ConfigError(
                "shaping with running statistics has none to read",
                fix="keep RunningMoments with the run's state, or use batch statistics",
            )
        return running.mean, running.std
    values = own if source == "group" else batch
    return mean(values), spread(values)


def _judged(group: Group) -> list[ScoredSample]:
    return [member for member in group.members if member.score.ok]


def _scores(group: Group) -> list[float]:
    return [member.score.value for member in _judged(group)]


def _with_scores(group: Group, scores: Iterable[float]) -> Group:
    """The group with these scores for its judged members, in their order."""
    values = iter(scores)
    members = tuple(
        replace(member, score=replace(member.score, value=next(values)))
        if member.score.ok
        else member
        for member in group.members
    )
    return replace(group, members=members)
