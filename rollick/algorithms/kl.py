"""Ratios and distances of two policies, from the log-probs of drawn tokens.

T trained tokens. With x = q / p of a token drawn from p, every estimator has the mean KL(p || q):
k1 = -ln x (may be negative, high variance), k2 = ln^2 x / 2 (biased; its gradient is that of the
reverse KL), k3 = x - 1 - ln x (unbiased, never negative). See http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: exp(20) is 5e8, far beyond any clip, and never inf."""


def bounded_ratio(log_new_T: torch.Tensor, log_old_T: torch.Tensor) -> torch.Tensor:
    """new / old of each token, finite whatever the inputs; no gradient beyond the bound."""
    return (log_new_T - log_old_T).clamp(max=MAX_LOG_RATIO).exp()


def k1(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """ln p - ln q."""
    return log_p_T - log_q_T


def k2(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio."""
    return 0.5 * (log_p_T - log_q_T).square()


def k3(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """x - 1 - ln x with x = q / p."""
    # One bounded log-ratio for both terms: were only the exp bounded, the gradient beyond the
    # bound would be that of -ln x alone, which points away from the reference.
    log_x_T = (log_q_T - log_p_T).clamp(max=MAX_LOG_RATIO)
    # expm1: for nearby policies, x - 1 loses all its digits in float32.
    return log_x_T.expm1() - log_x_T


def binary_kl(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)): of drawing the token or any other; never negative."""
    drawn_T = log_p_T.exp() * (log_p_T - log_q_T)
    other_p_T, other_q_T = _log_of_others(log_p_T), _log_of_others(log_q_T)
    return (drawn_T + other_p_T.exp() * (other_p_T - other_q_T)).clamp(min=0)


def _log_of_others(log_p_T: torch.Tensor) -> torch.Tensor:
    """log(1 - p), finite also at p = 1."""
    return (-log_p_T.expm1()).clamp(min=torch.finfo(log_p_T.dtype).tiny).log()


def fixed_coefficient(coefficient: float, *, observed: float, samples: int) -> float:
    """The coefficient for the next step: the same."""
    return coefficient


def adaptive_coefficient(
    coefficient: float, *, observed: float, samples: int, target: float, horizon: int
) -> float:
    """The coefficient for the next step, by proportional control of the KL to `target`.

    coefficient (1 + e samples / horizon), e = observed / target - 1 within +-0.2: a KL above its
    target raises the coefficient, one wild batch cannot change it much (arXiv 1909.08593). It
    never becomes negative, however many samples a step has.
    """
    error = min(max(observed / target - 1, -0.2), 0.2)
    return max(coefficient * (1 + error * samples / horizon), 0.0)
