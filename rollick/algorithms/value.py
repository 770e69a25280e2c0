"""The loss of a critic. Pure; T trained tokens, each with its value and the return to meet."""

from __future__ import annotations

import torch


def value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    *,
    returns_T: torch.Tensor,
    clip: float = 0.2,
) -> torch.Tensor:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2.

    The larger of the two: a value that moved beyond the clip towards its return gets no gradient.
    """
    near_T = torch.minimum(torch.maximum(values_T, old_values_T - clip), old_values_T + clip)
    return 0.5 * torch.maximum((values_T - returns_T).square(), (near_T - returns_T).square())
