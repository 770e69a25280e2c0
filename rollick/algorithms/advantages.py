"""Advantages that compare samples: scores in, one number per sample out.

Pure functions: (groups, options) -> per group, per member, a float that holds for all tokens of
the sample. Only scores that are a judgement count: a member whose reward failed is left out of
the statistics and gets 0.0 (collate leaves it out of the loss as well). A group of one judged
member has nothing to be compared with: 0.0. Nothing here masks tokens or drops groups; that is
selection.py and collate. Advantages with one value per token or per turn are in returns.py.

"Over the batch" counts every judged sample once, whatever its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum, isclose
from typing import NamedTuple

from rollick.algorithms.moments import centred, mean, spread, whitened
from rollick.config.advantages import (
    DrGrpoAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    LitePpoAdvantage,
    MaxRlAdvantage,
    ReinforcePpBaselineAdvantage,
    RlooAdvantage,
)
from rollick.errors import ConfigError
from rollick.types import FloatArray, Group, Score


class Gae(NamedTuple):
    """The advantage of each token, and the return that a critic's value of it is to meet."""

    advantages_T: FloatArray
    returns_T: FloatArray


Advantages = Sequence[Sequence[float | FloatArray | Gae]]
"""Per group, per member: a float (the same for all its tokens), one value per token, or both an
advantage and a return per token."""

AdvantageFn = Callable[[Sequence[Group]], Advantages]
"""An advantage with its options bound."""

_Normalise = Callable[[Sequence[float]], list[float]]


def dr_grpo(groups: Sequence[Group], options: DrGrpoAdvantage) -> Advantages:
    """R - mean of the group.

    No division by the group's std: it over-weights prompts that are nearly solved or nearly
    hopeless (Dr. GRPO, arXiv 2503.20783).
    """
    return [_over_judged(group, centred) for group in groups]


def grpo(groups: Sequence[Group], options: GrpoAdvantage) -> Advantages:
    """(R - mean of the group) / (std + epsilon), with the sample std (n - 1)."""
    return [
        _over_judged(group, lambda scores: whitened(scores, options.epsilon)) for group in groups
    ]


def rloo(groups: Sequence[Group], options: RlooAdvantage) -> Advantages:
    """R - mean of the others = n / (n - 1) * (R - mean of the group).

    The baseline does not contain the sample itself, so the gradient is unbiased for any group
    size (arXiv 2402.14740).
    """

    def leave_one_out(scores: Sequence[float]) -> list[float]:
        factor = len(scores) / max(len(scores) - 1, 1)
        return [factor * value for value in centred(scores)]

    return [_over_judged(group, leave_one_out) for group in groups]


def reinforce_pp_baseline(
    groups: Sequence[Group], options: ReinforcePpBaselineAdvantage
) -> Advantages:
    """R - mean of the group, then (A - mean) / (std + epsilon) over the batch.

    One scale for the whole batch: a group with little spread is not blown up (arXiv 2501.03262).
    """
    values = [_over_judged(group, centred) for group in groups]
    return _over_batch(groups, values, lambda flat: whitened(flat, options.epsilon))


def lite_ppo(groups: Sequence[Group], options: LitePpoAdvantage) -> Advantages:
    """(R - mean of the group) / (std of the batch's scores + epsilon) (arXiv 2508.08221)."""
    scores = [member.score.value for group in groups for member in group.members if member.score.ok]
    scale = spread(scores) + options.epsilon
    return [
        _over_judged(group, lambda own: [value / scale for value in centred(own)])
        for group in groups
    ]


def max_rl(groups: Sequence[Group], options: MaxRlAdvantage) -> Advantages:
    """(R - mean of the group) / mean of the group, for scores >= 0; a mean of 0 gives 0.

    The rarer a success, the more it weighs.
    """
    return [
        _over_judged(group, lambda scores, uid=group.uid: _over_mean(scores, uid))
        for group in groups
    ]


