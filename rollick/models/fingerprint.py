"""The fingerprint of a set of weights: whether two sets are the same, bit for bit.

It finds what a transfer can do wrong: bytes that are missing, stale, zero, shifted, swapped or
flipped. A change of up to three words (8 bytes each) in a piece is found for certain. A larger
one is missed only if at least four words changed so that it cancels in every row and in every
column of the piece; by chance that happens less than once in 2^128. It is no defence against
somebody who forges weights: a cryptographic hash would be, and takes many times as long as
copying the memory.

    tensor -> pieces of 4 MiB -> 512 rows of 1,024 words, added modulo 2^64
           -> the sum of each row and of each column
           -> SHA-256 of these sums for each piece, and of all pieces, the dtype and the shape
    all tensors, by name -> SHA-256, cut to 128 bits

Sums of integers do not depend on their order, so a GPU gives the same as the CPU. A tensor of a few
kilobytes goes to SHA-256 as it is.
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
"""In which a thread takes its work: the last ones to end wait for less."""
KERNEL_BYTES = 64 << 20
"""On a GPU, less is summed by plain torch before a kernel would be compiled."""

_Bytes = NDArray[np.uint8]


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> Fingerprint:
    """Of names, dtypes, shapes and bytes; the order of the pairs does not matter.

    The tensors of a list or tuple are looked at side by side; those of any other stream one by one,
    because it may reuse its memory.
    """
    if isinstance(named, list | tuple):
        return _combine(_digests(named, None))
    return _combine([pair for item in named for pair in _digests([item], None)])


def copy_and_fingerprint(
    named: Iterable[tuple[str, Tensor]], targets: Sequence[Tensor]
) -> Fingerprint:
    """Copy each tensor into its target, of equal dtype and shape, and give the fingerprint.

    On the CPU both are done in one pass over the memory. The fingerprint is that of the sources.
    Tensors of a list or tuple are copied side by side, those of any other stream one by one.
    """
    if isinstance(named, list | tuple):
        return _combine(_digests(named, targets))
    pairs = zip(named, targets, strict=True)
    return _combine([found for item, to in pairs for found in _digests([item], [to])])


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor as bytes, where it is copied to, and what goes before its sums in its digest."""

    head: bytes
    data: Tensor
    target: Tensor | None

    @property
    def parts(self) -> list[slice]:
        """The pieces; a small tensor is one part, taken as it is."""
        size = self.data.numel()
        starts = [0] if self.is_small else range(0, size, PIECE_BYTES)
        return [slice(start, min(start + PIECE_BYTES, size)) for start in starts]

    @property
    def is_small(self) -> bool:
        return self.data.numel() <= SMALL_BYTES


def _digests(
    named: Sequence[tuple[str, Tensor]], targets: Sequence[Tensor] | None
) -> list[tuple[str, bytes]]:
    """The digest of each tensor, with its name."""
    found = [
        _source(tensor, None if targets is None else targets[number])
        for number, (_, tensor) in enumerate(named)
    ]
    on_gpu = [source for source in found if source.data.is_cuda]
    sums = iter(_sum_on_gpu(on_gpu))
    near = iter(_sum_on_cpu([source for source in found if not source.data.is_cuda]))
    return [
        (name, _digest(source.head, *next(sums if source.data.is_cuda else near)))
        for (name, _), source in zip(named, found, strict=True)
    ]


def _source(tensor: Tensor, target: Tensor | None) -> _Source:
    if target is not None and (tensor.is_cuda or target.is_cuda):
        target.copy_(tensor)
        target = None
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return _Source(head, _bytes_of(tensor), None if target is None else _bytes_of(target))


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
    """The sums of each source, part by part; the threads share all parts of all sources."""
    tasks = [(source, part) for source in sources for part in source.parts]
    threads = min(torch.get_num_threads(), len(tasks))
    if threads > 1 and sum(source.data.numel() for source in sources) > PIECE_BYTES:
        summed = iter(_sum_in_threads(tasks, threads))
    else:
        summed = iter(_sum_parts(tasks))
    for source in sources:
        yield [next(summed) for _ in source.parts]


def _sum_in_threads(tasks: Sequence[tuple[_Source, slice]], threads: int) -> list[bytes]:
    """A thread takes many parts at once, and makes three calls at most for each: after every one it
    waits for the interpreter's lock, which takes as long as to sum some 100 KB."""
    shares = min(SHARES * threads, len(tasks))
    summed = [b""] * len(tasks)
    with ThreadPoolExecutor(threads, thread_name_prefix="fingerprint") as pool:
        found = pool.map(_sum_parts, [tasks[first::shares] for first in range(shares)])
        for first, share in enumerate(found):
            summed[first::shares] = share
    return summed


