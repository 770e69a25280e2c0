"""What a publish says of its weights: which tensors, where they lie, and how to know them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollick.types import Fingerprint, PolicyVersion

ALIGN = 64

Pairs = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in memory that holds all of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Change:
    """The tensors are not weights but what is other in them than in the base (see delta.py)."""

    base: PolicyVersion
    base_fingerprint: Fingerprint
    result: Fingerprint
    """Of the weights that come out."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One offer of weights. It travels by value; `source` says how to get at the bytes."""

    version: PolicyVersion
    fingerprint: Fingerprint
    """Of what is transferred."""
    places: tuple[TensorPlace, ...]
    source: Any
    change: Change | None = None
    is_base: bool = False
    """Whether later offers may be changes to this one, so that a receiver keeps a copy of it."""
    partial_of: Fingerprint | None = None
    """Only some of the parameters: a receiver must hold these weights."""
    scale: float | None = None
    """The tensors are adapters, to be added to those weights times this."""

    @property
    def transferred_bytes(self) -> int:
        return sum(place.size for place in self.places)


def lay_out(pairs: Iterable[tuple[str, Tensor]]) -> tuple[tuple[TensorPlace, ...], int]:
    """A place for each tensor, one after another, and the bytes that all of them take."""
    places: list[TensorPlace] = []
    offset = 0
    for name, tensor in pairs:
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, dtype, tuple(tensor.shape), offset, size))
        offset += -(-size // ALIGN) * ALIGN
    return tuple(places), offset


def view_at(memory: Tensor, place: TensorPlace) -> Tensor:
    """The tensor that lies there, as a view of the memory."""
    part = memory[place.offset : place.offset + place.size]
    return part.view(getattr(torch, place.dtype)).view(place.shape)


def views_of(memory: Tensor, places: Iterable[TensorPlace]) -> list[tuple[str, Tensor]]:
    return [(place.name, view_at(memory, place)) for place in places]
