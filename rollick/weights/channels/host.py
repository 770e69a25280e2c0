"""Weights through host memory: the learner writes them once, every receiver maps them.

The memory is a memfd: it has no name in any folder, receivers open it through the sender's entry in
/proc, and the kernel frees it when the last process that maps it ends, however that happens. It is
made once and written again at each publish, so that only the first one pays for its pages. An
engine may live in the memory itself (`held`): then the next offer goes into another buffer, and two
take turns.

Where there is no memfd (not Linux), a file in the folder for temporary files does the same; its
name has the sender's process id, and files of processes that are gone are swept.
"""

from __future__ import annotations

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

from rollick.errors import WeightError
from rollick.models.fingerprint import copy_and_fingerprint
from rollick.train.strategy import ShardedWeights
from rollick.types import PolicyVersion
from rollick.weights.channels.base import Outcome
from rollick.weights.manifest import Pairs, TensorPlace, WeightManifest, lay_out, view_at, views_of

PREFIX = "rollick-weights-"
LARGE_PAGE = 2 << 20
"""To sum memory in pages of this size is about half as fast again as in small ones."""
MADV_POPULATE_READ, MADV_COLLAPSE = 22, 25
"""Linux 5.14 and 6.1; the mmap module has no names for them."""


@dataclass(frozen=True, slots=True)
class HostSource:
    """Which memory to map. `identity` (device and inode) tells it from one that took its place."""

    path: str
    size: int
    identity: tuple[int, int]
    live: tuple[tuple[int, int], ...]
    """All buffers that the sender has; a receiver lets go of any other."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of the sender that others can map."""

    path: str
    descriptor: int
    identity: tuple[int, int]
    memory: Tensor
    named: bool
    places: tuple[TensorPlace, ...] = ()
    targets: tuple[Tensor, ...] = ()
    """Views of the memory at the places of the last offer, which mostly are those of the next."""

    @classmethod
    def create(cls, size: int) -> Buffer:
        descriptor, path, named = _create_file()
        try:
            memory = _make_memory(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            if named:
                Path(path).unlink()
            raise WeightError(
                f"no host memory for {size / 1e9:.2f} GB of weights: {error}",
                fix="free memory, or choose another weights.channel",
            ) from error
        return cls(path, descriptor, _identity(descriptor), memory, named)

    def close(self) -> None:
        """Maps of it live on; nobody can make a new one."""
        os.close(self.descriptor)
        if self.named:
            Path(self.path).unlink(missing_ok=True)


class HostSender:
    """Keeps the buffers, and knows which of them engines live in."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.held: list[Buffer] = []
        self.offered: Buffer | None = None

    def offer(
        self, pairs: Pairs | ShardedWeights, version: PolicyVersion, ranks: tuple[int, ...]
    ) -> WeightManifest:
        """Weights of a sharded learner are written one by one as they come."""
        places, size = lay_out(pairs.shapes if isinstance(pairs, ShardedWeights) else pairs)
        buffer = self._free_buffer(max(size, 1))
        self.offered = buffer
        if buffer.places != places:
            buffer.targets = tuple(view_at(buffer.memory, place) for place in places)
            buffer.places = places
        found = copy_and_fingerprint(pairs, buffer.targets)
        live = tuple(buffer.identity for buffer in self.buffers)
        source = HostSource(buffer.path, buffer.memory.numel(), buffer.identity, live)
        return WeightManifest(version, found, places, source)

    def send(self) -> None: ...

    def release(self, outcome: Outcome) -> None:
        offered, self.offered = self.offered, None
        if offered is None:
            return
        if outcome.committed:
            if outcome.held is not None:
                self.held = [offered] if outcome.held else []
            free = [buffer for buffer in self.buffers if buffer not in self.held]
            self._keep([*self.held, *free[:1]])
        elif outcome.committed is None:
            self.held.append(offered)

    def close(self) -> None:
        self._keep([])
        self.held.clear()

    def _free_buffer(self, size: int) -> Buffer:
        free = [buffer for buffer in self.buffers if buffer not in self.held]
        fitting = [buffer for buffer in free if buffer.memory.numel() >= size]
        if fitting:
            return fitting[0]
        self._keep(self.held)
        buffer = Buffer.create(size)
        self.buffers.append(buffer)
        return buffer

    def _keep(self, kept: list[Buffer]) -> None:
        for buffer in self.buffers:
            if buffer not in kept:
                buffer.close()
        self.buffers = list(kept)


class HostReceiver:
    """Keeps what it has mapped for as long as the sender has it."""

    lasting = True

    def __init__(self) -> None:
        self.mapped: dict[tuple[int, int], Tensor] = {}
        self.opened: dict[tuple[int, int], tuple[tuple[TensorPlace, ...], Pairs]] = {}
        """The tensors of the last offer in each memory, which mostly are those of the next."""

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        source: HostSource = manifest.source
        key = source.identity
        self.mapped = {key: held for key, held in self.mapped.items() if key in source.live}
        self.opened = {key: held for key, held in self.opened.items() if key in source.live}
        if key not in self.mapped:
            self.mapped[key] = _map(source, manifest.version)
        if key not in self.opened or self.opened[key][0] != manifest.places:
            self.opened[key] = (manifest.places, views_of(self.mapped[key], manifest.places))
        return self.opened[key][1]

    def forget(self) -> None:
        self.mapped.clear()
        self.opened.clear()


def sweep(folder: Path | None = None) -> None:
    """Remove the files of senders that are gone."""
    for file in (folder or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        process = file.name.removeprefix(PREFIX).split("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            file.unlink(missing_ok=True)


def _create_file() -> tuple[int, str, bool]:
    """A descriptor, the path for others to open it, and whether that path is a name of its own."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"{PREFIX}{next(_NUMBERS)}")
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", False
    sweep()
    descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{os.getpid()}-")
    return descriptor, path, True


_NUMBERS = count()


def _map(source: HostSource, version: PolicyVersion) -> Tensor:
    try:
        descriptor = os.open(source.path, os.O_RDONLY)
    except OSError as error:
        raise _unreachable(source, version) from error
    try:
        if _identity(descriptor) != source.identity:
            raise _unreachable(source, version)
        # Copy-on-write: torch wants writable memory, and a receiver never alters what others read.
        mapped, start = _map_file(descriptor, source.size, mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    with suppress(OSError):  # An older kernel: the pages come one by one as they are read.
        mapped.madvise(MADV_POPULATE_READ, start, source.size)
    return _tensor_of(mapped, start, source.size)


def _make_memory(descriptor: int, size: int) -> Tensor:
    """Memory of this size behind an empty file, in large pages as far as the system has them."""
    os.ftruncate(descriptor, 2 * LARGE_PAGE + size)
    mapped, start = _map_file(descriptor, size, mmap.ACCESS_WRITE)
    large = size // LARGE_PAGE * LARGE_PAGE
    if large and hasattr(mapped, "madvise"):
        for place in range(0, large, LARGE_PAGE):
            # Only where something is can be collapsed into a large page.
            os.pwrite(descriptor, b"\0", LARGE_PAGE + place)
        with suppress(OSError):  # An older kernel, or memory in pieces: small pages do.
            mapped.madvise(MADV_COLLAPSE, start, large)
    if hasattr(os, "posix_fallocate"):
        # Reserved, not only sized: writing into a map of full memory would kill the process.
        os.posix_fallocate(descriptor, LARGE_PAGE, size)
    return _tensor_of(mapped, start, size)


def _map_file(descriptor: int, size: int, access: int) -> tuple[mmap.mmap, int]:
    """A map, and where in it the memory begins, which is at LARGE_PAGE in the file.

    A large page has to begin at a multiple of its size in the file and in the map alike. The kernel
    says where a map begins; asked once more it says the same, so we move the file's part.
    """
    mapped = mmap.mmap(descriptor, LARGE_PAGE + size, access=access)
    shift = np.frombuffer(mapped, np.uint8).ctypes.data % LARGE_PAGE
    if shift:
        mapped.close()
        mapped = mmap.mmap(descriptor, LARGE_PAGE + size, access=access, offset=shift)
    return mapped, LARGE_PAGE - shift


def _unreachable(source: HostSource, version: PolicyVersion) -> WeightError:
    return WeightError(
        f"the weights of version {version} are not to be found at {source.path}",
        fix="the learner is gone or on another machine; there, use weights.channel=broadcast",
    )


def _identity(descriptor: int) -> tuple[int, int]:
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino


def _tensor_of(mapped: mmap.mmap, start: int, size: int) -> Tensor:
    """The tensor keeps the map alive."""
    return torch.from_numpy(np.frombuffer(mapped, np.uint8, size, start))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
