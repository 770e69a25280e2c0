"""Attention over a slot cache of keys and values, for generation.

Owns the attention function that transformers calls by the name CACHED, and the three ways to
attend: a packed prefill, one decode step for many rows, and row by row (deterministic). Does not
own the memory: a LayerStore hands out the tensors of a layer.

    model(..., step=DecodeStep(...)) -> attention of layer i -> step.attend(i) -> store.layer(i)

A call without a step is one over pages: paged_attention.py takes it.

No mask function is registered for CACHED: transformers then builds no mask at all.

Dims: R rows (sequences), H query heads, K key/value heads, G = H / K, L positions, D head dim,
N packed tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rollick.errors import ModelError
from rollick.models.deterministic import ROWS
from rollick.models.paged_attention import attend_paged
from rollick.models.tiled_attention import attend_tile

CACHED = "rollick_cached"
"""The attention implementation to build an engine's module with."""


class LayerStore(Protocol):
    """Hands out the cache of a layer."""

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, K, L, D] of layer `index`; made like `key` and `value`
        ([..., K, tokens, D]) on first use."""
        ...


class Projected(NamedTuple):
    """What a layer projects its tokens to, each [batch, heads, tokens, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    window: int | None


class AttentionStep(Protocol):
    """One forward's way to store keys and values and to attend to them."""

    def attend(self, layer: int, given: Projected) -> Tensor:
        """[batch, tokens, H, D]; stores the keys and values first."""
        ...


class Span(NamedTuple):
    """Neighbouring tokens of a row: `length` of them, after `start` that the cache holds."""

    row: int
    start: int
    length: int


class PrefillStep:
    """Spans packed one after another in [1, N]: first those that begin their rows, by length.

    Beginnings of one length are one causal attention call: no padding, no mask. A span that
    continues its row is a call of its own, over what the cache holds of the row.
    """

    def __init__(self, store: LayerStore, spans: Sequence[Span]) -> None:
        order = [(span.start > 0, span.length) for span in spans]
        assert order == sorted(order), "a prefill is packed beginnings first, by length"
        self._store = store
        self._beginnings: list[tuple[int, list[int]]] = [
            (length, [span.row for span in members])
            for length, members in groupby(
                (span for span in spans if not span.start), key=lambda span: span.length
            )
        ]
        self._later = [span for span in spans if span.start]

    def attend(self, layer: int, given: Projected) -> Tensor:
        keys, values = self._store.layer(layer, given.key, given.value)
        outputs: list[Tensor] = []
        first = 0
        for length, rows in self._beginnings:
            stop = first + length * len(rows)
            query, key, value = (
                packed[0, :, first:stop].unflatten(1, (len(rows), length)).transpose(0, 1)
                for packed in given[:3]
            )
            keys[rows, :, :length] = key
            values[rows, :, :length] = value
            attended = _causal(query, key, value, scale=given.scale, window=given.window)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
            first = stop
        for row, start, length in self._later:
            query, key, value = (packed[:, :, first : first + length] for packed in given[:3])
            keys[row, :, start : start + length] = key[0]
            values[row, :, start : start + length] = value[0]
            seen = slice(row, row + 1), slice(None), slice(start + length)
            attended = _causal(
                query, keys[seen], values[seen], scale=given.scale, window=given.window
            )
            outputs.append(attended[0].transpose(0, 1))
            first += length
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


class DecodeStep:
    """One token for each of the rows 0..R-1; `positions` says where each one stands.

    Queries of one key/value head attend together, so keys and values are never expanded.
    """

    def __init__(self, store: LayerStore, *, positions: Sequence[int], device: str) -> None:
        self._store = store
        self._device = device
        self._positions_R = torch.tensor(list(positions), device=device)
        self._rows_R = torch.arange(len(positions), device=device)
        self._spans = plan_spans(positions)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, given: Projected) -> Tensor:
        keys, values = self._store.layer(layer, given.key, given.value)
        keys[self._rows_R, :, self._positions_R] = given.key[:, :, 0]
        values[self._rows_R, :, self._positions_R] = given.value[:, :, 0]
        query_RKGD = given.query[:, :, 0].unflatten(1, (keys.shape[1], -1))
        kernel = (
            _few_queries
            if query_RKGD.device.type == "cpu" and query_RKGD.dtype == torch.float32
            else scaled_dot_product_attention
        )
        outputs = [
            kernel(
                query_RKGD[start:stop],
                keys[start:stop, :, :length],
                values[start:stop, :, :length],
                attn_mask=self._mask(number, given.window, query_RKGD),
                scale=given.scale,
            )
            for number, (start, stop, length) in enumerate(self._spans)
        ]
        attended_RKGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended_RKGD.flatten(1, 2).unsqueeze(1)

    def _mask(self, number: int, window: int | None, query: Tensor) -> Tensor:
        """Additive [r, 1, G, L], made once for all layers of a window."""
        mask = self._masks.get((number, window))
        if mask is None:
            start, stop, length = self._spans[number]
            here_L = torch.arange(length, device=self._device)
            last_R1 = self._positions_R[start:stop, None]
            hidden_RL = here_L > last_R1
            if window is not None:
                hidden_RL |= here_L <= last_R1 - window
            mask = torch.zeros(hidden_RL.shape, dtype=query.dtype, device=self._device)
            mask = mask.masked_fill_(hidden_RL, float("-inf"))[:, None, None]
            mask = mask.expand(-1, 1, query.shape[2], -1)
            self._masks[(number, window)] = mask
        return mask


