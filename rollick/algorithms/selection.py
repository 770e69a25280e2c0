"""Group selection: which groups are worth training on. The rollout drops the others and refills.

Failed scores are ignored. Which prompts to sample is decided in data/curriculum.py.
"""

from __future__ import annotations

from typing import Literal

from rollick.types import Group

DropReason = Literal["no_scores", "no_signal", "too_hard", "too_easy"]
"""no_scores: every reward failed. no_signal: the scores are equal, so every advantage is 0.
too_hard, too_easy: the mean score is below or above the configured range."""


def has_signal(group: Group, *, min_spread: float) -> bool:
    """Whether the valid scores differ by more than `min_spread`."""
    scores = group.valid_scores
    return len(scores) > 1 and max(scores) - min(scores) > min_spread


def group_drop_reason(
    group: Group,
    *,
    min_spread: float,
    drop_no_signal: bool = True,
    scores: tuple[float, float] | None = None,
) -> DropReason | None:
    """Why to drop the group, or None to train on it. `scores` is the range of its mean score."""
    valid = group.valid_scores
    if not valid:
        return "no_scores"
    if drop_no_signal and not has_signal(group, min_spread=min_spread):
        return "no_signal"
    mean = sum(valid) / len(valid)
    if scores is not None and not scores[0] <= mean <= scores[1]:
        return "too_hard" if mean < scores[0] else "too_easy"
    return None