def _over_mean(scores: Sequence[float], uid: int) -> list[float]:
    if any(score < 0 for score in scores):
        raise ConfigError(
            f"advantage max_rl divides by the group's mean, and group {uid} has the score "
            f"{min(scores):g}",
            fix="use rewards that are never negative, or another advantage",
        )
    middle = mean(scores)
    return [value / middle if middle else 0.0 for value in centred(scores)]


def gdpo(groups: Sequence[Group], options: GdpoAdvantage) -> Advantages:
    """sum_k w_k (r_k - mean of the group) / (std + epsilon), then whitened over the batch.

    Each reward is normalised on its own: in a sum, the reward with the largest spread would hide
    the others. A member without one of the rewards gets nothing from that reward.
    """
    values = [_weighted_parts(group, options) for group in groups]
    return _over_batch(groups, values, lambda flat: whitened(flat, options.epsilon))


def _weighted_parts(group: Group, options: GdpoAdvantage) -> list[float]:
    parts = [_rewards(member.score) if member.score.ok else {} for member in group.members]
    own = {name: 1.0 for of_member in parts for name in _top_level(of_member)}
    weights = options.weights or own
    found = {name for of_member in parts for name in of_member}
    if found and not set(weights) & found:
        raise ConfigError(
            f"advantage gdpo weighs {', '.join(weights)}, and the samples of group {group.uid} "
            f"have the rewards {', '.join(sorted(found))}",
            fix="name rewards of every domain in algorithm.advantage.weights",
        )
    if not options.weights:
        _refuse_other_weights(group)
    columns = [(weight, _column(parts, name, options.epsilon)) for name, weight in weights.items()]
    return [fsum(weight * column[n] for weight, column in columns) for n in range(len(parts))]


def _column(parts: Sequence[Mapping[str, float]], name: str, epsilon: float) -> list[float]:
    """One reward, normalised over the members that have it; 0.0 for the others."""
    normal = iter(whitened([of[name] for of in parts if name in of], epsilon))
    return [next(normal) if name in of else 0.0 for of in parts]


def _rewards(score: Score) -> Mapping[str, float]:
    """The parts of a score, or its value where it has none."""
    return score.parts or {"score": score.value}


def _top_level(parts: Mapping[str, float]) -> Mapping[str, float]:
    """The rewards themselves, without the parts that a reward gave of its own (`reward/part`)."""
    return {
        name: value
        for name, value in parts.items()
        if not any(name.startswith(f"{other}/") for other in parts)
    }


def _refuse_other_weights(group: Group) -> None:
    """Weights of the domain's rewards went into the sum, which gdpo does not look at."""
    for member in group.members:
        if not member.score.ok:
            continue
        total = fsum(_top_level(_rewards(member.score)).values())
        if not isclose(total, member.score.value, rel_tol=1e-6, abs_tol=1e-6):
            raise ConfigError(
                f"sample {member.sample.uid} has rewards that add up to {total:g}, and the score "
                f"{member.score.value:g}: advantage gdpo would ignore the weights in it",
                fix="give the weights in algorithm.advantage.weights, by reward",
            )


def _over_judged(group: Group, compute: _Normalise) -> list[float]:
    """Apply `compute` to the scores that are a judgement; 0.0 for the others."""
    values = iter(compute([member.score.value for member in group.members if member.score.ok]))
    return [next(values) if member.score.ok else 0.0 for member in group.members]


def _over_batch(
    groups: Sequence[Group], values: Iterable[Sequence[float]], compute: _Normalise
) -> list[list[float]]:
    """Apply `compute` to the values of all judged members at once; 0.0 for the others."""
    judged = [[member.score.ok for member in group.members] for group in groups]
    flat = [
        value
        for ok, of_group in zip(judged, values, strict=True)
        for keep, value in zip(ok, of_group, strict=True)
        if keep
    ]
    found = iter(compute(flat))
    return [[next(found) if keep else 0.0 for keep in ok] for ok in judged]
