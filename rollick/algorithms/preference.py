"""Losses of pairs: a chosen and a rejected answer to the same prompt. Pure; P pairs.

All arguments are log-probs of whole answers (sums over their tokens); only those of the policy
carry a gradient. The margin of a pair is how much more the policy prefers the chosen answer than
the reference does: (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected).
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def dpo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    *,
    reference_chosen_P: torch.Tensor,
    reference_rejected_P: torch.Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), e the share of wrong labels."""
    margin_P = (chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P)
    right_P, wrong_P = logsigmoid(beta * margin_P), logsigmoid(-beta * margin_P)
    return -(1 - label_smoothing) * right_P - label_smoothing * wrong_P


def ipo(
    chosen_P: torch.Tensor,
    rejected_P: torch.Tensor,
    *,
    reference_chosen_P: torch.Tensor,
    reference_rejected_P: torch.Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """(1 - e) (m - 1 / (2 beta))^2 + e (m + 1 / (2 beta))^2.

    A margin to meet instead of one to grow for ever (arXiv 2310.12036).
    """
    margin_P = (chosen_P - reference_chosen_P) - (rejected_P - reference_rejected_P)
    goal = 1 / (2 * beta)
    right_P, wrong_P = (margin_P - goal).square(), (margin_P + goal).square()
    return (1 - label_smoothing) * right_P + label_smoothing * wrong_P
