"""Offloads tensors to host memory.

    move_to_host        copy to host memory (pinned, reused) -> resize the storage to 0 bytes
    restore_from_host   resize the storage, which changes its address -> copy to the device

`keep` excludes tensors whose address must not change: an engine or a captured graph uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class OffloadedTensors:
    """Tensors whose device memory is freed, with copies in host memory. Each keeps its storage
    object, so others that share the storage (an engine) see the values again after a restore."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._buffers: dict[str, Tensor] = {}
        """Kept between sleeps, because pinned memory is slow to allocate."""
        self.copies: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.copies)

    def move_to_host(self, named: Mapping[str, Tensor], *, keep: Iterable[Tensor] = ()) -> None:
        """Free the memory of these tensors, except storages of `keep`. Tensors over the same memory
        are copied once, under the first name."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in keep}
        freed: dict[int, torch.UntypedStorage] = {}
        copied: set[tuple[int, int]] = set()
        for name, tensor in named.items():
            storage = tensor.untyped_storage()
            region = tensor.data_ptr(), tensor.nbytes
            if storage.size() == 0 or storage.data_ptr() in kept or region in copied:
                continue
            copied.add(region)
            freed.setdefault(storage.data_ptr(), storage)
            self._tensors[name], self.copies[name] = tensor, self._copy_to_host(name, tensor)
        _synchronize(self._tensors.values())
        for storage in freed.values():
            self._sizes.append((storage, storage.size()))
            storage.resize_(0)

    def restore_from_host(self) -> None:
        for storage, size in self._sizes:
            storage.resize_(size)
        for name, tensor in self._tensors.items():
            tensor.copy_(self.copies[name], non_blocking=True)
        _synchronize(self._tensors.values())
        self._tensors, self._sizes, self.copies = {}, [], {}

    def _copy_to_host(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def _synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for copies between device and host."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
