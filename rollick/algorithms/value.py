"""The value loss of a critic: (ValueInputs, options) -> TokenLoss. Pure functions.

T trained tokens. values_T carries the gradient, old_T is the value before the step, returns_T the
target. The trainer applies the weights, as for policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollick.algorithms.losses import TokenLoss
from rollick.config.schema.losses import ValueLoss


@dataclass(frozen=True, slots=True, eq=False)
class ValueInputs:
    """The inputs of a value loss."""

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
