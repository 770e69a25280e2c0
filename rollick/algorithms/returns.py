"""Advantages with a value per token: returns, GAE, on-policy distillation.

Pure functions: (groups, options) -> per group, per member, one value per token. Only tokens inside
the loss mask are steps: a discount, a TD error or a statistic never goes through an observation,
a prompt or padding, and results are 0 outside. Advantages per turn are in turns.py.

Shapes: T tokens of one sample, prompt and observations included; mask_T is its loss mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from rollick.algorithms.advantages import Advantages, Gae
from rollick.config.advantages import (
    GaeAdvantage,
    OpdAdvantage,
    ReinforceAdvantage,
    ReinforcePpAdvantage,
)
from rollick.errors import ConfigError, DataError
from rollick.types import BoolArray, FloatArray, Group, ScoredSample

Values = npt.NDArray[np.float64]


def reinforce(groups: Sequence[Group], options: ReinforceAdvantage) -> Advantages:
    """G_t = r_t + gamma G_{t+1}, the score being the reward of the last trained token.

    With `whiten`: (G - mean) / (std + epsilon) over all trained tokens of the batch.
    """
    returns = _returns(groups, options.gamma)
    return whitened_tokens(groups, returns, options.epsilon) if options.whiten else returns


def reinforce_pp(groups: Sequence[Group], options: ReinforcePpAdvantage) -> Advantages:
    """The return of each token, whitened over the batch's tokens.

    No group baseline, so one sample per prompt is enough (arXiv 2501.03262). A KL in the reward
    (algorithm.kl.place) is taken from the reward of its own token.
    """
    return whitened_tokens(groups, _returns(groups, options.gamma), options.epsilon)


def gae(groups: Sequence[Group], options: GaeAdvantage) -> Advantages:
    """GAE over the critic's values; targets are those of the advantages before whitening."""
    found = [[_gae_of(member, options) for member in group.members] for group in groups]
    if not options.whiten:
        return found
    plain = [[value.advantages_T for value in of_group] for of_group in found]
    white = whitened_tokens(groups, plain, options.epsilon)
    return [
        [Gae(a_T, value.returns_T) for a_T, value in zip(of_white, of_group, strict=True)]
        for of_white, of_group in zip(white, found, strict=True)
    ]


def opd(groups: Sequence[Group], options: OpdAdvantage) -> Advantages:
    """A_t = log p_teacher - log p_student of the drawn token, within +-limit.

    The student is the learner's old policy where it is known, else the one that drew the token.
    """
    return [[_opd_of(member, options.limit) for member in group.members] for group in groups]


def token_rewards(member: ScoredSample) -> Values:
    """r_t: what each turn earned, at the last token of that turn, less each token's penalty.

    What the score has beyond that is the reward of the last token. A member whose score is no
    judgement, or that has no trained token, has rewards of 0.
    """
    mask_T = member.sample.loss_mask
    trained = np.flatnonzero(mask_T)
    rewards_T = np.zeros(len(mask_T))
    if not member.score.ok or not len(trained):
        return rewards_T
    if member.annotations.penalty is not None:
        # By index, not by product with the mask: the KL outside may be infinite.
        rewards_T[trained] -= member.annotations.penalty[trained]
    if member.score.turns:
        ends = [span.stop - 1 for span in turns_of(mask_T)]
        if len(ends) != len(member.score.turns):
            raise DataError(
                f"sample {member.sample.uid} has {len(ends)} turns, and its score "
                f"{len(member.score.turns)} of them",
                fix="give one reward for each run of the loss mask",
            )
        rewards_T[ends] += member.score.turns
    rewards_T[trained[-1]] += member.score.value - rewards_T.sum()
    return rewards_T


