"""The loss of a critic. Pure: (ValueInputs, options) -> TokenLoss.

T trained tokens, each with its value now (which carries the gradient), its value before the step
and the return to meet. Weights of the aggregation are applied by the trainer, as for policies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollick.algorithms.losses import TokenLoss
from rollick.config.losses import ValueLoss


@dataclass(frozen=True, slots=True, eq=False)
class ValueInputs:
    """What the loss of a critic may look at."""

    values_T: torch.Tensor
    old_T: torch.Tensor
    returns_T: torch.Tensor
    weights_T: torch.Tensor


def value(inputs: ValueInputs, options: ValueLoss) -> TokenLoss:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2.

    The larger of the two: a value that moved beyond the clip towards its return gets no gradient.
    """
    values_T, old_T, returns_T = inputs.values_T, inputs.old_T, inputs.returns_T
    near_T = torch.minimum(torch.maximum(values_T, old_T - options.clip), old_T + options.clip)
    free_T, held_T = (values_T - returns_T).square(), (near_T - returns_T).square()
    with torch.no_grad():
        sums = {
            "value_error": free_T.sum(),
            "value_clip_share": (held_T > free_T).sum(),
            "value": values_T.sum(),
            "return": returns_T.sum(),
        }
    return TokenLoss(0.5 * torch.maximum(free_T, held_T), sums)
