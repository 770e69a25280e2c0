"""Weights through host memory: the learner writes them once, and every receiver maps them (mmap).

The memory is a memfd: receivers open it through the sender's entry in /proc; the kernel frees it
when the last process that maps it ends. Publishes reuse it, so only the first one allocates pages.
If an engine uses the memory in place, the next offer uses a second buffer, and the two alternate.
Engines may receive weights at different times (a restarted engine gets its first weights alone), so
the sender tracks the buffers of each engine. Without memfd, or without memory for it, the sender
uses a temporary file. Its name contains the process id, so that files of dead processes can be
removed.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rollick.children.process_tree import process_exists
from rollick.errors import WeightError
from rollick.models.loading.fingerprint import copy_and_fingerprint
from rollick.trainer.strategy import ShardedWeights
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.manifest import Pairs, TensorLayout, WeightManifest, plan_layout, views_of

LOG = logging.getLogger("rollick")

PREFIX = "rollick-weights-"
_BUFFER_NUMBERS = count()
LARGE_PAGE = 2 << 20
"""Fingerprints are about 1.5 times as fast on pages of this size as on small ones."""
MADV_POPULATE_READ, MADV_COLLAPSE = 22, 25
"""Linux 5.14 and 6.1; the mmap module has no names for them."""


@dataclass(frozen=True, slots=True)
class HostSource:
    """The shared memory to map. `identity` (device, inode) detects a path that was reused."""

    path: str
    size: int
    identity: tuple[int, int]
    buffers: tuple[tuple[int, int], ...]
    """Identities of the sender's current buffers; a receiver unmaps all others."""


@dataclass(slots=True, eq=False)
class SharedBuffer:
    """Memory of the sender that receivers can map."""

    path: str
    descriptor: int
    identity: tuple[int, int]
    memory: Tensor
    is_file: bool  # not a memfd
    layout: tuple[TensorLayout, ...] = ()
    targets: tuple[Tensor, ...] = ()
    """Views of the memory, cached because the layout rarely changes between offers."""

    @classmethod
    def create(cls, size: int) -> SharedBuffer:
        """Allocate memory; without room for it, a file in the temporary folder."""
        try:
            return cls._create(size, in_memory=hasattr(os, "memfd_create"))
        except OSError as error:
            if not hasattr(os, "memfd_create"):
                raise _allocation_error(size, error) from error
            reason = error
        folder = tempfile.gettempdir()
        message = "no memory for %.2f GB of weights (%s); using a file in %s, which is slower"
        LOG.warning(message, size / 1e9, reason.strerror, folder)
        try:
            return cls._create(size, in_memory=False)
        except OSError as error:
            raise _allocation_error(size, error) from reason

    @classmethod
    def _create(cls, size: int, *, in_memory: bool) -> SharedBuffer:
        if in_memory:
            descriptor = os.memfd_create(f"{PREFIX}{next(_BUFFER_NUMBERS)}")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            remove_stale_files()
            descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-")
        try:
            memory = _allocate_memory(descriptor, size)
        except OSError:
            os.close(descriptor)
            if not in_memory:
                Path(path).unlink()
            raise
        return cls(path, descriptor, _identity(descriptor), memory, is_file=not in_memory)

    def close(self) -> None:
        """Close the file. Existing maps stay valid; new ones cannot be created."""
        os.close(self.descriptor)
        if self.is_file:
            Path(self.path).unlink(missing_ok=True)


class HostSender:
    """Owns the shared buffers and tracks which ones each engine uses in place."""

    def __init__(self) -> None:
        self.buffers: list[SharedBuffer] = []
        self.used_by_rank: dict[int, list[SharedBuffer]] = {}
        """The buffers that each engine uses, or may use if its commit was not confirmed."""
        self.offered: SharedBuffer | None = None
        self.offered_to: tuple[int, ...] = ()

    def offer(
        self, pairs: Pairs | ShardedWeights, version: PolicyVersion, ranks: tuple[int, ...]
    ) -> WeightManifest:
        """Copy the tensors into a free buffer; sharded tensors are gathered one by one."""
        layout, size = plan_layout(pairs.shapes if isinstance(pairs, ShardedWeights) else pairs)
        buffer = self._get_free_buffer(max(size, 1))
        self.offered, self.offered_to = buffer, ranks
        if buffer.layout != layout:
            buffer.targets = tuple(view for _, view in views_of(buffer.memory, layout))
            buffer.layout = layout
        digest = copy_and_fingerprint(pairs, buffer.targets)
        identities = tuple(buffer.identity for buffer in self.buffers)
        source = HostSource(buffer.path, buffer.memory.numel(), buffer.identity, identities)
        return WeightManifest(version, digest, layout, source)

    def send(self) -> None: ...

    def release(self, outcome: PublishOutcome) -> None:
        offered, self.offered = self.offered, None
        if offered is None:
            return
        if outcome.committed:
            for rank, has_adopted in outcome.adopted.items():
                self.used_by_rank[rank] = [offered] if has_adopted else []
            used, free = self._split_buffers()
            self._close_all_but([*used, *free[:1]])
        elif outcome.committed is None:
            for rank in self.offered_to:
                self.used_by_rank.setdefault(rank, []).append(offered)

    def close(self) -> None:
        self._close_all_but([])
        self.used_by_rank.clear()

    def _get_free_buffer(self, size: int) -> SharedBuffer:
        used, free = self._split_buffers()
        fitting = [buffer for buffer in free if buffer.memory.numel() >= size]
        if fitting:
            return fitting[0]
        self._close_all_but(used)
        buffer = SharedBuffer.create(size)
        self.buffers.append(buffer)
        return buffer

    def _split_buffers(self) -> tuple[list[SharedBuffer], list[SharedBuffer]]:
        in_use = [buffer for buffers in self.used_by_rank.values() for buffer in buffers]
        used = [buffer for buffer in self.buffers if buffer in in_use]
        return used, [buffer for buffer in self.buffers if buffer not in in_use]

    def _close_all_but(self, kept: list[SharedBuffer]) -> None:
        for buffer in self.buffers:
            if buffer not in kept:
                buffer.close()
        self.buffers = list(kept)


