"""Importance ratios and KL estimators of two policies, from the log-probs of sampled tokens.

T trained tokens. With x = q / p of a token sampled from p, each estimates KL(p || q):
k1 = -ln x (may be negative, high variance), k2 = ln^2 x / 2 (biased; its gradient is that of the
reverse KL), k3 = x - 1 - ln x (unbiased, never negative). See http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Upper bound of log-ratios before exp: exp(20) is 5e8, far above any clip, and finite."""


def bounded_ratio(log_new_T: torch.Tensor, log_old_T: torch.Tensor) -> torch.Tensor:
    """new / old of each token, always finite; no gradient above the bound."""
    return (log_new_T - log_old_T).clamp(max=MAX_LOG_RATIO).exp()


def k1(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """ln p - ln q."""
    return log_p_T - log_q_T


def k2(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio."""
    return 0.5 * (log_p_T - log_q_T).square()


def k3(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """x - 1 - ln x with x = q / p."""
    # Both terms use the bounded log-ratio. If only the exp were bounded, the gradient above the
    # bound would be that of -ln x alone, which points away from the reference.
    log_x_T = (log_q_T - log_p_T).clamp(max=MAX_LOG_RATIO)
    # expm1: for similar policies, x - 1 has no precision in float32.
    return log_x_T.expm1() - log_x_T


def binary_kl(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)): of sampling the token or any other; never negative."""
    sampled_T = log_p_T.exp() * (log_p_T - log_q_T)
    other_p_T, other_q_T = _log_of_others(log_p_T), _log_of_others(log_q_T)
    return (sampled_T + other_p_T.exp() * (other_p_T - other_q_T)).clamp(min=0)


def _log_of_others(log_p_T: torch.Tensor) -> torch.Tensor:
    """log(1 - p), finite even at p = 1."""
    return (-log_p_T.expm1()).clamp(min=torch.finfo(log_p_T.dtype).tiny).log()


def fixed_coefficient(coefficient: float, *, observed: float, samples: int) -> float:
    """The coefficient of the next step: unchanged."""
    return coefficient


def adaptive_coefficient(
    coefficient: float, *, observed: float, samples: int, target: float, horizon: int
) -> float:
    """The coefficient of the next step, by proportional control of the KL towards `target`.

    coefficient * (1 + e samples / horizon), with e = observed / target - 1 clipped to +-0.2 so that
    a single batch changes it little (arXiv 1909.08593). Never negative.
    """
    error = min(max(observed / target - 1, -0.2), 0.2)
    return max(coefficient * (1 + error * samples / horizon), 0.0)
