"""Policy losses of one token each. Pure functions: (LossInputs, options) -> TokenLoss.

Losses on the ratio of a whole sample or turn are in sequence_losses.py.

Shapes: T trained tokens of a micro-batch. Tokens outside the loss mask are not here at all, so
no loss can divide by them, multiply inf by a zero mask, or train on them. The weight of a token
(its part of the aggregation over the global batch) is applied by the trainer: the loss of a
batch is sum(weights_T * loss_T), whatever the split into micro-batches and ranks. A token that a
loss leaves out (beyond a trust region, not a good sample) has loss 0 and still counts in the
denominator: weights are fixed when the batch is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from rollick.algorithms.kl import binary_kl, bounded_ratio
from rollick.config.losses import (
    CispoLoss,
    DppoKlLoss,
    DppoTvLoss,
    KimiLoss,
    PpoLoss,
    RaftLoss,
    RaftPlusPlusLoss,
    ReinforceLoss,
    SapoLoss,
    SftLoss,
    TruncatedIsLoss,
)
from rollick.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What a loss may look at. `logprobs_T` carries the gradient.

    logprobs_T: log pi, now. old_T: log pi_old. behaviour_T: log mu. reference_T: log pi_ref.
    sequence_T: number of the token's sample in the micro-batch, ascending. A sample is never cut.
    segment_T: number of its turn (a run of trained tokens), ascending; None: one turn a sample.
    scores_T: the score of its sample, shaped; None: the sign of the advantage stands for it.
    pair_T: number of its pair of answers, ascending from 0. age_T: versions since it was drawn.
    teacher_TK, student_TK: log-probs of the teacher's K likeliest tokens there; the student's
    carry a gradient, as does entropy_T. component_T: which of the recipe's algorithms it is for.
    kl_weights_T, entropy_weights_T: as weights_T, of those two, with their coefficients in them.
    """

    logprobs_T: torch.Tensor
    old_T: torch.Tensor
    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    weights_T: torch.Tensor
    sequence_T: torch.Tensor
    reference_T: torch.Tensor | None = None
    segment_T: torch.Tensor | None = None
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

    def where(self, chosen_T: torch.Tensor) -> LossInputs:
        """The inputs of these tokens alone; whole samples are to be chosen."""
        picked: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            picked[spec.name] = None if value is None else value[chosen_T]
        return LossInputs(**picked)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """The loss of each token, and metrics as sums over the tokens (divided by T when logged)."""

    loss_T: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def dppo_tv(inputs: LossInputs, options: DppoTvLoss) -> TokenLoss:
    """-A sg(min(rho, cap)) log pi on tokens whose probability has not left the trust region.

    A token is kept iff pi - mu <= delta (A > 0) or pi - mu >= -delta (A < 0).
    """
    with torch.no_grad():
        moved_T = inputs.logprobs_T.exp() - inputs.behaviour_T.exp()
        above_T, below_T = moved_T > options.delta, moved_T < -options.delta
    return _dppo(inputs, beyond(inputs.advantages_T, above_T, below_T), options.max_ratio)


def dppo_kl(inputs: LossInputs, options: DppoKlLoss) -> TokenLoss:
    """-A sg(min(rho, cap)) log pi on tokens whose binary KL has not left the trust region.

    A token is kept iff KL(Bernoulli(mu) || Bernoulli(pi)) <= delta, or its advantage moves it
    back towards mu.
    """
    with torch.no_grad():
        far_T = binary_kl(inputs.behaviour_T, inputs.logprobs_T) > options.delta
        above_T = far_T & (inputs.logprobs_T > inputs.behaviour_T)
        below_T = far_T & (inputs.logprobs_T < inputs.behaviour_T)
    return _dppo(inputs, beyond(inputs.advantages_T, above_T, below_T), options.max_ratio)


def _dppo(inputs: LossInputs, left_T: torch.Tensor, max_ratio: float) -> TokenLoss:
    with torch.no_grad():
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T).clamp(max=max_ratio)
        factor_T = torch.where(left_T, 0.0, ratio_T * inputs.advantages_T)
    return TokenLoss(-factor_T * inputs.logprobs_T, clip_sums(left_T, inputs.advantages_T))


def ppo(inputs: LossInputs, options: PpoLoss) -> TokenLoss:
    """-min(r A, clip(r) A), bounded from below by c A where A < 0 (dual clip)."""
    return clipped_surrogate(
        bounded_ratio(inputs.logprobs_T, inputs.old_T),
        inputs.advantages_T,
        low=options.clip_low,
        high=options.clip_high,
        dual=options.dual_clip,
    )


