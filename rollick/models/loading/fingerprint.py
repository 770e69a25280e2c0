"""The fingerprint of a set of weights, to compare two sets bit for bit.

It detects transfer errors: bytes that are missing, stale, zero, shifted, swapped or flipped. A
change of up to three words (8 bytes each) in a piece is always detected. A larger one is missed
only if at least four words changed so that it cancels in every row and in every column of the
piece; by chance that happens less than once in 2^128. It does not protect against forgery: a
cryptographic hash would, and takes many times as long as copying the memory.

    tensor -> pieces of 4 MiB -> 512 rows of 1,024 words, added modulo 2^64
           -> the sum of each row and of each column
           -> SHA-256 of these sums for each piece, and of all pieces, the dtype and the shape
    all tensors, by name -> SHA-256, cut to 128 bits

Sums of integers do not depend on their order, so a GPU gives the same as the CPU. A tensor of a few
kilobytes is hashed directly.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollick.types import Fingerprint

COLUMNS = 1024
ROWS = 512
ROW_BYTES = 8 * COLUMNS
PIECE_BYTES = ROWS * ROW_BYTES
SMALL_BYTES = 2 * ROW_BYTES
SHARES = 4
"""Work items per thread: several, so that all threads end at about the same time."""
KERNEL_BYTES = 64 << 20
"""On a GPU, torch sums fewer bytes than this, because compiling the kernel would take longer."""

_Bytes = NDArray[np.uint8]


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """The fingerprint of names, dtypes, shapes and bytes, in any order of the pairs. Tensors of a
    list or tuple are read in parallel; those of another iterable one by one, because it may reuse
    their memory."""
    parts = [named] if isinstance(named, list | tuple) else ([pair] for pair in named)
    return _combine(digest for part in parts for digest in _digest_tensors(part, None))


class RunningFingerprint:
    """The fingerprint of pairs that arrive one after another."""

    def __init__(self) -> None:
        self._digests: list[tuple[str, bytes]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._digests += _digest_tensors([(name, tensor)], None)

    def result(self) -> Fingerprint:
        return _combine(self._digests)


def copy_and_fingerprint(
    named: Iterable[tuple[str, Tensor]], targets: Sequence[Tensor]
) -> Fingerprint:
    """Copy each tensor into its target, of equal dtype and shape; return the fingerprint of the
    sources. On the CPU this is one pass over the memory, in parallel as for `fingerprint`."""
    if isinstance(named, list | tuple):
        return _combine(_digest_tensors(named, targets))
    pairs = zip(named, targets, strict=True)
    return _combine([digest for pair, out in pairs for digest in _digest_tensors([pair], [out])])


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor as bytes, its target, and the header of its digest."""

    header: bytes
    data: Tensor
    target: Tensor | None

    @property
    def parts(self) -> list[slice]:
        """The pieces; a small tensor is one part, hashed directly."""
        size = self.data.numel()
        starts = [0] if self.is_small else range(0, size, PIECE_BYTES)
        return [slice(start, min(start + PIECE_BYTES, size)) for start in starts]

    @property
    def is_small(self) -> bool:
        return self.data.numel() <= SMALL_BYTES


def _digest_tensors(
    named: Sequence[tuple[str, Tensor]], targets: Sequence[Tensor] | None
) -> list[tuple[str, bytes]]:
    """The digest of each tensor, with its name."""
    pairs = zip(named, [None] * len(named) if targets is None else targets, strict=True)
    sources = [_prepare_source(tensor, target) for (_, tensor), target in pairs]
    gpu_sums = _sum_on_gpu([source for source in sources if source.data.is_cuda])
    cpu_sums = _sum_on_cpu([source for source in sources if not source.data.is_cuda])
    return [
        (name, _digest(source.header, *next(gpu_sums if source.data.is_cuda else cpu_sums)))
        for (name, _), source in zip(named, sources, strict=True)
    ]


def _prepare_source(tensor: Tensor, target: Tensor | None) -> _Source:
    if target is not None and (tensor.is_cuda or target.is_cuda):
        target.copy_(tensor)
        target = None
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return _Source(header, _bytes_of(tensor), None if target is None else _bytes_of(target))


def _combine(digests: Iterable[tuple[str, bytes]]) -> Fingerprint:
    parts = (f"{name}\x00".encode() + digest for name, digest in sorted(digests))
    return Fingerprint(_digest(*parts).hex())


def _digest(*parts: Any) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:16]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _sum_on_cpu(sources: Sequence[_Source]) -> Iterator[list[bytes]]:
    """The digests of each source's parts; threads share the parts of all sources.

    A thread takes many parts at once, and makes at most three calls for each: after every one it
    waits for the interpreter's lock, which takes as long as summing some 100 KB.
    """
    tasks = [(source, part) for source in sources for part in source.parts]
    threads = min(torch.get_num_threads(), len(tasks))
    if threads > 1 and sum(source.data.numel() for source in sources) > PIECE_BYTES:
        shares = min(SHARES * threads, len(tasks))
        digests = [b""] * len(tasks)
        with ThreadPoolExecutor(threads, thread_name_prefix="fingerprint") as pool:
            results = pool.map(_sum_parts, [tasks[first::shares] for first in range(shares)])
            for first, share in enumerate(results):
                digests[first::shares] = share
    else:
        digests = _sum_parts(tasks)
    summed = iter(digests)
    for source in sources:
        yield [next(summed) for _ in source.parts]


