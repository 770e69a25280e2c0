"""Policy losses on the ratio of a whole sample or turn: (LossInputs, options) -> TokenLoss.

Pure functions. Each token carries the loss of its sample or turn, so that aggregations work as for
the losses per token in losses.py.
"""

from __future__ import annotations

import torch

from rollick.algorithms.kl import MAX_LOG_RATIO, bounded_ratio
from rollick.algorithms.losses import (
    LossInputs,
    TokenLoss,
    clip_sums,
    clipped_surrogate,
    leaves_trust_region,
)
from rollick.algorithms.segments import segment_mean, segment_sum
from rollick.config.schema.losses import GmpoLoss, GspoLoss, ToprLoss


def gspo(inputs: LossInputs, options: GspoLoss) -> TokenLoss:
    """-min(s A, clip(s) A), s = exp(mean of log r over the sample); dual clip as in ppo.

    The reward belongs to a whole sample, so the importance ratio does too; ratios of single tokens
    add noise (arXiv 2507.18071).
    """
    return _on_mean_ratio(inputs, inputs.sequence_T, options)


def segment(inputs: LossInputs, options: GspoLoss) -> TokenLoss:
    """gspo with the mean over the token's turn instead of the sample."""
    turns_T = inputs.sequence_T if inputs.segment_T is None else inputs.segment_T
    return _on_mean_ratio(inputs, turns_T, options)


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
        cut_T = ~good_T & (ratio_T > options.cap)
    return TokenLoss(-factor_T * inputs.logprobs_T, clip_sums(cut_T, advantages_T))


def _on_mean_ratio(inputs: LossInputs, segment_T: torch.Tensor, options: GspoLoss) -> TokenLoss:
    mean_T = segment_mean(inputs.logprobs_T - inputs.old_T, segment_T)
    ratio_T = bounded_ratio(mean_T, torch.zeros_like(mean_T))
    return clipped_surrogate(ratio_T, inputs.advantages_T, options)
