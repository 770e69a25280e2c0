"""Advantages with one value per sample, from the scores of groups.

Each function takes (groups, options) and returns, per group and member, a float for all tokens.
A member whose reward failed is excluded from the statistics and gets 0.0, as does the only valid
score of a group. Batch statistics count every sample once, regardless of its length.
returns.py computes advantages per token, turns.py per turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from math import fsum, isclose
from typing import NamedTuple

from rollick.algorithms.score_statistics import mean, sample_std, subtract_mean, whiten
from rollick.config.schema.advantages import BaselineAdvantage, GdpoAdvantage, NormalisedAdvantage
from rollick.errors import ConfigError
from rollick.types import FloatArray, Group, Score


class AdvantagesAndReturns(NamedTuple):
    """The advantage of each token, and the return: the target of the critic's value."""

    advantages_T: FloatArray
    returns_T: FloatArray


Advantages = Sequence[Sequence[float | FloatArray | AdvantagesAndReturns]]
"""Per group, per member: a float for all tokens, or one value (and return) per token."""

AdvantageFn = Callable[[Sequence[Group]], Advantages]
"""An advantage function with its options bound."""


def dr_grpo(groups: Sequence[Group], options: BaselineAdvantage | None = None) -> list[list[float]]:
    """R - mean of the group.

    No division by the group's std: it over-weights prompts that are nearly solved or nearly
    unsolvable (Dr. GRPO, arXiv 2503.20783).
    """
    return [_map_scores(group, subtract_mean) for group in groups]


def grpo(groups: Sequence[Group], options: NormalisedAdvantage) -> Advantages:
    """(R - mean of the group) / (std + epsilon), with the sample std (n - 1)."""
    normalise = partial(whiten, epsilon=options.epsilon)
    return [_map_scores(group, normalise) for group in groups]


def rloo(groups: Sequence[Group], options: BaselineAdvantage) -> Advantages:
    """R - mean of the others = n / (n - 1) * (R - mean of the group).

    The baseline does not contain the sample itself, so the gradient is unbiased for any group
    size (arXiv 2402.14740).
    """

    def leave_one_out(scores: Sequence[float]) -> list[float]:
        factor = len(scores) / max(len(scores) - 1, 1)
        return [factor * value for value in subtract_mean(scores)]

    return [_map_scores(group, leave_one_out) for group in groups]


def lite_ppo(groups: Sequence[Group], options: NormalisedAdvantage) -> Advantages:
    """(R - mean of the group) / (std of the batch's scores + epsilon) (arXiv 2508.08221)."""
    scores = [score for group in groups for score in group.valid_scores]
    scale = sample_std(scores) + options.epsilon
    return [[value / scale for value in _map_scores(group, subtract_mean)] for group in groups]


def max_rl(groups: Sequence[Group], options: BaselineAdvantage) -> Advantages:
    """(R - mean of the group) / mean of the group, for scores >= 0; a mean of 0 gives 0.

    The rarer a success, the larger its advantage.
    """
    return [_map_scores(group, partial(_divide_by_mean, uid=group.uid)) for group in groups]


def _divide_by_mean(scores: Sequence[float], uid: int) -> list[float]:
    if any(score < 0 for score in scores):
        raise ConfigError(
            f"advantage max_rl needs scores >= 0, and group {uid} has the score {min(scores):g}",
            fix="use rewards that are never negative, or another advantage",
        )
    average = mean(scores)
    return [value / average if average else 0.0 for value in subtract_mean(scores)]


def gdpo(groups: Sequence[Group], options: GdpoAdvantage) -> Advantages:
    """sum_k w_k (r_k - mean of the group) / (std + epsilon), then whitened over the batch.

    Each reward is normalised separately: in a sum, the one with the largest variance would dominate
    the others. A member that lacks a reward gets 0 for it.
    """
    values = [_weighted_sum(group, options) for group in groups]
    return whiten_samples(groups, values, options.epsilon)


def _weighted_sum(group: Group, options: GdpoAdvantage) -> list[float]:
    rewards = [_rewards_by_name(m.score) if m.score.ok else {} for m in group.members]
    weights = options.weights or {name: 1.0 for each in rewards for name in _drop_parts(each)}
    names = {name for each in rewards for name in each}
    if names and not set(weights) & names:
        raise ConfigError(
            f"advantage gdpo has weights for {', '.join(weights)}, and the samples of group "
            f"{group.uid} have the rewards {', '.join(sorted(names))}",
            fix="name rewards of every domain in algorithm.advantage.weights",
        )
    if not options.weights:
        _check_unweighted(group)
    columns = [(w, _normalise(rewards, name, options.epsilon)) for name, w in weights.items()]
    return [fsum(weight * column[n] for weight, column in columns) for n in range(len(rewards))]


def _normalise(rewards: Sequence[Mapping[str, float]], name: str, epsilon: float) -> list[float]:
    """The values of one reward, normalised over the members that have it; else 0.0."""
    normalised = iter(whiten([each[name] for each in rewards if name in each], epsilon))
    return [next(normalised) if name in each else 0.0 for each in rewards]


def _rewards_by_name(score: Score) -> Mapping[str, float]:
    """The parts of a score; if it has none, its value as `score`."""
    return score.parts or {"score": score.value}


def _drop_parts(rewards: Mapping[str, float]) -> Mapping[str, float]:
    """Without names such as `reward/part`, which are parts that a reward reports."""
    prefixes = tuple(f"{name}/" for name in rewards)
    return {name: value for name, value in rewards.items() if not name.startswith(prefixes)}


def _check_unweighted(group: Group) -> None:
    """Raises if the rewards of the domain have weights, which gdpo would ignore."""
    for member in (member for member in group.members if member.score.ok):
        total = fsum(_drop_parts(_rewards_by_name(member.score)).values())
        if not isclose(total, member.score.value, rel_tol=1e-6, abs_tol=1e-6):
            raise ConfigError(
                f"the rewards of sample {member.sample.uid} add up to {total:g}, and its score is "
                f"{member.score.value:g}: advantage gdpo would ignore the weights of the rewards",
                fix="give the weights in algorithm.advantage.weights, by reward",
            )


def _map_scores(group: Group, compute: Callable[[Sequence[float]], list[float]]) -> list[float]:
    """Apply `compute` to the valid scores; 0.0 for failed ones."""
    values = iter(compute(group.valid_scores))
    return [next(values) if member.score.ok else 0.0 for member in group.members]


def whiten_samples(
    groups: Sequence[Group], values: Sequence[Sequence[float]], epsilon: float
) -> list[list[float]]:
    """Whiten the values of all members with a valid score; 0.0 for the others."""
    valid = [[member.score.ok for member in group.members] for group in groups]
    flat = [v for flags, row in zip(valid, values, strict=True) for v in compress(row, flags)]
    whitened = iter(whiten(flat, epsilon))
    return [[next(whitened) if is_valid else 0.0 for is_valid in flags] for flags in valid]