def turns_of(mask_T: BoolArray) -> list[slice]:
    """The runs of the mask, in order: the policy's turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(mask_T, np.int8), [0]])))
    return [slice(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def discounted_returns(rewards_T: FloatArray, mask_T: BoolArray, *, gamma: float) -> Values:
    """G_t = r_t + gamma G_{t+1}, t+1 being the next token inside the mask; 0 outside."""
    return _scatter(discounted(_inside(rewards_T, mask_T, "rewards"), gamma), mask_T)


def gae_of_tokens(
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
    advantages = discounted(errors, gamma * lam)
    return Gae(_scatter(advantages, mask_T), _scatter(advantages + values, mask_T))


def opd_of_tokens(
    teacher_T: FloatArray, student_T: FloatArray, mask_T: BoolArray, *, limit: float
) -> Values:
    """A_t = log p_teacher - log p_student of the drawn token, within +-limit; 0 outside the mask.

    On-policy this is minus the k1 estimate of KL(student || teacher). The limit keeps a token
    that the teacher holds for impossible from making the whole batch infinite.
    """
    teacher = np.maximum(np.asarray(teacher_T, np.float64)[mask_T], -1e30)
    student = np.maximum(np.asarray(student_T, np.float64)[mask_T], -1e30)
    return _scatter(np.clip(teacher - student, -limit, limit), mask_T)


def whitened_tokens(
    groups: Sequence[Group], values: Sequence[Sequence[FloatArray]], epsilon: float
) -> list[list[Values]]:
    """(x - mean) / (std + epsilon) over the trained tokens of judged members; the rest is 0."""
    members = [member for group in groups for member in group.members]
    masks = [member.sample.loss_mask & member.score.ok for member in members]
    flat = list(chain.from_iterable(values))
    inside = [values_T[mask_T] for values_T, mask_T in zip(flat, masks, strict=True)]
    known = np.concatenate(inside) if inside else np.zeros(0)
    # Equal values carry no signal: exactly 0, whatever the rounding of their mean.
    same = not len(known) or known.min() == known.max()
    middle, scale = (0.0, 1.0) if same else (known.mean(), known.std(ddof=1) + epsilon)
    white = iter(
        np.zeros(len(values_T)) if same else np.where(mask_T, (values_T - middle) / scale, 0.0)
        for values_T, mask_T in zip(flat, masks, strict=True)
    )
    return [[next(white) for _ in of_group] for of_group in values]


def discounted(values: Values, factor: float) -> Values:
    """x_t + factor * x_{t+1} + factor^2 * x_{t+2} + ..."""
    if factor == 1.0:
        return np.cumsum(values[::-1])[::-1]
    # Sums over 1, 2, 4, ... terms, each made of two of the last: no loop over tokens.
    sums, terms = np.array(values, np.float64), 1
    while terms < len(sums) and factor:
        sums[:-terms] += factor * sums[terms:]
        terms, factor = 2 * terms, factor * factor
    return sums


def _returns(groups: Sequence[Group], gamma: float) -> list[list[Values]]:
    return [
        [
            discounted_returns(token_rewards(member), member.sample.loss_mask, gamma=gamma)
            for member in group.members
        ]
        for group in groups
    ]


def _gae_of(member: ScoredSample, options: GaeAdvantage) -> Gae:
    mask_T, said = member.sample.loss_mask, member.annotations
    if not member.score.ok:
        return Gae(np.zeros(len(mask_T)), np.zeros(len(mask_T)))
    bootstraps = options.bootstrap_truncated and member.sample.truncated
    return gae_of_tokens(
        token_rewards(member),
        required(said.values, member, "the advantage gae needs values of a critic"),
        mask_T,
        gamma=options.gamma,
        lam=options.lam,
        bootstrap=said.last_value if bootstraps else 0.0,
    )


def _opd_of(member: ScoredSample, limit: float) -> Values:
    sample, said = member.sample, member.annotations
    if not member.score.ok:
        return np.zeros(sample.length)
    teacher_T = required(said.teacher, member, "the advantage opd needs log-probs of a teacher")
    student_T = sample.logprobs if said.old is None else said.old
    return opd_of_tokens(teacher_T, student_T, sample.loss_mask, limit=limit)


def required(values_T: FloatArray | None, member: ScoredSample, what: str) -> FloatArray:
    """The annotation, or an error that says who needs it; one value for each token."""
    if values_T is None:
        raise ConfigError(
            f"{what}, and sample {member.sample.uid} has none",
            fix="annotate the batch before its advantages are computed",
        )
    if values_T.shape != (member.sample.length,):
        raise ConfigError(
            f"{what}: sample {member.sample.uid} has {member.sample.length} tokens, and these "
            f"are {values_T.shape}",
            fix="give one value for each token, prompt included",
        )
    return values_T


def _inside(values_T: FloatArray, mask_T: BoolArray, what: str) -> Values:
    """The values of the tokens inside the mask; nothing may be lost outside."""
    values = np.asarray(values_T, np.float64)
    if np.any(values[~np.asarray(mask_T, np.bool_)] != 0):
        raise DataError(
            f"{what} outside the response tokens would be lost",
            fix="put the reward of a turn on the last token that the policy drew in it",
        )
    return values[mask_T]


def _scatter(values: Values, mask_T: BoolArray) -> Values:
    values_T = np.zeros(len(mask_T))
    values_T[mask_T] = values
    return values_T
