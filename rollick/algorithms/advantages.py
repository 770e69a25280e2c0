"""Advantages: how the scores of a group become one number per sample.

Pure functions: (groups, options) -> per group, per member, a float that holds for all tokens of
the sample. Only scores that are a judgement count: a member whose reward failed is left out of
the statistics and gets 0.0 (collate leaves it out of the loss as well). Nothing here masks
tokens or drops groups; that is selection.py and collate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, sqrt

from rollick.config.advantages import DrGrpoAdvantage, GrpoAdvantage
from rollick.types import FloatArray, Group

Advantages = list[list[float | FloatArray]]
"""Per group, per member: a float (the same for all its tokens) or one value per token."""

AdvantageFn = Callable[[Sequence[Group]], Advantages]
"""An advantage with its options bound."""


def dr_grpo(groups: Sequence[Group], options: DrGrpoAdvantage) -> Advantages:
    """R - mean of the group.

    No division by the group's std: it over-weights prompts that are nearly solved or nearly
    hopeless (Dr. GRPO, arXiv 2503.20783).
    """
    return [_over_judged(group, _centre) for group in groups]


def grpo(groups: Sequence[Group], options: GrpoAdvantage) -> Advantages:
    """(R - mean of the group) / (std + epsilon), with the sample std (n - 1)."""

    def normalise(scores: Sequence[float]) -> list[float]:
        centred = _centre(scores)
        if len(scores) < 2:
            return centred
        std = sqrt(fsum(value * value for value in centred) / (len(scores) - 1))
        return [value / (std + options.epsilon) for value in centred]

    return [_over_judged(group, normalise) for group in groups]


def _centre(scores: Sequence[float]) -> list[float]:
    # The mean of equal floats can differ from them in the last bit; grpo would then divide that
    # bit by an equally small std. Equal scores carry no signal, so they give exactly 0.
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = fsum(scores) / len(scores)
    return [score - mean for score in scores]


def _over_judged(
    group: Group, compute: Callable[[Sequence[float]], list[float]]
) -> list[float | FloatArray]:
    """Apply `compute` to the scores that are a judgement; 0.0 for the others."""
    values = iter(compute([member.score.value for member in group.members if member.score.ok]))
    return [next(values) if member.score.ok else 0.0 for member in group.members]
