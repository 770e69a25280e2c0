"""The sums of a fingerprint's pieces on a GPU, all of them in one launch.

Owns the kernel; fingerprint.py says what is summed, and has the same in plain torch. Imported only
where Triton is needed.
"""

# Triton's language has no types that a checker could follow, and Triton is not on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ALIGN_BYTES = 16
"""Addresses and sizes of what is summed are multiples of it: a thread loads as much at once."""
TILE_ROWS = 8
WARPS = 8


@triton.jit
def _sum(pieces, sums, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """One piece: each of its words is read once, and counts in its row and in its column."""
    # A piece: its address, its number of words, where its sums go.
    at = pieces + tl.program_id(0) * 3
    words = tl.multiple_of(tl.load(at + 1), 2)
    start = tl.load(at).to(tl.pointer_type(tl.int64))
    start = tl.multiple_of(start, 16)
    into = sums + tl.load(at + 2)
    rows = tl.cdiv(words, COLUMNS).to(tl.int32)
    r = tl.arange(0, TILE)
    c = tl.arange(0, COLUMNS)
    of_columns = tl.zeros([COLUMNS], tl.int64)
    for first in range(0, rows, TILE):
        word = (first + r)[:, None] * COLUMNS + c[None, :]
        # No vector of two words lies across the end, so that the mask does not split one.
        tile = tl.load(start + word, mask=word < words, other=0)
        of_columns += tl.sum(tile, 0)
        tl.store(into + first + r, tl.sum(tile, 1), mask=first + r < rows)
    tl.store(into + rows + c, of_columns)


def launch_sums(pieces: Tensor, sums: Tensor, *, columns: int) -> None:
    """pieces [N, 3] int64: address, words (at most 2^31), and where in `sums` its rows begin. The
    sums of its columns follow those of its rows."""
    _sum[(len(pieces),)](pieces, sums, COLUMNS=columns, TILE=TILE_ROWS, num_warps=WARPS)
