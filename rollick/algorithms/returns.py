"""Advantages with one value per token: returns, GAE, on-policy distillation.

(groups, options) -> per group, per member, one value per token. Only tokens inside the loss mask
are steps: discounts, TD errors and statistics skip the others, whose results are 0.

Shapes: T tokens of one sample, prompt and observations included; mask_T is its loss mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from rollick.algorithms.advantages import Advantages, AdvantagesAndReturns, dr_grpo, whiten_samples
from rollick.config.schema.advantages import (
    GaeAdvantage,
    OpdAdvantage,
    ReinforceAdvantage,
    ReinforcePpAdvantage,
    ReinforcePpBaselineAdvantage,
)
from rollick.errors import ConfigError, DataError
from rollick.types import BoolArray, FloatArray, Group, ScoredSample

Values = npt.NDArray[np.float64]


def reinforce(groups: Sequence[Group], options: ReinforceAdvantage) -> Advantages:
    """G_t = r_t + gamma G_{t+1}; the score is the reward of the last trained token.

    With `whiten`: (G - mean) / (std + epsilon) over all trained tokens of the batch.
    """
    returns = _returns(groups, options.gamma)
    return whiten_tokens(groups, returns, options.epsilon) if options.whiten else returns


def reinforce_pp(groups: Sequence[Group], options: ReinforcePpAdvantage) -> Advantages:
    """The return of each token, whitened over the batch's tokens.

    Without a group baseline, one sample per prompt is enough (arXiv 2501.03262). A KL in the reward
    (algorithm.kl.place) is subtracted from the reward of its token.
    """
    return whiten_tokens(groups, _returns(groups, options.gamma), options.epsilon)


def reinforce_pp_baseline(
    groups: Sequence[Group], options: ReinforcePpBaselineAdvantage
) -> Advantages:
    """R - mean of the group, then (A - mean) / (std + epsilon) over the batch's tokens or samples.

    One scale for the batch: a group with low variance is not amplified (arXiv 2501.03262).
    """
    centred = dr_grpo(groups)
    if options.whiten_over == "samples":
        return whiten_samples(groups, centred, options.epsilon)
    values = [
        [np.where(m.sample.loss_mask, v, 0.0) for m, v in zip(group.members, row, strict=True)]
        for group, row in zip(groups, centred, strict=True)
    ]
    return whiten_tokens(groups, values, options.epsilon)


def gae(groups: Sequence[Group], options: GaeAdvantage) -> Advantages:
    """GAE over the critic's values. Returns are computed from the advantages before whitening."""
    results = [[_compute_gae(member, options) for member in group.members] for group in groups]
    if not options.whiten:
        return results
    advantages = [[result.advantages_T for result in row] for row in results]
    whitened = whiten_tokens(groups, advantages, options.epsilon)
    return [
        [result._replace(advantages_T=values_T) for values_T, result in zip(*rows, strict=True)]
        for rows in zip(whitened, results, strict=True)
    ]


def opd(groups: Sequence[Group], options: OpdAdvantage) -> Advantages:
    """A_t = log p_teacher - log p_student of the sampled token, clipped to +-limit.

    The student is the learner's old policy if known, else the policy that sampled the token.
    """
    return [[_compute_opd(member, options.limit) for member in group.members] for group in groups]


def token_rewards(member: ScoredSample) -> Values:
    """r_t: the reward of each turn at its last token, minus the penalty of each token.

    The rest of the score is the reward of the last trained token. A member whose score failed, or
    without a trained token, has rewards of 0.
    """
    mask_T = member.sample.loss_mask
    trained = np.flatnonzero(mask_T)
    rewards_T = np.zeros(len(mask_T))
    if not member.score.ok or not len(trained):
        return rewards_T
    if member.annotations.penalty is not None:
        # By index, not multiplied by the mask: the KL outside it may be infinite.
        rewards_T[trained] -= member.annotations.penalty[trained]
    if member.score.turn_rewards:
        ends = [span.stop - 1 for span in turn_spans(mask_T)]
        if len(ends) != len(member.score.turn_rewards):
            raise DataError(
                f"sample {member.sample.uid} has {len(ends)} turns, and its score has "
                f"{len(member.score.turn_rewards)} turn rewards",
                fix="return one reward for each run of the loss mask",
            )
        rewards_T[ends] += member.score.turn_rewards
    rewards_T[trained[-1]] += member.score.value - rewards_T.sum()
    return rewards_T


