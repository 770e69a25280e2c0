"""Policy losses, per token. Pure functions: (LossInputs, options) -> TokenLoss.

Shapes: T trained tokens of a micro-batch. Tokens outside the loss mask are not here at all, so
no loss can divide by them, multiply inf by a zero mask, or train on them. The weight of a token
(its part of the aggregation over the global batch) is applied by the trainer: the loss of a
batch is sum(weights_T * loss_T), whatever the split into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rollick.algorithms.kl import bounded_ratio
from rollick.config.losses import DppoTvLoss, PpoLoss, SftLoss


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What a loss may look at. Only `logprobs_T` carries a gradient.

    logprobs_T: log pi, now. old_T: log pi_old. behaviour_T: log mu. reference_T: log pi_ref.
    sequence_T: number of the token's sample in the micro-batch, ascending.
    """

    logprobs_T: torch.Tensor
    old_T: torch.Tensor
    behaviour_T: torch.Tensor
    advantages_T: torch.Tensor
    weights_T: torch.Tensor
    sequence_T: torch.Tensor
    reference_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenLoss:
    """The loss of each token, and metrics as sums over the tokens (divided by T when logged)."""

    loss_T: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def dppo_tv(inputs: LossInputs, options: DppoTvLoss) -> TokenLoss:
    """-A sg(min(rho, cap)) log pi on tokens whose probability has not left the trust region.

    A token is kept iff pi - mu <= delta (A > 0) or pi - mu >= -delta (A < 0).
    """
    logprobs_T, advantages_T = inputs.logprobs_T, inputs.advantages_T
    with torch.no_grad():
        moved_T = logprobs_T.exp() - inputs.behaviour_T.exp()
        left_T = _beyond(advantages_T, moved_T > options.delta, moved_T < -options.delta)
        ratio_T = bounded_ratio(logprobs_T, inputs.behaviour_T).clamp(max=options.max_ratio)
        factor_T = torch.where(left_T, torch.zeros_like(ratio_T), ratio_T * advantages_T)
    return TokenLoss(-factor_T * logprobs_T, _clip_sums(left_T, advantages_T))


def ppo(inputs: LossInputs, options: PpoLoss) -> TokenLoss:
    """-min(r A, clip(r) A), bounded from below by c A where A < 0 (dual clip)."""
    advantages_T = inputs.advantages_T
    ratio_T = bounded_ratio(inputs.logprobs_T, inputs.old_T)
    low, high = 1 - options.clip_low, 1 + options.clip_high
    surrogate_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    if options.dual_clip:
        bounded_T = torch.maximum(surrogate_T, options.dual_clip * advantages_T)
        surrogate_T = torch.where(advantages_T < 0, bounded_T, surrogate_T)
    with torch.no_grad():
        outside_T = _beyond(advantages_T, ratio_T > high, ratio_T < low)
    return TokenLoss(-surrogate_T, _clip_sums(outside_T, advantages_T))


def sft(inputs: LossInputs, options: SftLoss) -> TokenLoss:
    """-log pi."""
    return TokenLoss(-inputs.logprobs_T)


def _beyond(
    advantages_T: torch.Tensor, above_T: torch.Tensor, below_T: torch.Tensor
) -> torch.Tensor:
    """Tokens that already went too far in the direction in which their advantage pushes."""
    return torch.where(advantages_T > 0, above_T, below_T & (advantages_T < 0))


def _clip_sums(clipped_T: torch.Tensor, advantages_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Clipped tokens, all and by the sign of their advantage."""
    return {
        "clip_share": clipped_T.sum(),
        "clip_share_up": (clipped_T & (advantages_T > 0)).sum(),
        "clip_share_down": (clipped_T & (advantages_T < 0)).sum(),
    }
