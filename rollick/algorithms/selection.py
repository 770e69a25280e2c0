"""Selection: which groups are worth a gradient. Pure; the rollout drops and refills.

A group without signal is dropped. Which prompts are worth a group is for data/curriculum.py.
Only scores that are a judgement are looked at: a failed reward is neither signal nor its absence.
"""

from __future__ import annotations

from typing import Literal

from rollick.types import Group

DropReason = Literal["no_scores", "no_signal", "too_hard", "too_easy"]
"""no_scores: every reward failed. no_signal: the scores do not differ, so every advantage is 0.
too_hard, too_easy: the mean score is out of the range that was asked for."""


def has_signal(group: Group, *, min_spread: float) -> bool:
    """Whether the judged scores differ by more than `min_spread`."""
    scores = [member.score.value for member in group.members if member.score.ok]
    return len(scores) > 1 and max(scores) - min(scores) > min_spread


def judge_group(
    group: Group,
    *,
    min_spread: float,
    drop_no_signal: bool = True,
    scores: tuple[float, float] | None = None,
) -> DropReason | None:
    """Why the group is to be dropped, or None if it is to be trained on.

    scores: the range that the group's mean score must lie in.
    """
    judged = [member.score.value for member in group.members if member.score.ok]
    if not judged:
        return "no_scores"
    if drop_no_signal and not has_signal(group, min_spread=min_spread):
        return "no_signal"
    mean = sum(judged) / len(judged)
    if scores is not None and not scores[0] <= mean <= scores[1]:
        return "too_hard" if mean < scores[0] else "too_easy"
    return None
