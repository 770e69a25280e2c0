"""The memory of keys and values: one slot for each sequence, per layer.

Owns allocation, growth, and copies between slots. Does not know requests, nor which slot holds
what (rows.py does). Memory follows need: slots and positions grow together for all layers, in
blocks.

The layout is dense, not paged: on the CPU, attention over pages must first gather them, which
costs a copy of all keys and values per step, and that is more than the whole of attention over
slots. What a group shares is computed once and copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 64
"""Positions that the cache grows by; also keeps views a multiple of 8 long."""


class SlotCache:
    """Keys and values [slots, kv_heads, length, head_dim] of each layer."""

    def __init__(self) -> None:
        self.slots = 0
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return sum(t.nbytes for t in self._tensors())

    def reserve(self, *, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens; what is stored stays."""
        if slots <= self.slots and length <= self.length:
            return
        # Slots double, so that a slow trickle of arrivals copies the cache only a few times.
        if slots > self.slots:
            self.slots = max(slots, 2 * self.slots)
        self.length = max(self.length, -(-length // BLOCK) * BLOCK)
        for layers in (self._keys, self._values):
            for index, old in layers.items():
                layers[index] = self._allocate(old)
                layers[index][: old.shape[0], :, : old.shape[2]] = old

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self._keys:
            self._keys[index] = self._allocate(key)
            self._values[index] = self._allocate(value)
        return self._keys[index], self._values[index]

    def _allocate(self, like: Tensor) -> Tensor:
        # Zeros, not empty: positions behind a mask are still multiplied, and junk may be NaN.
        return like.new_zeros(self.slots, like.shape[1], self.length, like.shape[3])

    def copy(self, source: int, targets: Sequence[int], *, length: int) -> None:
        """The first `length` positions of one slot into others."""
        if length and targets:
            where = slice(targets[0], targets[0] + 1) if len(targets) == 1 else list(targets)
            for tensor in self._tensors():
                tensor[where, :, :length] = tensor[source, :, :length]

    def swap(self, one: int, other: int, *, length: int) -> None:
        """Two slots exchange their first `length` positions."""
        for tensor in self._tensors():
            kept = tensor[one, :, :length].clone()
            tensor[one, :, :length] = tensor[other, :, :length]
            tensor[other, :, :length] = kept

    def free(self) -> None:
        """Give all memory back."""
        on_gpu = any(tensor.is_cuda for tensor in self._keys.values())
        self._keys.clear()
        self._values.clear()
        self.slots = self.length = 0
        if on_gpu:
            torch.cuda.empty_cache()

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._keys.values()
        yield from self._values.values()
