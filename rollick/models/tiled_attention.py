"""Attention whose bits do not depend on how many tokens are computed together.

Queries go in tiles of ROWS neighbouring positions, which begin at multiples of ROWS; a tile sees
keys in whole tiles up to its own end. So the shapes of all products follow from a token's position
alone, and a row of a product follows from its own numbers and the shapes: a learner that computes
a whole sequence and an engine that decodes one token (a tile with a single row filled) get the
same bits. What lies behind a mask has probability 0 exactly, and adds nothing.

Legend: H query heads, K key-value heads, D size of a head, T = ROWS, N keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollick.models.deterministic import ROWS, padded_rows


def attend_in_tiles(
    query_HLD: Tensor,
    key_KLD: Tensor,
    value_KLD: Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Causal attention of one whole sequence, [L, H, D]."""
    length = query_HLD.shape[1]
    height = padded_rows(length)
    query, key, value = (
        pad(each, (0, 0, 0, height - length)) for each in (query_HLD, key_KLD, value_KLD)
    )
    tiles = [
        attend_tile(query[:, start : start + ROWS], key, value, start=start, how=(scale, window))
        for start in range(0, height, ROWS)
    ]
    return torch.cat(tiles, dim=1)[:, :length].transpose(0, 1)


def attend_tile(
    query_HTD: Tensor,
    key_KLD: Tensor,
    value_KLD: Tensor,
    *,
    start: int,
    how: tuple[float | None, int | None],
) -> Tensor:
    """The queries at `start` (a multiple of ROWS) and after it, [H, T, D]; `how` is scale and
    window.

    Keys and values must be there up to the tile's end; what they are after a query does not
    matter, as long as it is finite.
    """
    scale, window = how
    first = 0 if window is None else max(0, start - window + 1) // ROWS * ROWS
    # Own memory in one order: a product may take another way for another layout.
    key, value = (each[:, first : start + ROWS].contiguous() for each in (key_KLD, value_KLD))
    heads, _, size = query_HTD.shape
    grouped = query_HTD.reshape(len(key), -1, size)
    scores = torch.bmm(grouped, key.transpose(1, 2)).mul(size**-0.5 if scale is None else scale)
    scores = scores.view(heads, ROWS, -1).masked_fill(
        _hidden(start, first, window, device=key.device), float("-inf")
    )
    attended = torch.bmm(scores.softmax(-1).view(len(key), -1, key.shape[1]), value)
    return attended.view(heads, ROWS, -1)


def _hidden(start: int, first: int, window: int | None, *, device: torch.device) -> Tensor:
    """[T, N]: True where a query may not look."""
    here_T1 = torch.arange(start, start + ROWS, device=device)[:, None]
    there_N = torch.arange(first, start + ROWS, device=device)
    hidden_TN = there_N > here_T1
    return hidden_TN if window is None else hidden_TN | (there_N <= here_T1 - window)
