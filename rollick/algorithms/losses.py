"""Losses of policies, and of a critic: (LossInputs, options) -> TokenLoss.

A policy loss uses the importance ratio of each token, or that of its sample or turn; then each
token carries the loss of its sample or turn, so that aggregations work in the same way.

    pi   the current policy        r    pi / pi_old, the ratio to the policy before the step
    mu   the behaviour policy      rho  pi / mu, the ratio to the policy that sampled the token
    A    the advantage             sg   stop-gradient: the value without its gradient

Shapes: T trained tokens of a micro-batch. Tokens outside the loss mask are not passed to a loss.
The trainer applies the weights: the loss of a batch is sum(weights_T * loss_T) for any split
into micro-batches and ranks. A token that a loss leaves out (outside the trust region, or of a
sample without a positive score) has loss 0 and still counts in the denominator, because weights
are computed before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from rollick.algorithms.kl import MAX_LOG_RATIO, binary_kl, bounded_ratio
from rollick.algorithms.segments import segment_mean, segment_sum
from rollick.config.schema.losses import (
    CispoLoss,
    DppoKlLoss,
    DppoTvLoss,
    GmpoLoss,
    GspoLoss,
    KimiLoss,
    PlainLoss,
    PpoLoss,
    RaftPlusPlusLoss,
    SapoLoss,
    ToprLoss,
    TruncatedIsLoss,
    ValueLoss,
)
from rollick.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """The inputs of a loss. logprobs_T, student_TK and entropy_T carry gradients.

    logprobs_T: log pi of the current policy. old_T: log pi_old. behaviour_T: log mu.
    reference_T: log pi_ref.
    sequence_T: index of the token's sample (or of its segment, if the sample has several),
    ascending. A micro-batch holds whole samples.
    turn_T: index of its turn (a run of trained tokens), ascending; None: one turn per sample.
    scores_T: the shaped score of its sample; None: losses use the sign of the advantage.
    pair_T: index of its pair of answers, ascending from 0.
    age_T: policy versions since the token was sampled.
    teacher_TK, student_TK: log-probs of the teacher's K most likely tokens at its position.
    component_T: index of its algorithm in the recipe.
    kl_weights_T, entropy_weights_T: weights of KL and entropy, with their coefficients.
    """

    logprobs_T: torch.Tensor
    old_T: torch.Tensor
    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    weights_T: torch.Tensor
    sequence_T: torch.Tensor
    reference_T: torch.Tensor | None = None
    turn_T: torch.Tensor | None = None
    scores_T: torch.Tensor | None = None
    pair_T: torch.Tensor | None = None
    age_T: torch.Tensor | None = None
    teacher_TK: torch.Tensor | None = None
    student_TK: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None
    component_T: torch.Tensor | None = None
    kl_weights_T: torch.Tensor | None = None
    entropy_weights_T: torch.Tensor | None = None

    @property
    def good_T(self) -> torch.Tensor:
        """Tokens of samples with a positive score."""
        return (self.advantages_T if self.scores_T is None else self.scores_T) > 0

    def where(self, mask_T: torch.Tensor) -> LossInputs:
        """The inputs of these tokens only. The mask must select whole samples."""
        values: dict[str, Any] = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return replace(self, **{n: v[mask_T] for n, v in values.items() if v is not None})


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """The loss of each token, and metrics as sums over tokens (logged as means)."""

    loss_T: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def dppo_tv(inputs: LossInputs, options: DppoTvLoss) -> TokenLoss:
    """-A sg(min(rho, cap)) log pi on tokens whose probability is in the trust region.

    A token is kept iff pi - mu <= delta (A > 0) or pi - mu >= -delta (A < 0).
    """
    with torch.no_grad():
        change_T = inputs.logprobs_T.exp() - inputs.behaviour_T.exp()
        above_T, below_T = change_T > options.delta, change_T < -options.delta
    return _dppo(inputs, above_T, below_T, options.max_ratio)


def dppo_kl(inputs: LossInputs, options: DppoKlLoss) -> TokenLoss:
    """-A sg(min(rho, cap)) log pi on tokens whose binary KL is in the trust region.

    A token is kept iff KL(Bernoulli(mu) || Bernoulli(pi)) <= delta, or its advantage moves pi
    back towards mu.
    """
    with torch.no_grad():
        outside_T = binary_kl(inputs.behaviour_T, inputs.logprobs_T) > options.delta
        above_T = outside_T & (inputs.logprobs_T > inputs.behaviour_T)
        below_T = outside_T & (inputs.logprobs_T < inputs.behaviour_T)
    return _dppo(inputs, above_T, below_T, options.max_ratio)


def _dppo(
    inputs: LossInputs, above_T: torch.Tensor, below_T: torch.Tensor, max_ratio: float
) -> TokenLoss:
    with torch.no_grad():
        outside_T = leaves_trust_region(inputs.advantages_T, above_T, below_T)
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T).clamp(max=max_ratio)
        factor_T = torch.where(outside_T, 0.0, ratio_T * inputs.advantages_T)
    return TokenLoss(-factor_T * inputs.logprobs_T, clip_sums(outside_T, inputs.advantages_T))


def ppo(inputs: LossInputs, options: PpoLoss) -> TokenLoss:
    """-min(r A, clip(r) A), bounded from below by c A where A < 0 (dual clip)."""
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.old_T)
    return clipped_surrogate(ratio_T, inputs.advantages_T, options)


def reinforce(inputs: LossInputs, options: PlainLoss) -> TokenLoss:
    """-A log pi."""
    return TokenLoss(-inputs.advantages_T * inputs.logprobs_T)


def truncated_is(inputs: LossInputs, options: TruncatedIsLoss) -> TokenLoss:
    """-sg(clip(rho, low, high)) A log pi."""
    return _clip_rho(inputs, low=options.low, high=options.high)


def cispo(inputs: LossInputs, options: CispoLoss) -> TokenLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: every token keeps a gradient.

    PPO's clip removes rare tokens that start a new line of reasoning from the gradient after the
    first step (MiniMax-M1, arXiv 2506.13585).
    """
    return _clip_rho(inputs, low=1 - options.clip_low, high=1 + options.clip_high)


