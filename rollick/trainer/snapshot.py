"""Snapshots: the state of a trained role, in memory that outlives the role's process.

    controller   SnapshotMemory.create() -> a memfd; its path in /proc is sent to the worker
    worker       SnapshotWriter.write(path, state) -> SnapshotRecord, with the state's fingerprint
    new worker   read_snapshot(record) -> the same state, verified

A worker on another machine writes to its own memory and then sends the bytes (roles/handles.py).

The memory holds the bytes of a safetensors file, so a checkpoint is a copy of it. The controller
owns the memory: the kernel frees it when the controller exits, even after SIGKILL.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollick.errors import CheckpointError, open_files_exhausted
from rollick.models.loading.fingerprint import copy_and_fingerprint, fingerprint
from rollick.trainer.strategy import Shard, TrainState
from rollick.types import Fingerprint

DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of safetensors, in the order of its files: by size, so that every tensor is aligned."""
DTYPES = list(DTYPE_NAMES)
ALIGNMENT = 8
SnapshotBytes = npt.NDArray[np.uint8]
"""A part of a snapshot."""


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A complete snapshot. `steps` counts the optimizer steps that it contains."""

    path: str
    fingerprint: Fingerprint
    steps: int
    bytes: int
    shards: Mapping[str, Shard] = field(default_factory=dict[str, Shard])


@dataclass(frozen=True, slots=True)
class SnapshotMemory:
    """Memory of this process that workers on the same machine can map."""

    descriptor: int

    @classmethod
    def create(cls, name: str) -> SnapshotMemory:
        return cls(os.memfd_create(f"rollick-snapshot-{name}"))

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def write(self, offset: int, part: SnapshotBytes) -> None:
        """Write a part of a snapshot. Raises OSError if there is no memory for it."""
        data = memoryview(part.data)
        while data:
            written = os.pwrite(self.descriptor, data, offset)
            data, offset = data[written:], offset + written

    def read(self, offset: int, size: int) -> SnapshotBytes:
        """A part of the snapshot; shorter at its end."""
        return np.frombuffer(os.pread(self.descriptor, size, offset), np.uint8)

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def copy_to(self, path: Path) -> None:
        """Write the snapshot as a safetensors file."""
        source = os.dup(self.descriptor)
        with open(source, "rb") as memory, path.open("wb") as file:
            memory.seek(0)
            shutil.copyfileobj(memory, file, 16 << 20)

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True, eq=False)
class _MappedSnapshot:
    """A mapped snapshot, and views of it for each tensor."""

    memory: mmap.mmap
    header: bytes
    targets: list[Tensor]
    is_pinned: bool = False


@dataclass(slots=True, eq=False)
class SnapshotWriter:
    """Writes the snapshots of one worker. Keeps its memory maps for later snapshots."""

    mapped: dict[str, _MappedSnapshot] = field(default_factory=dict[str, _MappedSnapshot])

    def write(self, path: str, state: TrainState) -> SnapshotRecord:
        """Copy the state into the memory at `path`. Raises CheckpointError if memory runs out."""
        tensors: Mapping[str, Tensor] = state.tensors
        items = sorted(tensors.items(), key=lambda item: (DTYPES.index(item[1].dtype), item[0]))
        header = _build_header(dict(items))
        mapped = self.mapped.get(path)
        if mapped is None or mapped.header != header:
            self.unmap(path)
            mapped = self.mapped[path] = _map_snapshot(path, header, dict(items))
        digest = self._copy_state(items, mapped)
        return SnapshotRecord(path, digest, state.steps, len(mapped.memory), state.shards)

    def close(self) -> None:
        for path in list(self.mapped):
            self.unmap(path)

    def _copy_state(self, items: list[tuple[str, Tensor]], mapped: _MappedSnapshot) -> Fingerprint:
        if not any(tensor.is_cuda for _, tensor in items):
            return copy_and_fingerprint(items, mapped.targets)
        _pin(mapped)
        # On a separate stream, so that an engine on this device continues to decode.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for (_, tensor), target in zip(items, mapped.targets, strict=True):
                target.copy_(tensor, non_blocking=True)
            digest = fingerprint(items)
        stream.synchronize()
        return digest

    def unmap(self, path: str) -> None:
        """Unmap the memory at `path`, if it is mapped."""
        mapped = self.mapped.pop(path, None)
        if mapped is None:
            return
        if mapped.is_pinned:
            _cudart().cudaHostUnregister(mapped.targets[0].data_ptr())
        mapped.targets.clear()
        with suppress(BufferError):
            mapped.memory.close()


def read_snapshot(record: SnapshotRecord) -> TrainState:
    """The state of a snapshot. Raises CheckpointError if it is missing or damaged, and
    OpenFilesExhausted if the process has too many open files."""
    try:
        tensors = load_tensors(record.path)
    except (OSError, SafetensorError) as error:
        raise open_files_exhausted(error) or CheckpointError(
            f"the snapshot at {record.path} cannot be read: {error}",
            fix="resume from the newest checkpoint; snapshots need the controller's machine",
        ) from error
    if fingerprint(list(tensors.items())) != record.fingerprint:
        raise CheckpointError(
            f"the snapshot at {record.path} is damaged: its fingerprint differs",
            fix="check the machine's memory, and resume from the newest checkpoint",
        )
    return TrainState(tensors, record.steps, record.shards)


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises an OSError with the reason if it cannot be opened:
    `load_file` reports every reason as a missing file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        os.close(os.open(path, os.O_RDONLY))
        raise


def _build_header(tensors: Mapping[str, Tensor]) -> bytes:
    """The header of a safetensors file: its length, then the offsets of each tensor as JSON."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def _map_snapshot(path: str, header: bytes, tensors: Mapping[str, Tensor]) -> _MappedSnapshot:
    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            os.ftruncate(descriptor, size)
            # Reserve the memory: otherwise a write to the map kills the process if memory is full.
            os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise open_files_exhausted(error) or CheckpointError(
            f"no memory for a snapshot of {size / 1e9:.2f} GB at {path}: {error}",
            fix="free host memory, or set checkpoint.snapshot=false",
        ) from error
    memory[: len(header)] = header
    data = torch.from_numpy(np.frombuffer(memory, np.uint8, size - len(header), len(header)))
    targets: list[Tensor] = []
    end = 0
    for tensor in tensors.values():
        begin, end = end, end + tensor.nbytes
        targets.append(data[begin:end].view(tensor.dtype).view(tensor.shape))
    return _MappedSnapshot(memory, header, targets)


def _pin(mapped: _MappedSnapshot) -> None:
    """Pin the pages, so that the GPU copies into them directly. If it fails, copies are slower."""
    if not mapped.is_pinned:
        size = sum(target.nbytes for target in mapped.targets)
        mapped.is_pinned = (
            int(_cudart().cudaHostRegister(mapped.targets[0].data_ptr(), size, 0)) == 0
        )


def _cudart() -> Any:
    return torch.cuda.cudart()
