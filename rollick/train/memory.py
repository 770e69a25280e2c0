"""Memory that is given back for a while: what lived in it waits in the host's.

Owns the copies and the order of freeing and filling. Does not know what the tensors are for
(body.py) or when a role sleeps (the residency plan of cluster/devices.py).

    park        device -> host memory (pinned for a GPU, kept for next time) -> storage of 0 bytes
    bring_back  storage of its old size, at another address -> host memory -> device

Where an address must stay, because somebody computes there meanwhile or has captured a graph over
it, the tensor is named in `staying` and its memory is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class Parked:
    """Tensors whose memory is given back for a while, with copies in the CPU's.

    Only the memory goes: every tensor keeps its storage object, so what shares a storage (an
    engine) finds it again when it is brought back.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._buffers: dict[str, torch.Tensor] = {}
        """Pinned memory takes long to get, so it is kept from one sleep to the next."""
        self.copies: dict[str, torch.Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.copies)

    def park(
        self, named: Mapping[str, torch.Tensor], *, staying: Iterable[torch.Tensor] = ()
    ) -> None:
        """Take the memory of these tensors, but not where one of `staying` lives. What several of
        them hold together is kept under the first one's name; parts of a storage each by theirs."""
        stays = {tensor.untyped_storage().data_ptr() for tensor in staying}
        held: dict[int, torch.UntypedStorage] = {}
        seen: set[tuple[int, int]] = set()
        for name, tensor in named.items():
            storage = tensor.untyped_storage()
            place = tensor.data_ptr(), tensor.nbytes
            if storage.size() == 0 or storage.data_ptr() in stays or place in seen:
                continue
            seen.add(place)
            held.setdefault(storage.data_ptr(), storage)
            self._tensors[name], self.copies[name] = tensor, self._copied(name, tensor)
        _wait(self._tensors.values())
        for storage in held.values():
            self._sizes.append((storage, storage.size()))
            storage.resize_(0)

    def bring_back(self) -> None:
        for storage, size in self._sizes:
            storage.resize_(size)
        for name, tensor in self._tensors.items():
            tensor.copy_(self.copies[name], non_blocking=True)
        _wait(self._tensors.values())
        self._tensors, self._sizes, self.copies = {}, [], {}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)


def _wait(tensors: Iterable[torch.Tensor]) -> None:
    """Until copies between device and host are over."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