def _clip_rho(inputs: LossInputs, *, low: float, high: float) -> TokenLoss:
    # Uses pi / mu, because pi / pi_old is 1 with one optimizer step per batch.
    with torch.no_grad():
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T)
        factor_T = ratio_T.clamp(low, high) * inputs.advantages_T
        clipped_T = (ratio_T < low) | (ratio_T > high)
    return TokenLoss(-factor_T * inputs.logprobs_T, clip_sums(clipped_T, inputs.advantages_T))


def sapo(inputs: LossInputs, options: SapoLoss) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), with one tau for each sign of A.

    The on-policy gradient is that of REINFORCE for any tau.
    """
    advantages_T = inputs.advantages_T
    tau_positive = torch.full_like(advantages_T, options.tau_positive)
    tau_T = torch.where(advantages_T > 0, tau_positive, options.tau_negative)
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.old_T)
    return TokenLoss(-advantages_T * (4 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1)))


def kimi(inputs: LossInputs, options: KimiLoss) -> TokenLoss:
    """-A log pi + (tau / 2) (log pi - log pi_old)^2."""
    distance_T = (inputs.logprobs_T - inputs.old_T).square()
    return TokenLoss(-inputs.advantages_T * inputs.logprobs_T + options.tau / 2 * distance_T)


def raft(inputs: LossInputs, options: PlainLoss) -> TokenLoss:
    """-log pi on samples with a positive score."""
    return TokenLoss(torch.where(inputs.good_T, -inputs.logprobs_T, 0.0))


def raft_plus_plus(inputs: LossInputs, options: RaftPlusPlusLoss) -> TokenLoss:
    """-min(r, 1 + clip_high) on samples with a positive score: ppo with A = 1."""
    good_T = inputs.good_T
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.old_T)
    loss_T = torch.where(good_T, -ratio_T.clamp(max=1 + options.clip_high), 0.0)
    clipped_T = good_T & (ratio_T.detach() > 1 + options.clip_high)
    return TokenLoss(loss_T, clip_sums(clipped_T, good_T.to(loss_T.dtype)))


def sft(inputs: LossInputs, options: PlainLoss) -> TokenLoss:
    """-log pi."""
    return TokenLoss(-inputs.logprobs_T)


def gspo(inputs: LossInputs, options: GspoLoss) -> TokenLoss:
    """-min(s A, clip(s) A), s = exp(mean of log r over the sample); dual clip as in ppo.

    The reward belongs to a whole sample, so the importance ratio does too; ratios of single tokens
    add noise (arXiv 2507.18071).
    """
    return _clip_mean_ratio(inputs, inputs.sequence_T, options)


def segment(inputs: LossInputs, options: GspoLoss) -> TokenLoss:
    """gspo with the mean over the token's turn instead of the sample."""
    turn_T = inputs.sequence_T if inputs.turn_T is None else inputs.turn_T
    return _clip_mean_ratio(inputs, turn_T, options)


def gmpo(inputs: LossInputs, options: GmpoLoss) -> TokenLoss:
    """-A exp(mean of c), c = min(log r, clip_high) for A > 0, else max(log r, -clip_low).

    A geometric mean, so that no single token dominates its sample (arXiv 2507.20673).
    """
    advantages_T, low, high = inputs.advantages_T, -options.clip_low, options.clip_high
    log_ratio_T = inputs.logprobs_T - inputs.old_T
    up_T, down_T = log_ratio_T.clamp(max=high), log_ratio_T.clamp(min=low)
    mean_T = segment_mean(torch.where(advantages_T > 0, up_T, down_T), inputs.sequence_T)
    with torch.no_grad():
        clipped_T = leaves_trust_region(advantages_T, log_ratio_T > high, log_ratio_T < low)
    loss_T = -advantages_T * mean_T.clamp(max=MAX_LOG_RATIO).exp()
    return TokenLoss(loss_T, clip_sums(clipped_T, advantages_T))


