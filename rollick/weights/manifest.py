"""WeightManifest: the names, shapes, memory layout and fingerprint of published weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollick.types import Fingerprint, PolicyVersion

ALIGN = 64
"""Each tensor starts at a multiple of this many bytes."""

Pairs = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where one tensor is in a buffer that holds all of them; `offset` and `size` are in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """Marks the tensors as changes relative to a base version (see delta.py)."""

    base: PolicyVersion
    base_fingerprint: Fingerprint
    result: Fingerprint
    """Fingerprint of the resulting weights."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """An offer of weights, sent by value. `source` locates the bytes."""

    version: PolicyVersion
    fingerprint: Fingerprint
    """Fingerprint of the transferred tensors."""
    layout: tuple[TensorLayout, ...]
    source: Any
    delta: WeightDelta | None = None
    is_base: bool = False
    """Whether later offers may be deltas to this one, so that a receiver must keep a copy."""
    partial_of: Fingerprint | None = None
    """Set if only some parameters are sent: the full weights that a receiver must have."""
    scale: float | None = None
    """Set if the tensors are adapters: the factor with which they are added to those weights."""
    in_place: bool = False
    """Whether engines may write the tensors into their parameters before all are verified."""

    @property
    def transferred_bytes(self) -> int:
        return sum(tensor.size for tensor in self.layout)


def plan_layout(pairs: Iterable[tuple[str, Tensor]]) -> tuple[tuple[TensorLayout, ...], int]:
    """Lay out the tensors one after another; returns the layout and the buffer's size in bytes."""
    layouts: list[TensorLayout] = []
    offset = 0
    for name, tensor in pairs:
        size = tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        layouts.append(TensorLayout(name, dtype, tuple(tensor.shape), offset, size))
        offset += -(-size // ALIGN) * ALIGN
    return tuple(layouts), offset


def views_of(memory: Tensor, layouts: Iterable[TensorLayout]) -> list[tuple[str, Tensor]]:
    """The tensors as views of the buffer, with their names."""
    pairs: list[tuple[str, Tensor]] = []
    for layout in layouts:
        data = memory[layout.offset : layout.offset + layout.size]
        pairs.append((layout.name, data.view(getattr(torch, layout.dtype)).view(layout.shape)))
    return pairs
