"""Advantages with a value per token or per turn: returns, GAE, GiGPO, on-policy distillation.

Pure. Shapes: T tokens of one sample, prompt and observations included; mask_T is its loss mask.
Only tokens inside the mask are steps: a discount, a TD error or a statistic never goes through
an observation, a prompt or padding, and results are 0 outside. A turn is a run of mask_T.

reinforce and reinforce_pp take groups as a recipe names them. The others take streams that a
Group does not carry (values, rewards and states by turn, a teacher's log-probs) as arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollick.algorithms.advantages import Advantages
from rollick.algorithms.moments import whitened
from rollick.config.advantages import ReinforceAdvantage, ReinforcePpAdvantage
from rollick.errors import ConfigError, DataError
from rollick.types import BoolArray, FloatArray, Group, Sample, ScoredSample

Stream = npt.NDArray[np.float64]
TokenStreams = Sequence[Sequence[FloatArray]]
"""Per group, per member: one number for each token of the sample."""


class Gae(NamedTuple):
    """The advantage of each token, and the target of its value (advantage + value)."""

    advantages_T: Stream
    returns_T: Stream


def reinforce(groups: Sequence[Group], options: ReinforceAdvantage) -> Advantages:
    """G_t = r_t + gamma G_{t+1}, the score being the reward of the last trained token.

    With `whiten`: (G - mean) / (std + epsilon) over all trained tokens of the batch.
    """
    returns = [
        [_token_return(member, gamma=options.gamma) for member in group.members] for group in groups
    ]
    return _whitened_tokens(groups, returns, options.epsilon) if options.whiten else returns


def reinforce_pp(
    groups: Sequence[Group], options: ReinforcePpAdvantage, *, kl: TokenStreams | None = None
) -> Advantages:
    """The return with r_t - kl_coefficient * kl_t as reward, whitened over the batch's tokens.

    No group baseline, so one sample per prompt is enough (arXiv 2501.03262). `kl` is k1 to the
    reference, log pi_old - log pi_ref, of every token of every member.
    """
    if options.kl_coefficient and kl is None:
        raise ConfigError(
            f"algorithm.advantage.kl_coefficient={options.kl_coefficient:g} needs the KL to a "
            "reference of each token, and there is none when advantages are computed",
            fix="set it to 0, or use algorithm.kl, which is in the loss",
        )
    penalties = _penalties(groups, kl, options.kl_coefficient)
    returns = [
        [
            _token_return(member, gamma=options.gamma, penalty_T=penalty_T)
            for member, penalty_T in zip(group.members, of_group, strict=True)
        ]
        for group, of_group in zip(groups, penalties, strict=True)
    ]
    return _whitened_tokens(groups, returns, options.epsilon)


def _penalties(
    groups: Sequence[Group], kl: TokenStreams | None, coefficient: float
) -> list[list[Stream | None]]:
    if kl is None or not coefficient:
        return [[None] * len(group.members) for group in groups]
    if [len(of_group) for of_group in kl] != [len(group.members) for group in groups]:
        raise ConfigError("the KL does not have one stream for each member of each group")
    return [
        [
            coefficient * _stream(kl_T, sample, "the KL")
            for kl_T, sample in zip(of_group, group.samples, strict=True)
        ]
        for of_group, group in zip(kl, groups, strict=True)
    ]


def _stream(values_T: FloatArray, sample: Sample, what: str) -> Stream:
    found_T = np.asarray(values_T, np.float64)
    if found_T.shape != (sample.length,):
        raise ConfigError(
            f"{what} of sample {sample.uid} has shape {found_T.shape}, "
            f"the sample has {sample.length} tokens",
            fix="give one value for each token, prompt included",
        )
    return found_T


def _token_return(member: ScoredSample, *, gamma: float, penalty_T: Stream | None = None) -> Stream:
    mask_T = member.sample.loss_mask
    trained = np.flatnonzero(mask_T)
    rewards_T = np.zeros(len(mask_T))
    if not member.score.ok or not len(trained):
        return rewards_T
    if penalty_T is not None:
        # By index, not by product with the mask: the KL outside may be infinite.
        rewards_T[trained] -= penalty_T[trained]
    rewards_T[trained[-1]] += member.score.value
    return discounted_returns(rewards_T, mask_T, gamma=gamma)


def _whitened_tokens(
    groups: Sequence[Group], returns: Sequence[Sequence[Stream]], epsilon: float
) -> list[list[Stream]]:
    """Over the trained tokens of judged members; the rest is 0."""
    masks = [
        [member.sample.loss_mask & member.score.ok for member in group.members] for group in groups
    ]
    pairs = [pair for of in zip(returns, masks, strict=True) for pair in zip(*of, strict=True)]
    values = np.concatenate([values_T[mask_T] for values_T, mask_T in pairs] or [np.zeros(0)])
    # Equal values carry no signal: exactly 0, whatever the rounding of their mean.
    if not len(values) or values.min() == values.max():
        return [[np.zeros(len(values_T)) for values_T in of_group] for of_group in returns]
    middle, scale = values.mean(), values.std(ddof=1) + epsilon
    return [
        [
            np.where(mask_T, (values_T - middle) / scale, 0.0)
            for values_T, mask_T in zip(of_group, of_masks, strict=True)
        ]
        for of_group, of_masks in zip(returns, masks, strict=True)
    ]


def discounted_returns(rewards_T: FloatArray, mask_T: BoolArray, *, gamma: float) -> Stream:
    """G_t = r_t + gamma G_{t+1}, t+1 being the next token inside the mask; 0 outside."""
    return _scatter(_discounted(_inside(rewards_T, mask_T, "rewards"), gamma), mask_T)


def gae(
    rewards_T: FloatArray,
    values_T: FloatArray,
    mask_T: BoolArray,
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> Gae:
    """d_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k d_{t+k}.

    values_T[t] is the critic's value before token t is drawn. t+1 is the next token inside the
    mask: the value after an action is that before the next action, however long the observation
    between them. `bootstrap` is the value after the last one: 0 after a sample that terminated;
    after a truncated one the critic's value there, if cut samples shall not count as ended.
    """
    values = np.asarray(values_T, np.float64)[mask_T]
    following = np.append(values[1:], bootstrap)[: len(values)]
    errors = _inside(rewards_T, mask_T, "rewards") + gamma * following - values
    advantages = _discounted(errors, gamma * lam)
    return Gae(_scatter(advantages, mask_T), _scatter(advantages + values, mask_T))


def turns(mask_T: BoolArray) -> list[slice]:
    """The runs of the mask, in order: the policy's turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask_T, np.int8), [0]])))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def segment_returns(rewards: Sequence[float], *, gamma: float) -> list[float]:
    """R_k = r_k + gamma R_{k+1}, turn by turn."""
    return [float(value) for value in _discounted(np.asarray(rewards, np.float64), gamma)]