def _sum_parts(tasks: Iterable[tuple[_Source, slice]]) -> list[bytes]:
    # Digests last: they are short calls, for which the lock is not worth waiting in between.
    sums = [_sum_part(*task) for task in tasks]
    return [_digest(found) for found in sums]


def _sum_part(source: _Source, part: slice) -> NDArray[Any]:
    """What goes into the digest of a part, which is copied on the way."""
    data: _Bytes = source.data.numpy()[part]
    found = data if source.is_small else _sum_piece(data)
    if source.target is not None:
        # After the sums: they read faster than a copy does, and leave the piece in the cache.
        source.target.numpy()[part] = data
    return found


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
        filled = np.zeros(ROW_BYTES, np.uint8)
        filled[:rest] = data[-rest:]
        columns += filled.view(np.int64)
        sums[rows] = filled.view(np.int64).sum()
    return sums


def _sum_on_gpu(sources: Sequence[_Source]) -> Iterator[list[bytes]]:
    """The same sums. Those of a device come to the host together, because each way there takes its
    time."""
    devices = {source.data.device for source in sources}
    brought = {
        device: _bring([source for source in sources if source.data.device == device])
        for device in devices
    }
    for source in sources:
        parts = brought[source.data.device][source.is_small]
        yield [_digest(next(parts)) for _ in source.parts]


def _bring(sources: Sequence[_Source]) -> tuple[Iterator[_Bytes], Iterator[_Bytes]]:
    """What goes into the digest of each part: of large sources, and of small ones."""
    small = [source.data for source in sources if source.is_small]
    large = [source.data for source in sources if not source.is_small]
    words = [8 * _count_sums(part) for s in sources if not s.is_small for part in s.parts]
    by_kernel = sum(data.numel() for data in large) >= KERNEL_BYTES and _has_triton()
    sums = (_sum_by_kernel if by_kernel else _sum_by_torch)(large)
    return _cut(sums, words), _cut(_joined(small), [data.numel() for data in small])


def _count_sums(part: slice) -> int:
    return -(-(part.stop - part.start) // ROW_BYTES) + COLUMNS


def _cut(data: Tensor, sizes: Sequence[int]) -> Iterator[_Bytes]:
    """Bytes of these sizes, one after another, on the host."""
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda).copy_(data)
    start, found = 0, host.view(torch.uint8).numpy()
    for size in sizes:
        yield found[start : start + size]
        start += size


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.empty(0, dtype=torch.uint8)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _sum_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    """The sums of all pieces of tensors of one device, one after another."""
    from rollick.models.fingerprint_kernels import ALIGN_BYTES, launch_sums

    held = [_aligned(data, ALIGN_BYTES) for data in tensors]
    pieces: list[tuple[int, int, int]] = []
    end = 0
    for data in held:
        address, size = data.data_ptr(), data.numel()
        for start in range(0, size, PIECE_BYTES):
            part = slice(start, min(start + PIECE_BYTES, size))
            pieces.append((address + start, (part.stop - start) // 8, end))
            end += _count_sums(part)
    sums = torch.empty(end, dtype=torch.int64, device=held[0].device)
    with torch.cuda.device(sums.device) if sums.is_cuda else nullcontext():
        launch_sums(torch.tensor(pieces).to(sums.device), sums, columns=COLUMNS)
    return sums


def _sum_by_torch(tensors: Sequence[Tensor]) -> Tensor:
    """The same, tensor by tensor."""
    return _joined([sums for data in tensors for sums in _device_sums(data)])


def _device_sums(data: Tensor) -> list[Tensor]:
    """The sums of each piece of a tensor, as bytes."""
    whole = data.numel() // PIECE_BYTES * PIECE_BYTES
    pieces = _sum_pieces(data[:whole], ROWS) if whole else []
    rest = data[whole:]
    if rest.numel():
        filled = _aligned(rest, ROW_BYTES)
        pieces += _sum_pieces(filled, filled.numel() // ROW_BYTES)
    return pieces


def _sum_pieces(data: Tensor, rows: int) -> list[Tensor]:
    words_PRC = _aligned(data, 8).view(torch.int64).view(-1, rows, COLUMNS)
    sums = torch.cat([words_PRC.sum(2), words_PRC.sum(1)], dim=1)
    return list(sums.view(torch.uint8).unbind(0))


def _aligned(data: Tensor, unit: int) -> Tensor:
    """As it is, or filled up with zeros to whole units and copied, so that it begins at one."""
    missing = -data.numel() % unit
    if missing:
        return torch.nn.functional.pad(data, (0, missing))
    begins = data.data_ptr() % min(unit, 16) == 0 and data.storage_offset() % 8 == 0
    return data if begins else data.clone()
