"""The memory of keys and values: one slot for each running sequence, per layer.

Owns allocation, growth, copies between slots, and which slot still holds which prefix. Does not
know requests. Memory follows need: slots and positions grow together for all layers, in blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Positions that the cache grows by; also keeps views a multiple of 8 long."""


class SlotCache:
    """Keys and values [slots, kv_heads, length, head_dim] of each layer.

    A prefix is named by a bytes key; `holder(key)` is a slot whose first positions are its keys
    and values, as long as nothing overwrote them.
    """

    def __init__(self) -> None:
        self.slots = 0
        self.length = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._holders: dict[bytes, int] = {}
        self._held: dict[int, bytes] = {}

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return sum(t.nbytes for t in (*self._keys.values(), *self._values.values()))

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

    def copy(self, source: int, target: int, *, length: int) -> None:
        """The first `length` positions of one slot into another."""
        for layers in (self._keys, self._values):
            for tensor in layers.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def holder(self, key: bytes) -> int | None:
        return self._holders.get(key)

    def hold(self, slot: int, key: bytes) -> None:
        """From now on `slot` begins with the prefix `key` (and with no other)."""
        self.forget(slot)
        self._holders[key] = slot
        self._held[slot] = key

    def move(self, source: int, target: int, *, length: int) -> None:
        """A sequence changes its slot, and takes along the prefix it holds."""
        self.copy(source, target, length=length)
        key = self._held.get(source)
        self.forget(target)
        if key is not None:
            self.hold(target, key)

    def forget(self, slot: int) -> None:
        key = self._held.pop(slot, None)
        if key is not None and self._holders.get(key) == slot:
            del self._holders[key]

    def forget_all(self) -> None:
        """The weights changed: no prefix is worth anything."""
        self._holders.clear()
        self._held.clear()

    def free(self) -> None:
        """Give all memory back."""
        on_gpu = any(tensor.is_cuda for tensor in self._keys.values())
        self._keys.clear()
        self._values.clear()
        self.slots = self.length = 0
        self.forget_all()
        if on_gpu:
            torch.cuda.empty_cache()
