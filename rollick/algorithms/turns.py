"""Advantages with one value per turn: step returns and GiGPO.

Each function takes (groups, options) and returns, per group and member, one value per token, equal
for all tokens of a turn (a run of the loss mask). Without `Score.turn_rewards`, the last turn gets
the score. Without `Sample.states`, GiGPO accepts only samples of one turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain

import numpy as np

from rollick.algorithms.advantages import Advantages
from rollick.algorithms.returns import Values, discount, token_rewards, turn_spans
from rollick.algorithms.score_statistics import whiten
from rollick.config.schema.advantages import GigpoAdvantage, StepReturnAdvantage
from rollick.errors import DataError
from rollick.types import BoolArray, Group, ScoredSample


def step_return(groups: Sequence[Group], options: StepReturnAdvantage) -> Advantages:
    """R_k = r_k + gamma R_{k+1}: discounted between turns, never inside one.

    With `whiten`: (R - mean) / (std + epsilon) over all turns of the batch, each counted once.
    """
    members = [member for group in groups for member in group.members]
    returns = [
        turn_returns(turn_rewards(member), gamma=options.gamma) if member.score.ok else []
        for member in members
    ]
    if options.whiten:
        whitened = iter(whiten([*chain.from_iterable(returns)], options.epsilon))
        returns = [[next(whitened) for _ in member_returns] for member_returns in returns]
    advantages = iter(
        expand_turns(member_returns, member.sample.loss_mask) if member.score.ok else 0.0
        for member_returns, member in zip(returns, members, strict=True)
    )
    return [[next(advantages) for _ in group.members] for group in groups]


def gigpo(groups: Sequence[Group], options: GigpoAdvantage) -> Advantages:
    """w_e * norm(episode return) over the group + w_s * norm(step return) over the group's turns
    that start in equal states (arXiv 2505.10978)."""
    return [_gigpo_group(group, options) for group in groups]


def _gigpo_group(group: Group, options: GigpoAdvantage) -> list[float | Values]:
    valid = [member for member in group.members if member.score.ok]
    rewards = [turn_rewards(member) for member in valid]
    states = [turn_states(member) for member in valid]
    values = iter(gigpo_turn_advantages(rewards, states, options))
    return [
        expand_turns(next(values), member.sample.loss_mask) if member.score.ok else 0.0
        for member in group.members
    ]


def turn_rewards(member: ScoredSample) -> list[float]:
    """The reward of each turn, minus its tokens' KL penalties. The sum over turns is the score."""
    rewards_T = token_rewards(member)
    return [float(rewards_T[span].sum()) for span in turn_spans(member.sample.loss_mask)]


def turn_states(member: ScoredSample) -> tuple[Hashable, ...]:
    """The key of the state before each turn; for one turn without states, the prompt's uid."""
    sample = member.sample
    count = len(turn_spans(sample.loss_mask))
    states = sample.states or ((sample.prompt.uid,) if count == 1 else ())
    if len(states) != count:
        raise DataError(
            f"sample {sample.uid} has {count} turns and {len(states)} states; gigpo compares "
            "steps from equal states",
            fix="record the state before each turn, or use the advantage step_return",
        )
    return states


def turn_returns(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """R_k = r_k + gamma R_{k+1} over turns."""
    return [float(value) for value in discount(np.asarray(rewards, np.float64), gamma)]


def expand_turns(values: Sequence[float], mask_T: BoolArray) -> Values:
    """Repeat the value of each turn for all its tokens; 0 outside turns."""
    values_T = np.zeros(len(mask_T))
    for span, value in zip(turn_spans(mask_T), values, strict=True):
        values_T[span] = value
    return values_T


def gigpo_turn_advantages(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    options: GigpoAdvantage,
) -> list[list[float]]:
    """GiGPO of one group, from the reward of each turn and the key of the state before it.

    norm is (x - mean) / (std + epsilon), and 0 for a single value.
    """
    episodes = whiten([float(sum(sample_rewards)) for sample_rewards in rewards], options.epsilon)
    returns = [turn_returns(sample_rewards, gamma=options.gamma) for sample_rewards in rewards]
    visits: dict[Hashable, list[tuple[int, int]]] = {}
    for sample, sample_states in enumerate(states):
        for turn, state in enumerate(sample_states):
            visits.setdefault(state, []).append((sample, turn))
    steps = [[0.0] * len(sample_rewards) for sample_rewards in rewards]
    for turns in visits.values():
        values = whiten([returns[sample][turn] for sample, turn in turns], options.epsilon)
        for (sample, turn), value in zip(turns, values, strict=True):
            steps[sample][turn] = value
    return [
        [options.episode_weight * episode + options.step_weight * step for step in sample_steps]
        for episode, sample_steps in zip(episodes, steps, strict=True)
    ]
