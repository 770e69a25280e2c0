"""The KV cache of SlotRunner: one slot per sequence, in each layer.

The layout is dense, not paged. On the CPU, attention over pages would first gather them, which
copies all keys and values in each step and costs more than attention over slots. A shared prefix is
computed once and copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 64
"""Positions by which the cache grows; a multiple of 8, so that views stay aligned."""


class SlotCache:
    """Keys and values [slots, kv_heads, length, head_dim] of each layer."""

    def __init__(self) -> None:
        self.slots = 0
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def reserve(self, *, slots: int, length: int) -> None:
        """Grow to `slots` sequences of `length` tokens; keeps the content."""
        if slots <= self.slots and length <= self.length:
            return
        # Double the slots, so that a growing batch copies the cache only a few times.
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
        # Zeros, not empty: masked positions are still multiplied, and garbage may be NaN.
        return like.new_zeros(self.slots, like.shape[1], self.length, like.shape[3])

    def copy(self, source: int, targets: Sequence[int], *, length: int) -> None:
        """Copy the first `length` positions of one slot to others."""
        if length and targets:
            slots = slice(targets[0], targets[0] + 1) if len(targets) == 1 else list(targets)
            for tensor in self.tensors():
                tensor[slots, :, :length] = tensor[source, :, :length]

    def swap(self, first: int, second: int, *, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for tensor in self.tensors():
            copied = tensor[first, :, :length].clone()
            tensor[first, :, :length] = tensor[second, :, :length]
            tensor[second, :, :length] = copied

    def free(self) -> None:
        on_gpu = any(tensor.is_cuda for tensor in self._keys.values())
        self._keys.clear()
        self._values.clear()
        self.slots = self.length = 0
        if on_gpu:
            torch.cuda.empty_cache()

    def tensors(self) -> Iterator[Tensor]:
        yield from self._keys.values()
        yield from self._values.values()