class HostReceiver:
    """Caches the maps of the sender's buffers."""

    persistent = True

    def __init__(self) -> None:
        self.mapped: dict[tuple[int, int], tuple[Tensor, tuple[TensorLayout, ...], Pairs]] = {}
        """By buffer identity: the memory, and the layout and tensors of its last offer."""

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        source: HostSource = manifest.source
        self.mapped = {key: entry for key, entry in self.mapped.items() if key in source.buffers}
        cached = self.mapped.get(source.identity)
        memory, layout, pairs = cached or (_map_buffer(source, manifest.version), (), ())
        if layout != manifest.layout:
            pairs = views_of(memory, manifest.layout)
        self.mapped[source.identity] = (memory, manifest.layout, pairs)
        return pairs

    def forget(self) -> None:
        self.mapped.clear()


def remove_stale_files() -> None:
    """Remove the files of senders whose process has ended."""
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        pid = file.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not process_exists(int(pid)):
            file.unlink(missing_ok=True)


def _allocation_error(size: int, error: OSError) -> WeightError:
    return WeightError(
        f"cannot allocate {size / 1e9:.2f} GB of host memory for weights: {error}",
        fix="free memory, or choose another weights.channel",
    )


def _map_buffer(source: HostSource, version: PolicyVersion) -> Tensor:
    try:
        descriptor = os.open(source.path, os.O_RDONLY)
    except OSError as error:
        raise _unavailable_error(source, version) from error
    try:
        if _identity(descriptor) != source.identity:
            raise _unavailable_error(source, version)
        # Copy-on-write: torch needs writable memory, and a receiver must not change shared pages.
        mapped, start = _map_file(descriptor, source.size, mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    with suppress(OSError):  # Older kernels load pages on first read.
        mapped.madvise(MADV_POPULATE_READ, start, source.size)
    return _as_tensor(mapped, start, source.size)


def _allocate_memory(descriptor: int, size: int) -> Tensor:
    """Allocate `size` bytes in an empty file, in large pages if available, and map them."""
    os.ftruncate(descriptor, 2 * LARGE_PAGE + size)
    mapped, start = _map_file(descriptor, size, mmap.ACCESS_WRITE)
    large_bytes = size // LARGE_PAGE * LARGE_PAGE
    if large_bytes and hasattr(mapped, "madvise"):
        for offset in range(0, large_bytes, LARGE_PAGE):
            # Only allocated pages can be collapsed into a large page.
            os.pwrite(descriptor, b"\0", LARGE_PAGE + offset)
        with suppress(OSError):  # Older kernels and fragmented memory keep small pages.
            mapped.madvise(MADV_COLLAPSE, start, large_bytes)
    if hasattr(os, "posix_fallocate"):
        # Reserve the memory: writing to an unreserved map when memory is full kills the process.
        os.posix_fallocate(descriptor, LARGE_PAGE, size)
    return _as_tensor(mapped, start, size)


def _map_file(descriptor: int, size: int, access: int) -> tuple[mmap.mmap, int]:
    """The map, and the offset of the weights in it; in the file they start at LARGE_PAGE. A large
    page must start at a multiple of its size both in the file and in the address space. The kernel
    chooses the address, so an unaligned map is replaced by one with a shifted file offset."""
    mapped = mmap.mmap(descriptor, LARGE_PAGE + size, access=access)
    shift = np.frombuffer(mapped, np.uint8).ctypes.data % LARGE_PAGE
    if shift:
        mapped.close()
        mapped = mmap.mmap(descriptor, LARGE_PAGE + size, access=access, offset=shift)
    return mapped, LARGE_PAGE - shift


def _unavailable_error(source: HostSource, version: PolicyVersion) -> WeightError:
    return WeightError(
        f"the weights of version {version} are not available at {source.path}",
        fix="check that the learner runs; on another machine it needs weights.channel=broadcast",
    )


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _as_tensor(mapped: mmap.mmap, start: int, size: int) -> Tensor:
    """A uint8 tensor view of the map; it keeps the map alive."""
    return torch.from_numpy(np.frombuffer(mapped, np.uint8, size, start))