def step_return(rewards: Sequence[float], mask_T: BoolArray, *, gamma: float) -> Stream:
    """The return of its turn for each token: discounted between turns, never inside one."""
    return over_turns(segment_returns(rewards, gamma=gamma), mask_T)


def over_turns(values: Sequence[float], mask_T: BoolArray) -> Stream:
    """A number per turn as one per token; 0 outside turns."""
    spans = turns(mask_T)
    if len(spans) != len(values):
        raise DataError(
            f"{len(values)} values for the {len(spans)} turns of a sample",
            fix="give one value for each run of the loss mask",
        )
    values_T = np.zeros(len(mask_T))
    for span, value in zip(spans, values, strict=True):
        values_T[span] = value
    return values_T


def gigpo(
    rewards: Sequence[Sequence[float]],
    states: Sequence[Sequence[Hashable]],
    *,
    gamma: float,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    epsilon: float = 1e-6,
) -> list[list[float]]:
    """w_e * norm over the group of sum_k r_k + w_s * norm over equal states of the step return.

    One task group: per sample, per turn, a reward and a key of the state before the turn; the
    answer has the same shape (over_turns makes it tokens). One group at a time, because equal
    keys of different tasks are different states (arXiv 2505.10978). norm is (x - mean) /
    (std + epsilon), and 0 where there is nothing to compare with.
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


def opd(
    teacher_T: FloatArray, student_T: FloatArray, mask_T: BoolArray, *, limit: float = 20.0
) -> Stream:
    """A_t = log p_teacher - log p_student of the drawn token, within +-limit; 0 outside the mask.

    On-policy this is minus the k1 estimate of KL(student || teacher). The limit keeps a token
    that the teacher holds for impossible from making the whole batch infinite.
    """
    teacher = np.maximum(np.asarray(teacher_T, np.float64)[mask_T], -1e30)
    student = np.maximum(np.asarray(student_T, np.float64)[mask_T], -1e30)
    return _scatter(np.clip(teacher - student, -limit, limit), mask_T)


def _inside(values_T: FloatArray, mask_T: BoolArray, what: str) -> Stream:
    """The values of the tokens inside the mask; nothing may be lost outside."""
    values = np.asarray(values_T, np.float64)
    if np.any(values[~np.asarray(mask_T, np.bool_)] != 0):
        raise DataError(
            f"{what} outside the response tokens would be lost",
            fix="put the reward of a turn on the last token that the policy drew in it",
        )
    return values[mask_T]


def _discounted(values: Stream, factor: float) -> Stream:
    """x_t + factor * x_{t+1} + factor^2 * x_{t+2} + ..., from the last one back."""

    def add(later: float, value: float) -> float:
        return value + factor * later

    sums = accumulate(values[::-1].tolist(), add)
    return np.fromiter(sums, np.float64, len(values))[::-1]


def _scatter(values: Stream, mask_T: BoolArray) -> Stream:
    values_T = np.zeros(len(mask_T))
    values_T[mask_T] = values
    return values_T
