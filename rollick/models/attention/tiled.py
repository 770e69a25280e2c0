"""Attention whose bits do not depend on how many tokens are computed at once.

Queries are computed in tiles of TILE_ROWS consecutive positions that begin at multiples of
TILE_ROWS; a tile sees keys in full tiles up to its own end. All shapes follow from a token's
position, so a learner that computes a sequence and an engine that decodes one token (a tile with a
single row filled) get the same bits. Masked keys have probability 0 exactly and add nothing.

Legend: H query heads, K key/value heads, D head dim, T = TILE_ROWS.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollick.models.attention.causal import cap_scores, causal_mask, softmax_with_sinks
from rollick.models.attention.options import AttentionOptions
from rollick.models.decoder.tiled_linear import TILE_ROWS, round_up_to_tile


def attend_in_tiles(
    query_HLD: Tensor, key_KLD: Tensor, value_KLD: Tensor, options: AttentionOptions
) -> Tensor:
    """Causal attention of one complete sequence, [L, H, D]."""
    length = query_HLD.shape[1]
    height = round_up_to_tile(length)
    padding = 0, 0, 0, height - length
    query, key, value = (pad(each, padding) for each in (query_HLD, key_KLD, value_KLD))
    tiles = [
        attend_tile(query[:, start : start + TILE_ROWS], key, value, options, start=start)
        for start in range(0, height, TILE_ROWS)
    ]
    return torch.cat(tiles, dim=1)[:, :length].transpose(0, 1)


def attend_tile(
    query_HTD: Tensor,
    key_KLD: Tensor,
    value_KLD: Tensor,
    options: AttentionOptions,
    *,
    start: int,
) -> Tensor:
    """The queries from position `start` (a multiple of TILE_ROWS) on, [H, T, D]. Keys and values
    must reach the tile's end; those after a query are ignored, if finite."""
    window = options.window
    first = 0 if window is None else max(0, start - window + 1) // TILE_ROWS * TILE_ROWS
    stop = start + TILE_ROWS
    # Contiguous: a product may choose another kernel for another memory layout.
    key, value = (each[:, first:stop].contiguous() for each in (key_KLD, value_KLD))
    heads, _, head_dim = query_HTD.shape
    grouped = query_HTD.reshape(len(key), -1, head_dim)
    factor = head_dim**-0.5 if options.scale is None else options.scale
    scores = torch.bmm(grouped, key.transpose(1, 2)).mul(factor).view(heads, TILE_ROWS, -1)
    masked = ~causal_mask(TILE_ROWS, stop - first, window, device=key.device)
    scores = cap_scores(scores, options.softcap).masked_fill(masked, float("-inf"))
    sinks = None if options.sinks_H is None else options.sinks_H.view(heads, 1, 1)
    weights = softmax_with_sinks(scores, sinks)
    attended = torch.bmm(weights.view(len(key), -1, key.shape[1]), value)
    return attended.view(heads, TILE_ROWS, -1)
