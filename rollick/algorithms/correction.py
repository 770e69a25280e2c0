"""Corrections: the weight of a token for the mismatch between the engine and the learner.

Pure functions: (behaviour_T, old_T, options) -> weights_T, a factor of each token's policy loss
that carries no gradient. behaviour_T is log mu as the engine gave it, old_T is log pi_old of the
learner at the start of the step. What stands for pi_old is decided in objective.py: under
`bypass` it is mu itself, and the learner's forward is saved.
"""

from __future__ import annotations

from math import log

import torch

from rollick.config.losses import BypassCorrection, NoCorrection, TokenTisCorrection


def bypass(
    behaviour_T: torch.Tensor, old_T: torch.Tensor, options: BypassCorrection
) -> torch.Tensor:
    """1: the loss itself is on pi / mu, so there is no mismatch left to weigh."""
    return torch.ones_like(behaviour_T)


def none(behaviour_T: torch.Tensor, old_T: torch.Tensor, options: NoCorrection) -> torch.Tensor:
    """1: the mismatch is measured, not corrected."""
    return torch.ones_like(behaviour_T)


def token_tis(
    behaviour_T: torch.Tensor, old_T: torch.Tensor, options: TokenTisCorrection
) -> torch.Tensor:
    """min(pi_old / mu, cap): truncated importance sampling, token by token."""
    # Truncated in log space, so that no exp can overflow.
    return (old_T - behaviour_T).detach().clamp(max=log(options.cap)).exp()
