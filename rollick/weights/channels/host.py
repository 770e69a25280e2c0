"""Weights through host memory: one file that the learner writes and every receiver maps.

On Linux the file lives in /dev/shm, so it is memory shared between the processes of a machine;
elsewhere in the folder for temporary files. The manifest travels by value and names every
tensor, its place and the fingerprint of all bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollick.errors import WeightError
from rollick.models.load import fingerprint
from rollick.types import Fingerprint, PolicyVersion

ALIGN = 64


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One published set of weights."""

    path: str
    version: PolicyVersion
    fingerprint: Fingerprint
    places: tuple[TensorPlace, ...]


def write_weights(stream: Iterable[tuple[str, Any]], version: PolicyVersion) -> WeightManifest:
    """Write the stream into shared memory. The caller removes it with `remove_weights`."""
    tensors = [(name, tensor.detach()) for name, tensor in stream]
    places: list[TensorPlace] = []
    offset = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, dtype, tuple(tensor.shape), offset, size))
        offset += -(-size // ALIGN) * ALIGN
    handle, path = tempfile.mkstemp(prefix="rollick-weights-", dir=_shared_folder())
    try:
        with os.fdopen(handle, "wb") as file:
            file.truncate(max(offset, 1))
            # Reserved, not only sized: writing into a map of full memory would kill the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(offset, 1))
        memory = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+"))
        for place, (_, tensor) in zip(places, tensors, strict=True):
            _view(memory, place).copy_(tensor)
        return WeightManifest(path, version, fingerprint(tensors), tuple(places))
    except BaseException:
        Path(path).unlink()
        raise


def read_weights(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views of the mapped file; copy what must outlive it."""
    if not Path(manifest.path).exists():
        raise WeightError(
            f"the weights of version {manifest.version} are gone from {manifest.path}",
            fix="host memory reaches one machine only: put learner and generators on the same one",
        )
    # Copy-on-write: torch wants writable memory, and a receiver can never alter what others read.
    memory = torch.from_numpy(np.memmap(manifest.path, dtype=np.uint8, mode="c"))
    for place in manifest.places:
        yield place.name, _view(memory, place)


def verify_weights(manifest: WeightManifest) -> None:
    """Raise WeightError unless the bytes that arrived are the bytes that were sent."""
    seen = fingerprint(read_weights(manifest))
    if seen != manifest.fingerprint:
        raise WeightError(
            f"weights of version {manifest.version} arrived with fingerprint {seen[:12]}, "
            f"sent was {manifest.fingerprint[:12]}",
            fix="nothing was committed; publish again",
        )


def remove_weights(manifest: WeightManifest) -> None:
    """Free the memory. Removing twice is fine."""
    Path(manifest.path).unlink(missing_ok=True)


def _view(memory: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    part = memory[place.offset : place.offset + place.size]
    return part.view(getattr(torch, place.dtype)).view(place.shape)


def _shared_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