def turn_spans(mask_T: BoolArray) -> list[slice]:
    """The runs of the mask in order: the policy's turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask_T, np.int8), [0]])))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def discounted_returns(rewards_T: FloatArray, mask_T: BoolArray, *, gamma: float) -> Values:
    """G_t = r_t + gamma G_{t+1}, where t+1 is the next token inside the mask; 0 outside."""
    return _scatter(discount(np.asarray(rewards_T, np.float64)[mask_T], gamma), mask_T)


def token_gae(
    rewards_T: FloatArray,
    values_T: FloatArray,
    mask_T: BoolArray,
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> AdvantagesAndReturns:
    """d_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k d_{t+k}.

    values_T[t] is the critic's value before token t. t+1 is the next token inside the mask, so the
    value after an action is the one before the next action. `bootstrap` is the value after the last
    token: 0 if the sample terminated, the critic's value if it was truncated and is bootstrapped.
    """
    values = np.asarray(values_T, np.float64)[mask_T]
    next_values = np.append(values[1:], bootstrap)[: len(values)]
    td_errors = np.asarray(rewards_T, np.float64)[mask_T] + gamma * next_values - values
    advantages = discount(td_errors, gamma * lam)
    return AdvantagesAndReturns(_scatter(advantages, mask_T), _scatter(advantages + values, mask_T))


def token_opd(
    teacher_T: FloatArray, student_T: FloatArray, mask_T: BoolArray, *, limit: float
) -> Values:
    """A_t = log p_teacher - log p_student of the sampled token, clipped to +-limit; 0 outside.

    On-policy this is minus the k1 estimate of KL(student || teacher). The limit keeps the result
    finite for tokens to which the teacher gives probability 0.
    """
    teacher = np.maximum(np.asarray(teacher_T, np.float64)[mask_T], -1e30)
    student = np.maximum(np.asarray(student_T, np.float64)[mask_T], -1e30)
    return _scatter(np.clip(teacher - student, -limit, limit), mask_T)


def whiten_tokens(
    groups: Sequence[Group], values: Sequence[Sequence[FloatArray]], epsilon: float
) -> list[list[Values]]:
    """(x - mean) / (std + epsilon) over trained tokens of members with a valid score; else 0."""
    members = [member for group in groups for member in group.members]
    masks = [member.sample.loss_mask & member.score.ok for member in members]
    flat = list(chain.from_iterable(values))
    inside = [values_T[mask_T] for values_T, mask_T in zip(flat, masks, strict=True)]
    trained = np.concatenate(inside) if inside else np.zeros(0)
    # Equal values give exactly 0, also if their mean is rounded.
    all_equal = not len(trained) or trained.min() == trained.max()
    mean, scale = (0.0, 1.0) if all_equal else (trained.mean(), trained.std(ddof=1) + epsilon)
    whitened = iter(
        np.zeros(len(values_T)) if all_equal else np.where(mask_T, (values_T - mean) / scale, 0.0)
        for values_T, mask_T in zip(flat, masks, strict=True)
    )
    return [[next(whitened) for _ in row] for row in values]


def discount(values: Values, factor: float) -> Values:
    """x_t + factor * x_{t+1} + factor^2 * x_{t+2} + ..."""
    if factor == 1.0:
        return np.cumsum(values[::-1])[::-1]
    # Doubling: sums over 1, 2, 4, ... terms, without a loop over tokens.
    sums, terms = np.array(values, np.float64), 1
    while terms < len(sums) and factor:
        sums[:-terms] += factor * sums[terms:]
        terms, factor = 2 * terms, factor * factor
    return sums


def _returns(groups: Sequence[Group], gamma: float) -> list[list[Values]]:
    return [
        [discounted_returns(token_rewards(m), m.sample.loss_mask, gamma=gamma) for m in g.members]
        for g in groups
    ]


def _compute_gae(member: ScoredSample, options: GaeAdvantage) -> AdvantagesAndReturns:
    mask_T, annotations = member.sample.loss_mask, member.annotations
    if not member.score.ok:
        return AdvantagesAndReturns(np.zeros(len(mask_T)), np.zeros(len(mask_T)))
    is_bootstrapped = options.bootstrap_truncated and member.sample.truncated
    return token_gae(
        token_rewards(member),
        _require(annotations.values, member, "the advantage gae needs values of a critic"),
        mask_T,
        gamma=options.gamma,
        lam=options.lam,
        bootstrap=annotations.last_value if is_bootstrapped else 0.0,
    )


def _compute_opd(member: ScoredSample, limit: float) -> Values:
    sample, annotations = member.sample, member.annotations
    if not member.score.ok:
        return np.zeros(sample.length)
    need = "the advantage opd needs log-probs of a teacher"
    teacher_T = _require(annotations.teacher, member, need)
    student_T = sample.logprobs if annotations.old is None else annotations.old
    return token_opd(teacher_T, student_T, sample.loss_mask, limit=limit)


def _require(values_T: FloatArray | None, member: ScoredSample, need: str) -> FloatArray:
    """The annotation, checked to have one value per token. `need` begins the error message."""
    if values_T is None:
        raise ConfigError(
            f"{need}, and sample {member.sample.uid} has none",
            fix="annotate the batch before its advantages are computed",
        )
    if values_T.shape != (member.sample.length,):
        raise ConfigError(
            f"{need}: sample {member.sample.uid} has {member.sample.length} tokens, and the values "
            f"have the shape {values_T.shape}",
            fix="give one value for each token, prompt included",
        )
    return values_T


def _scatter(values: Values, mask_T: BoolArray) -> Values:
    values_T = np.zeros(len(mask_T))
    values_T[mask_T] = values
    return values_T