class RowStep:
    """Any tokens of any rows in [1, N], by tiles of positions: bits that no neighbour can change.

    A token computes the same here whether its sequence is prefilled or decoded, and the same as in
    the learner's forward. Entries past `rows` are padding. A tile is computed for every row that
    decodes, of which one line is used: that is what it costs.
    """

    def __init__(self, store: LayerStore, *, rows: Sequence[int], positions: Sequence[int]) -> None:
        self._store = store
        self._rows = list(rows)
        self._positions = list(positions)
        self._tiles: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
            self._tiles[row, position // ROWS * ROWS].append(token)

    def attend(self, layer: int, given: Projected) -> Tensor:
        keys, values = self._store.layer(layer, given.key, given.value)
        count = len(self._rows)
        keys[self._rows, :, self._positions] = given.key[0, :, :count].transpose(0, 1)
        values[self._rows, :, self._positions] = given.value[0, :, :count].transpose(0, 1)
        heads, tokens, size = given.query.shape[1:]
        output_HND = given.query.new_zeros(heads, tokens, values.shape[-1])
        for (row, start), members in self._tiles.items():
            query_HTD = given.query.new_zeros(heads, ROWS, size)
            lines = [self._positions[token] - start for token in members]
            query_HTD[:, lines] = given.query[0, :, members]
            how = given.scale, given.window
            attended = attend_tile(query_HTD, keys[row], values[row], start=start, how=how)
            output_HND[:, members] = attended[:, lines]
        return output_HND.transpose(0, 1).unsqueeze(0)


def plan_spans(positions: Sequence[int], *, rows: int = 32) -> list[tuple[int, int, int]]:
    """(start, stop, length) of neighbouring rows to attend together, `length` a multiple of 8.

    One span for all, unless the longest row would make the others attend to much padding.
    """

    def span(start: int, stop: int) -> tuple[int, int, int]:
        # GPU kernels want the mask's rows aligned to 8 entries; the cache is longer than that.
        return start, stop, -(-(max(positions[start:stop]) + 1) // 8) * 8

    whole = span(0, len(positions))
    parts = [
        span(start, min(start + rows, len(positions))) for start in range(0, len(positions), rows)
    ]
    area = sum((stop - start) * length for start, stop, length in parts)
    return parts if area < 0.7 * len(positions) * whole[2] else [whole]


def _few_queries(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, scale: float | None
) -> Tensor:
    """Attention with an additive mask as two batched products.

    With two or three queries a head, torch's own kernel on the CPU takes nearly twice as long
    (measured: 32 rows of 3 heads, 80 to 256 positions).
    """
    scores = torch.baddbmm(
        attn_mask.expand(*query.shape[:3], -1).flatten(0, 1),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        alpha=query.shape[-1] ** -0.5 if scale is None else scale,
    )
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).unflatten(0, query.shape[:2])


def _causal(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention of sequences [n, heads, L, D]; the queries are the last of the keys."""
    queries, length = query.shape[2], key.shape[2]
    grouped = key.shape[1] != query.shape[1]
    if queries == length and (window is None or length <= window):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    there = torch.arange(length, device=query.device)
    distance = there[length - queries :, None] - there[None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped
    )


def _cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: AttentionStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    for name in ("softcap", "s_aux", "position_bias"):
        if rest.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} attends with {name}, which the native engine lacks",
                fix="use another engine for this model",
            )
    if step is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend_paged(module, query, key, value, scale, sliding_window), None
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    given = Projected(query, key, value, scaling, sliding_window)
    return step.attend(layer, given), None


AttentionInterface.register(CACHED, _cached_attention)
