"""Causal attention of equally long sequences: with a sliding window, a soft cap or sinks.

Legend: n sequences, H query heads, K key/value heads, G = H / K, q queries, L keys, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rollick.models.attention.options import AttentionOptions

EXPLICIT_QUERIES = 256
"""Queries whose scores are in memory at once, where torch has no kernel."""


def causal_mask(queries: int, keys: int, window: int | None, *, device: torch.device) -> Tensor:
    """[queries, keys]: True where a query attends. The queries are the last of the keys; each
    attends to itself and the tokens before it, `window` in all."""
    position = torch.arange(keys, device=device)
    behind = position[keys - queries :, None] - position
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """One call, whose queries are the last of the keys, [count * length, H, D]."""
    if not options.is_plain:
        return _attend_in_blocks(query, key, value, options).transpose(1, 2).flatten(0, 1)
    queries, keys = query.shape[2], key.shape[2]
    masked = (options.window is not None and keys > options.window) or keys > queries > 1
    if masked and query.is_cuda:
        # The GPU's kernel that takes a mask needs a key for every head; torch's fallback holds all
        # scores at once.
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
    """[n, H, q, D] over [n, K, L, D], by its definition: all scores are in memory, in float32 (or
    float64). `attends` is broadcast to [n, 1, 1, q, L]; `options.window` is not read."""
    heads = query.unflatten(1, (key.shape[1], -1))
    factor = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (heads @ key[:, :, None].transpose(-1, -2)).mul(factor)
    wide = scores if scores.dtype is torch.float64 else scores.float()
    wide = cap_scores(wide, options.softcap).masked_fill(~attends, float("-inf"))
    sinks = None if options.sinks_H is None else options.sinks_H.view(*heads.shape[1:3], 1, 1)
    weights = softmax_with_sinks(wide, sinks).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else scores.div(softcap).tanh().mul(softcap)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax along the last dimension, in whose sum a sink of each row takes part. The sinks are
    broadcast to the scores."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """[n, H, q, D]. A backward computes the scores of a block again."""
    keys, first = key.shape[2], key.shape[2] - query.shape[2]
    outputs: list[Tensor] = []
    for start in range(first, keys, EXPLICIT_QUERIES):
        stop = min(start + EXPLICIT_QUERIES, keys)
        oldest = 0 if options.window is None else max(0, start - options.window + 1)
        attends = causal_mask(stop - start, stop - oldest, options.window, device=query.device)
        block = query[:, :, start - first : stop - first]
        seen = key[:, :, oldest:stop], value[:, :, oldest:stop]
        if torch.is_grad_enabled():
            output = checkpoint(
                attend_with_mask, block, *seen, attends, options, use_reentrant=False
            )
        else:
            output = attend_with_mask(block, *seen, attends, options)
        outputs.append(output)
    return torch.cat(outputs, dim=2)