def _sum_parts(tasks: Iterable[tuple[_Source, slice]]) -> list[bytes]:
    # Digests last: they are short calls, for which waiting for the lock is too expensive.
    sums = [_sum_part(*task) for task in tasks]
    return [_digest(part_sums) for part_sums in sums]


def _sum_part(source: _Source, part: slice) -> NDArray[Any]:
    """The input of a part's digest; also copies the part to its target."""
    data: _Bytes = source.data.numpy()[part]
    sums = data if source.is_small else _sum_piece(data)
    if source.target is not None:
        # After the sums, which read faster than a copy and leave the piece in the cache.
        source.target.numpy()[part] = data
    return sums


def _sum_piece(data: _Bytes) -> NDArray[np.int64]:
    """The sums of the piece's rows, then of its columns."""
    rows, rest = divmod(len(data), ROW_BYTES)
    sums = np.zeros(rows + bool(rest) + COLUMNS, np.int64)
    columns = sums[-COLUMNS:]
    if rows:
        words = data[: rows * ROW_BYTES].view(np.int64).reshape(rows, COLUMNS)
        np.add.reduce(words, axis=1, out=sums[:rows])
        np.add.reduce(words, axis=0, out=columns)
    if rest:
        padded = np.zeros(ROW_BYTES, np.uint8)
        padded[:rest] = data[-rest:]
        columns += padded.view(np.int64)
        sums[rows] = padded.view(np.int64).sum()
    return sums


def _sum_on_gpu(sources: Sequence[_Source]) -> Iterator[list[bytes]]:
    """The same for a GPU. The sums of a device are copied to the host in one transfer, to reduce
    latency."""
    on_host = {
        device: _sum_device([source for source in sources if source.data.device == device])
        for device in {source.data.device for source in sources}
    }
    for source in sources:
        parts = on_host[source.data.device][source.is_small]
        yield [_digest(next(parts)) for _ in source.parts]


def _sum_device(sources: Sequence[_Source]) -> tuple[Iterator[_Bytes], Iterator[_Bytes]]:
    """The input of each part's digest: of large sources, and of small ones."""
    small = [source.data for source in sources if source.is_small]
    large = [source.data for source in sources if not source.is_small]
    sizes = [8 * _count_sums(part) for s in sources if not s.is_small for part in s.parts]
    use_kernel = sum(data.numel() for data in large) >= KERNEL_BYTES
    use_kernel = use_kernel and importlib.util.find_spec("triton") is not None
    sums = (_sum_by_kernel if use_kernel else _sum_by_torch)(large)
    small_parts = _split_on_host(_concatenate(small), [data.numel() for data in small])
    return _split_on_host(sums, sizes), small_parts


def _count_sums(part: slice) -> int:
    return -(-(part.stop - part.start) // ROW_BYTES) + COLUMNS


def _split_on_host(data: Tensor, sizes: Sequence[int]) -> Iterator[_Bytes]:
    """Consecutive parts of these sizes in bytes, on the host."""
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda).copy_(data)
    start, host_bytes = 0, host.view(torch.uint8).numpy()
    for size in sizes:
        yield host_bytes[start : start + size]
        start += size


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.uint8)


def _sum_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    """The concatenated sums of all pieces of tensors on one device."""
    from rollick.models.loading.fingerprint_kernels import ALIGN_BYTES, launch_sums

    aligned = [_align(data, ALIGN_BYTES) for data in tensors]
    pieces: list[tuple[int, int, int]] = []
    end = 0
    for data in aligned:
        address, size = data.data_ptr(), data.numel()
        for start in range(0, size, PIECE_BYTES):
            part = slice(start, min(start + PIECE_BYTES, size))
            pieces.append((address + start, (part.stop - start) // 8, end))
            end += _count_sums(part)
    sums = torch.empty(end, dtype=torch.int64, device=aligned[0].device)
    with torch.cuda.device(sums.device) if sums.is_cuda else nullcontext():
        launch_sums(torch.tensor(pieces).to(sums.device), sums, columns=COLUMNS)
    return sums


def _sum_by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """The same with torch, tensor by tensor, as bytes."""
    sums: list[Tensor] = []
    for data in tensors:
        full = data.numel() // PIECE_BYTES * PIECE_BYTES
        if full:
            sums += _sum_pieces(data[:full], ROWS)
        if full < data.numel():
            padded = _align(data[full:], ROW_BYTES)
            sums += _sum_pieces(padded, padded.numel() // ROW_BYTES)
    return _concatenate(sums)


def _sum_pieces(data: Tensor, rows: int) -> list[Tensor]:
    words_PRC = _align(data, 8).view(torch.int64).view(-1, rows, COLUMNS)
    sums = torch.cat([words_PRC.sum(2), words_PRC.sum(1)], dim=1)
    return list(sums.view(torch.uint8).unbind(0))


def _align(data: Tensor, unit: int) -> Tensor:
    """The data, copied if needed: padded with zeros to full units, and aligned."""
    missing = -data.numel() % unit
    if missing:
        return torch.nn.functional.pad(data, (0, missing))
    is_aligned = data.data_ptr() % min(unit, 16) == 0 and data.storage_offset() % 8 == 0
    return data if is_aligned else data.clone()
