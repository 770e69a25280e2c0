"""Off-policy corrections: token weights for the mismatch between engine and learner.

Each function maps (LossInputs, options) to weights_T, a factor of each token's policy loss, without
gradient. behaviour_T is log mu as reported by the engine, old_T is log pi_old of the learner at the
start of the step, and w = pi_old / mu. Both are known before training, so credit.py computes the
weights once for the whole batch. A token with weight 0 is dropped: it enters neither the sum nor
the denominator of the policy loss.

objective.py decides what the loss uses as pi_old: under `bypass` and `opsm` it is mu, under
`decoupled` with old: interpolated it depends on the current policy (`interpolated_old`).
"""

from __future__ import annotations

from math import log

import torch

from rollick.algorithms.kl import k3 as k3_estimate
from rollick.algorithms.losses import LossInputs
from rollick.algorithms.segments import segment_mean, segment_sum
from rollick.config.schema.corrections import (
    DecoupledCorrection,
    GeometricCorrection,
    IcepopCorrection,
    K3Correction,
    NoCorrection,
    OpsmCorrection,
    TisCorrection,
)


def bypass(inputs: LossInputs, options: NoCorrection) -> torch.Tensor:
    """1: the loss itself uses pi / mu, so no mismatch remains."""
    return torch.ones_like(inputs.behaviour_T)


def none(inputs: LossInputs, options: NoCorrection) -> torch.Tensor:
    """1: the mismatch is measured, not corrected."""
    return torch.ones_like(inputs.behaviour_T)


def token_tis(inputs: LossInputs, options: TisCorrection) -> torch.Tensor:
    """min(w, cap): truncated importance sampling, token by token."""
    return _truncate_ratio(_log_ratio(inputs), options.cap)


def sequence_tis(inputs: LossInputs, options: TisCorrection) -> torch.Tensor:
    """min(product of w over the sample, cap): unbiased except for the cap, with more variance."""
    return _truncate_ratio(segment_sum(_log_ratio(inputs), inputs.sequence_T), options.cap)


def icepop(inputs: LossInputs, options: IcepopCorrection) -> torch.Tensor:
    """w where low <= w <= high, else 0."""
    w_T = _truncate_ratio(_log_ratio(inputs), 2 * options.high)
    return torch.where((w_T >= options.low) & (w_T <= options.high), w_T, 0.0)


def geometric(inputs: LossInputs, options: GeometricCorrection) -> torch.Tensor:
    """1 where low <= exp(mean of ln w over the sample) <= high, else 0."""
    mean_T = segment_mean(_log_ratio(inputs), inputs.sequence_T)
    return ((mean_T >= log(options.low)) & (mean_T <= log(options.high))).to(mean_T.dtype)


def k3(inputs: LossInputs, options: K3Correction) -> torch.Tensor:
    """1 where the mean over the sample of k3(mu, pi_old) <= max_kl, else 0.

    Unlike the geometric mean, terms of opposite sign do not cancel.
    """
    kl_T = k3_estimate(inputs.behaviour_T, inputs.old_T.detach())
    return (segment_mean(kl_T, inputs.sequence_T) <= options.max_kl).to(kl_T.dtype)


def decoupled(inputs: LossInputs, options: DecoupledCorrection) -> torch.Tensor:
    """min(w, cap) as a factor of a loss that bounds r = pi / pi_old (arXiv 2505.24298)."""
    return _truncate_ratio(_log_ratio(inputs), options.cap)


def opsm(inputs: LossInputs, options: OpsmCorrection) -> torch.Tensor:
    """0 for A < 0 in samples with mean(log mu - log pi_old) > delta, else 1.

    The current policy rarely samples such a response, so its mistakes are out of date
    (DeepSeek-V3.2, arXiv 2512.02556).
    """
    mean_drop_T = segment_mean(-_log_ratio(inputs), inputs.sequence_T)
    return 1 - ((inputs.advantages_T < 0) & (mean_drop_T > options.delta)).to(mean_drop_T.dtype)


def interpolated_old(
    behaviour_T: torch.Tensor, current_T: torch.Tensor, age_T: torch.Tensor
) -> torch.Tensor:
    """An estimate of log pi_old without a forward pass: (1/age) log mu + (1 - 1/age) log pi.

    Log-linear between the policy that sampled the token, `age_T` versions ago, and the current
    one; tokens of age 0 get the current one.
    """
    weight_T = torch.where(age_T > 0, 1 / age_T.clamp(min=1).to(current_T.dtype), 0.0)
    return weight_T * behaviour_T + (1 - weight_T) * current_T.detach()


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    return (inputs.old_T - inputs.behaviour_T).detach()


def _truncate_ratio(log_w_T: torch.Tensor, cap: float) -> torch.Tensor:
    """min(w, cap), truncated in log space so that exp cannot overflow."""
    return log_w_T.clamp(max=log(cap)).exp()