def topr(inputs: LossInputs, options: ToprLoss) -> TokenLoss:
    """-A log pi on samples with a positive score, else -sg(min(rho, cap)) A log pi.

    Each is multiplied by the weight of its sign. rho is that of the sample, or of the token with
    ratio: token. A sample with a positive score needs no importance weight: raising its probability
    is right whichever policy sampled it (arXiv 2503.14286).
    """
    advantages_T, good_T = inputs.advantages_T, inputs.good_T
    with torch.no_grad():
        log_ratio_T = inputs.logprobs_T - inputs.behaviour_T
        if options.ratio == "sequence":
            log_ratio_T = segment_sum(log_ratio_T, inputs.sequence_T)
        ratio_T = log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()
        down_T = options.negative_weight * ratio_T.clamp(max=options.cap)
        factor_T = torch.where(good_T, options.positive_weight, down_T) * advantages_T
        clipped_T = ~good_T & (ratio_T > options.cap)
    return TokenLoss(-factor_T * inputs.logprobs_T, clip_sums(clipped_T, advantages_T))


def _clip_mean_ratio(inputs: LossInputs, segment_T: torch.Tensor, options: GspoLoss) -> TokenLoss:
    mean_T = segment_mean(inputs.logprobs_T - inputs.old_T, segment_T)
    ratio_T = bounded_ratio(mean_T, torch.zeros_like(mean_T))
    return clipped_surrogate(ratio_T, inputs.advantages_T, options)


def entropy(inputs: LossInputs) -> torch.Tensor:
    """The entropy H of each token's distribution; the objective adds the bonus -c H."""
    if inputs.entropy_T is None:
        raise ConfigError(
            "algorithm.entropy needs the entropy of each token, and the batch has none",
            fix="set entropy_weights_N of the batch before training",
        )
    return inputs.entropy_T


@dataclass(frozen=True, slots=True, eq=False)
class ValueInputs:
    """The inputs of a value loss. values_T carries the gradient, old_T is the value before the
    step, returns_T the target."""

    values_T: torch.Tensor
    old_T: torch.Tensor
    returns_T: torch.Tensor
    weights_T: torch.Tensor


def value(inputs: ValueInputs, options: ValueLoss) -> TokenLoss:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2.

    With the maximum, a value that moved past the clip towards its return gets no gradient.
    """
    values_T, old_T, returns_T = inputs.values_T, inputs.old_T, inputs.returns_T
    clipped_T = torch.minimum(torch.maximum(values_T, old_T - options.clip), old_T + options.clip)
    error_T, clipped_error_T = (values_T - returns_T).square(), (clipped_T - returns_T).square()
    with torch.no_grad():
        sums = {
            "value_error": error_T.sum(),
            "value_clip_share": (clipped_error_T > error_T).sum(),
            "value": values_T.sum(),
            "return": returns_T.sum(),
        }
    return TokenLoss(0.5 * torch.maximum(error_T, clipped_error_T), sums)


def clipped_surrogate(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, options: PpoLoss | GspoLoss
) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A); for A < 0 at most dual |A| (0: off)."""
    low, high = 1 - options.clip_low, 1 + options.clip_high
    clipped_T = ratio_T.clamp(low, high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if options.dual_clip:
        bounded_T = torch.maximum(surrogate_T, options.dual_clip * advantages_T)
        surrogate_T = torch.where(advantages_T < 0, bounded_T, surrogate_T)
    with torch.no_grad():
        outside_T = leaves_trust_region(advantages_T, ratio_T > high, ratio_T < low)
    return TokenLoss(-surrogate_T, clip_sums(outside_T, advantages_T))


def leaves_trust_region(
    advantages_T: torch.Tensor, above_T: torch.Tensor, below_T: torch.Tensor
) -> torch.Tensor:
    """Marks tokens whose ratio is out of bounds in the direction of their advantage."""
    return torch.where(advantages_T > 0, above_T, below_T & (advantages_T < 0))


def clip_sums(clipped_T: torch.Tensor, advantages_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Number of clipped tokens, in total and by the sign of their advantage."""
    return sums_by_sign("clip_share", clipped_T, advantages_T)


def sums_by_sign(
    name: str, marked_T: torch.Tensor, advantages_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Number of marked tokens, in total and by the sign of their advantage."""
    return {
        name: marked_T.sum(),
        f"{name}_positive": (marked_T & (advantages_T > 0)).sum(),
        f"{name}_negative": (marked_T & (advantages_T < 0)).sum(),
    }
