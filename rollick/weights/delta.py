"""Lossless deltas of weights between two versions.

In bfloat16 a small optimizer step changes few elements: most updates round to 0. A tensor with few
changes is sent as two tensors:

    gaps    one byte per changed element: the number of unchanged elements before it; 255 means 255
            unchanged elements, and the gap continues in the next byte
    values  the new elements

With 2 % of the elements changed this is 3 % of the tensor's bytes. A tensor with many changes is
sent in full, an unchanged one is not sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from rollick.errors import WeightError
from rollick.weights.manifest import Pairs

GAPS, VALUES = ":gaps", ":values"
MAX_SHARE = 0.25
"""A tensor with a larger share of changed elements is sent in full."""
ESCAPE = 255

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode_changes(new: Pairs, old: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors to send to a receiver that has `old`. Names, dtypes and shapes must be equal."""
    changes: list[tuple[str, Tensor]] = []
    for name, tensor in new:
        changed = (_as_integers(tensor) != _as_integers(old[name])).nonzero().flatten()
        if changed.numel() > MAX_SHARE * tensor.numel():
            changes.append((name, tensor))
        elif changed.numel():
            gaps = encode_gaps(changed.cpu().numpy())
            changes.append((name + GAPS, torch.from_numpy(gaps)))
            changes.append((name + VALUES, tensor.detach().reshape(-1)[changed].cpu()))
    return changes


def apply_changes(changes: Iterable[tuple[str, Tensor]], tensors: Mapping[str, Tensor]) -> None:
    """Apply the changes to `tensors` in place. If this raises, the tensors are invalid."""
    gaps: dict[str, Tensor] = {}
    for name, tensor in changes:
        if name.endswith(GAPS):
            gaps[name.removesuffix(GAPS)] = tensor
        elif name.endswith(VALUES):
            target = tensors[name.removesuffix(VALUES)].view(-1)
            positions = decode_gaps(gaps[name.removesuffix(VALUES)].cpu().numpy())
            if len(positions) != tensor.numel() or int(positions[-1]) >= target.numel():
                raise WeightError(
                    f"the delta of {name} does not fit the tensor", fix="publish again"
                )
            target[torch.from_numpy(positions).to(target.device)] = tensor.to(target.device)
        else:
            tensors[name].copy_(tensor)


def encode_gaps(positions: np.ndarray) -> np.ndarray:
    """Encode ascending positions as bytes."""
    gaps = np.diff(positions, prepend=-1) - 1
    escapes = gaps // ESCAPE
    ends = np.cumsum(escapes + 1) - 1
    encoded = np.full(int(ends[-1]) + 1 if len(ends) else 0, ESCAPE, np.uint8)
    encoded[ends] = gaps % ESCAPE
    return encoded


def decode_gaps(encoded: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(encoded != ESCAPE)
    total = np.cumsum(encoded, dtype=np.int64)
    return total[ends] + np.arange(len(ends))


def _as_integers(tensor: Tensor) -> Tensor:
    """The bits of the elements as integers, so that NaN equals itself and -0 differs from 0."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
