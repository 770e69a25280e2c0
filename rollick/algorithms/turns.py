"""Advantages with a value per turn: step returns and GiGPO.

Pure functions: (groups, options) -> per group, per member, one value per token, the same for all
tokens of a turn. A turn is a run of the loss mask; what it earned is in the score's `turns`, the
state that it began in is in the sample's `states`. Without these a sample is one turn from the
state that its prompt describes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from rollick.algorithms.advantages import Advantages
from rollick.algorithms.moments import whitened
from rollick.algorithms.returns import Values, discounted, token_rewards, turns_of
from rollick.config.advantages import GigpoAdvantage, StepReturnAdvantage
from rollick.errors import DataError
from rollick.types import BoolArray, Group, ScoredSample


def step_return(groups: Sequence[Group], options: StepReturnAdvantage) -> Advantages:
    """R_k = r_k + gamma R_{k+1}: discounted between turns, never inside one.

    With `whiten`: (R - mean) / (std + epsilon) over all turns of the batch, each counted once.
    """
    members = [member for group in groups for member in group.members]
    returns = [
        segment_returns(turn_rewards(member), gamma=options.gamma) if member.score.ok else []
        for member in members
    ]
    if options.whiten:
        known = iter(whitened([value for of in returns for value in of], options.epsilon))
        returns = [[next(known) for _ in of] for of in returns]
    flat = iter(
        over_turns(of, member.sample.loss_mask) if member.score.ok else 0.0
        for of, member in zip(returns, members, strict=True)
    )
    return [[next(flat) for _ in group.members] for group in groups]


def gigpo(groups: Sequence[Group], options: GigpoAdvantage) -> Advantages:
    """w_e * norm over the group of the episode's return + w_s * norm over equal states of the
    step's return, one task group at a time (arXiv 2505.10978)."""
    return [_gigpo_of(group, options) for group in groups]


def _gigpo_of(group: Group, options: GigpoAdvantage) -> list[float | Values]:
    judged = [member for member in group.members if member.score.ok]
    values = iter(
        gigpo_of_turns(
            [turn_rewards(member) for member in judged],
            [states_of(member) for member in judged],
            gamma=options.gamma,
            episode_weight=options.episode_weight,
            step_weight=options.step_weight,
            epsilon=options.epsilon,
        )
    )
    return [
        over_turns(next(values), member.sample.loss_mask) if member.score.ok else 0.0
        for member in group.members
    ]


def turn_rewards(member: ScoredSample) -> list[float]:
    """What each turn earned, penalties of its tokens included; their sum is the score."""
    rewards_T = token_rewards(member)
    return [float(rewards_T[span].sum()) for span in turns_of(member.sample.loss_mask)]


def states_of(member: ScoredSample) -> tuple[Hashable, ...]:
    """The key of the state before each turn; of a single turn, that is what the prompt says."""
    sample = member.sample
    count = len(turns_of(sample.loss_mask))
    states = sample.states or ((sample.prompt.uid,) if count == 1 else ())
    if len(states) != count:
        raise DataError(
            f"sample {sample.uid} has {count} turns and {len(states)} states; gigpo compares "
            "steps from equal states",
            fix="give the state before each turn, or use the advantage step_return",
        )
    return states


def segment_returns(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """R_k = r_k + gamma R_{k+1}, turn by turn."""
    return [float(value) for value in discounted(np.asarray(rewards, np.float64), gamma)]


def over_turns(values: Sequence[float], mask_T: BoolArray) -> Values:
    """A number per turn as one per token; 0 outside turns."""
    spans = turns_of(mask_T)
    if len(spans) != len(values):
        raise DataError(
            f"{len(values)} values for the {len(spans)} turns of a sample",
            fix="give one value for each run of the loss mask",
        )
    values_T = np.zeros(len(mask_T))
    for span, value in zip(spans, values, strict=True):
        values_T[span] = value
    return values_T


def gigpo_of_turns(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    *,
    gamma: float,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    epsilon: float = 1e-6,
) -> list[list[float]]:
    """Of one task group: per sample, per turn, a reward and a key of the state before the turn.

    norm is (x - mean) / (std + epsilon), and 0 where there is nothing to compare with.
    """
    if [len(of) for of in rewards] != [len(of) for of in states]:
        raise DataError("gigpo needs one state for each reward of each sample")
    episodes = whitened([float(sum(of_sample)) for of_sample in rewards], epsilon)
    returns = [segment_returns(of_sample, gamma=gamma) for of_sample in rewards]
    met: dict[Hashable, list[tuple[int, int]]] = {}
    for sample, of_sample in enumerate(states):
        for turn, state in enumerate(of_sample):
            met.setdefault(state, []).append((sample, turn))
    steps = [[0.0] * len(of_sample) for of_sample in rewards]
    for places in met.values():
        values = whitened([returns[sample][turn] for sample, turn in places], epsilon)
        for (sample, turn), value in zip(places, values, strict=True):
            steps[sample][turn] = value
    return [
        [episode_weight * episode + step_weight * step for step in of_sample]
        for episode, of_sample in zip(episodes, steps, strict=True)
    ]
