"""The sums of a fingerprint's pieces on a GPU, all of them in one launch.

fingerprint.py calls it and has a reference in torch. Imported only where Triton is needed.
"""

# pyright cannot type-check Triton kernels, and Triton is not installed on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ALIGN_BYTES = 16
"""Alignment of addresses and sizes: the bytes that a thread loads at once."""
TILE_ROWS = 8
WARPS = 8


@triton.jit
def _sum(pieces, sums, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """One piece: each word is read once and added to its row and its column."""
    # A piece: its address, its number of words, where its sums go.
    piece = pieces + tl.program_id(0) * 3
    words = tl.multiple_of(tl.load(piece + 1), 2)
    start = tl.load(piece).to(tl.pointer_type(tl.int64))
    start = tl.multiple_of(start, 16)
    output = sums + tl.load(piece + 2)
    rows = tl.cdiv(words, COLUMNS).to(tl.int32)
    r = tl.arange(0, TILE)
    c = tl.arange(0, COLUMNS)
    column_sums = tl.zeros([COLUMNS], tl.int64)
    for first in range(0, rows, TILE):
        word = (first + r)[:, None] * COLUMNS + c[None, :]
        # The number of words is even, so the mask does not split a vector of two words.
        tile = tl.load(start + word, mask=word < words, other=0)
        column_sums += tl.sum(tile, 0)
        tl.store(output + first + r, tl.sum(tile, 1), mask=first + r < rows)
    tl.store(output + rows + c, column_sums)


def launch_sums(pieces: Tensor, sums: Tensor, *, columns: int) -> None:
    """pieces [N, 3] int64: address, words (at most 2^31), and where in `sums` its rows begin. The
    sums of its columns follow those of its rows."""
    _sum[(len(pieces),)](pieces, sums, COLUMNS=columns, TILE=TILE_ROWS, num_warps=WARPS)