def reinforce(inputs: LossInputs, options: ReinforceLoss) -> TokenLoss:
    """-A log pi."""
    return TokenLoss(-inputs.advantages_T * inputs.logprobs_T)


def truncated_is(inputs: LossInputs, options: TruncatedIsLoss) -> TokenLoss:
    """-sg(clip(rho, low, high)) A log pi."""
    return _weighted_by_rho(inputs, low=options.low, high=options.high)


def cispo(inputs: LossInputs, options: CispoLoss) -> TokenLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: every token keeps a gradient.

    PPO's clip takes rare tokens that open a new line of reasoning out of the gradient at the
    first step (MiniMax-M1, arXiv 2506.13585).
    """
    return _weighted_by_rho(inputs, low=1 - options.clip_low, high=1 + options.clip_high)


def _weighted_by_rho(inputs: LossInputs, *, low: float, high: float) -> TokenLoss:
    # On pi / mu and not on pi / pi_old, which is 1 at one optimizer step a batch.
    with torch.no_grad():
        ratio_T = bounded_ratio(inputs.logprobs_T, inputs.behaviour_T)
        factor_T = ratio_T.clamp(low, high) * inputs.advantages_T
        cut_T = (ratio_T < low) | (ratio_T > high)
    return TokenLoss(-factor_T * inputs.logprobs_T, clip_sums(cut_T, inputs.advantages_T))


def sapo(inputs: LossInputs, options: SapoLoss) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), with a tau for each sign of A.

    The gradient on-policy is that of REINFORCE, whatever tau.
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


def raft(inputs: LossInputs, options: RaftLoss) -> TokenLoss:
    """-log pi on samples with a positive score."""
    return TokenLoss(torch.where(inputs.good_T, -inputs.logprobs_T, 0.0))


def raft_plus_plus(inputs: LossInputs, options: RaftPlusPlusLoss) -> TokenLoss:
    """-min(r, 1 + clip_high) on samples with a positive score: ppo with A = 1."""
    good_T = inputs.good_T
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.old_T)
    loss_T = torch.where(good_T, -ratio_T.clamp(max=1 + options.clip_high), 0.0)
    clipped_T = good_T & (ratio_T.detach() > 1 + options.clip_high)
    return TokenLoss(loss_T, clip_sums(clipped_T, good_T.to(loss_T.dtype)))


def sft(inputs: LossInputs, options: SftLoss) -> TokenLoss:
    """-log pi."""
    return TokenLoss(-inputs.logprobs_T)


def entropy(inputs: LossInputs) -> torch.Tensor:
    """H of each token's distribution, which the bonus -c H takes from the loss."""
    if inputs.entropy_T is None:
        raise ConfigError(
            "algorithm.entropy needs the entropy of each token, and the batch has none",
            fix="give the batch entropy_weights before it is trained on",
        )
    return inputs.entropy_T


def clipped_surrogate(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, *, low: float, high: float, dual: float
) -> TokenLoss:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A); for A < 0 at most dual |A| (0: off)."""
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    surrogate_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual:
        bounded_T = torch.maximum(surrogate_T, dual * advantages_T)
        surrogate_T = torch.where(advantages_T < 0, bounded_T, surrogate_T)
    with torch.no_grad():
        outside_T = beyond(advantages_T, ratio_T > 1 + high, ratio_T < 1 - low)
    return TokenLoss(-surrogate_T, clip_sums(outside_T, advantages_T))


def beyond(
    advantages_T: torch.Tensor, above_T: torch.Tensor, below_T: torch.Tensor
) -> torch.Tensor:
    """Tokens that already went too far in the direction in which their advantage pushes."""
    return torch.where(advantages_T > 0, above_T, below_T & (advantages_T < 0))


def clip_sums(clipped_T: torch.Tensor, advantages_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Clipped tokens, all and by the sign of their advantage."""
    return sums_by_sign("clip_share", clipped_T, advantages_T)


def sums_by_sign(
    name: str, marked_T: torch.Tensor, advantages_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Marked tokens, all and by the sign of their advantage."""
    return {
        name: marked_T.sum(),
        f"{name}_up": (marked_T & (advantages_T > 0)).sum(),
        f"{name}_down": (marked_T & (advantages_T < 0)).sum(),
    }
