"""Causal attention of sequences of equal length: with a sliding window, a soft cap or sinks.

In tiles, its bits do not depend on how many tokens are computed at once. Queries are computed in
tiles of TILE_ROWS consecutive positions that begin at multiples of TILE_ROWS; a tile sees keys in
full tiles up to its own end. All shapes follow from a token's position, so a learner that computes
a sequence and an engine that decodes one token (a tile with a single row filled) get the same bits.
Masked keys have probability 0 exactly and add nothing.

Legend: n sequences, H query heads, K key/value heads, G = H / K, q queries, L keys, D head dim,
T = TILE_ROWS.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rollick.models.attention.options import AttentionOptions
from rollick.models.decoder.batch_invariant import TILE_ROWS, round_up_to_tile

EXPLICIT_QUERIES = 256
"""Queries per block where torch has no kernel, so that all scores of a block are in memory."""


def causal_mask(queries: int, keys: int, window: int | None, *, device: torch.device) -> Tensor:
    """[queries, keys]: True where a query attends. The queries are at the last positions of the
    keys; each attends to itself and earlier tokens, at most `window` in total."""
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :, None] - position
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """[n, H, q, D] over [n, K, L, D] -> [n * q, H, D]. The queries are at the last positions of the
    keys."""
    if not options.is_plain:
        return _attend_in_blocks(query, key, value, options).transpose(1, 2).flatten(0, 1)
    queries, keys = query.shape[2], key.shape[2]
    masked = (options.window is not None and keys > options.window) or keys > queries > 1
    if masked and query.is_cuda:
        # The GPU kernel with a mask needs a key for every query head; torch's fallback keeps all
        # scores in memory.
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_mask(queries, keys, options.window, device=query.device)
        if masked
        else None,
        is_causal=not masked and keys == queries > 1,
        scale=options.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, attends: Tensor, options: AttentionOptions
) -> Tensor:
    """[n, H, q, D] over [n, K, L, D], without a fused kernel: all scores are in memory, in float32
    (or float64). `attends` is broadcast to [n, 1, 1, q, L]; `options.window` is not read."""
    heads = query.unflatten(1, (key.shape[1], -1))
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (heads @ key[:, :, None].transpose(-1, -2)).mul(scale)
    upcast = scores if scores.dtype is torch.float64 else scores.float()
    upcast = cap_scores(upcast, options.softcap).masked_fill(~attends, float("-inf"))
    sinks = None if options.sinks_H is None else options.sinks_H.view(*heads.shape[1:3], 1, 1)
    weights = softmax_with_sinks(upcast, sinks).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else scores.div(softcap).tanh().mul(softcap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax along the last dimension, with a sink in the sum of each row. The sinks are broadcast
    to the scores."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """[n, H, q, D]. A backward recomputes the scores of a block."""
    keys, first = key.shape[2], key.shape[2] - query.shape[2]
    outputs: list[Tensor] = []
    for start in range(first, keys, EXPLICIT_QUERIES):
        stop = min(start + EXPLICIT_QUERIES, keys)
        oldest = 0 if options.window is None else max(0, start - options.window + 1)
        attends = causal_mask(stop - start, stop - oldest, options.window, device=query.device)
        block = query[:, :, start - first : stop - first]
        key_value = key[:, :, oldest:stop], value[:, :, oldest:stop]
        if torch.is_grad_enabled():
            output = checkpoint(
                attend_with_mask, block, *key_value, attends, options, use_reentrant=False
            )
        else:
            output = attend_with_mask(block, *key_value, attends, options)
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def attend_in_tiles(
    query_HLD: Tensor, key_KLD: Tensor, value_KLD: Tensor, options: AttentionOptions
) -> Tensor:
    """Causal attention of one complete sequence, [L, H, D]."""
    length = query_HLD.shape[1]
    padded_length = round_up_to_tile(length)
    padding = 0, 0, 0, padded_length - length
    query, key, value = (pad(x, padding) for x in (query_HLD, key_KLD, value_KLD))
    tiles = [
        attend_tile(query[:, start : start + TILE_ROWS], key, value, options, start=start)
        for start in range(0, padded_length, TILE_ROWS)
    ]
    return torch.cat(tiles, dim=1)[:, :length].transpose(0, 1)


def attend_tile(
    query_HTD: Tensor, key_KLD: Tensor, value_KLD: Tensor, options: AttentionOptions, *, start: int
) -> Tensor:
    """The queries from position `start` (a multiple of TILE_ROWS) on, [H, T, D]. Keys and values
    must reach the end of the tile; those after a query are ignored, and must be finite."""
    window = options.window
    first = 0 if window is None else max(0, start - window + 1) // TILE_ROWS * TILE_ROWS
    stop = start + TILE_ROWS
    # Contiguous, because a matmul may choose another kernel for another memory layout.
    key, value = (x[:, first:stop].contiguous() for x in (key_KLD, value_KLD))
    heads, _, head_dim = query_HTD.shape
    grouped = query_HTD.reshape(len(key), -1, head_dim)
    scale = head_dim**-0.5 if options.scale is None else options.scale
    scores = torch.bmm(grouped, key.transpose(1, 2)).mul(scale).view(heads, TILE_ROWS, -1)
    masked = ~causal_mask(TILE_ROWS, stop - first, window, device=key.device)
    scores = cap_scores(scores, options.softcap).masked_fill(masked, float("-inf"))
    sinks = None if options.sinks_H is None else options.sinks_H.view(heads, 1, 1)
    weights = softmax_with_sinks(scores, sinks)
    attended = torch.bmm(weights.view(len(key), -1, key.shape[1]), value)
    return attended.view(heads, TILE_ROWS, -1)
