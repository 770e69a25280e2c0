"""Attention over a slot cache of keys and values, for generation.

Defines the attention function that is registered with transformers as CACHED, and three kinds of
step: packed prefill, batched decode, and batch-invariant tiles (TiledStep). A LayerStore owns the
memory. No mask function is registered for CACHED, so transformers builds no mask.

    model(..., step=DecodeStep(...)) -> attention of layer i -> step.attend(i) -> store.layer(i)

A call without a step uses the paged cache (paged.py).

Legend: R rows (sequences), H query heads, K key/value heads, G = H / K, L positions, D head dim,
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

from rollick.models.attention.causal import attend_causal, attend_tile, attend_with_mask
from rollick.models.attention.options import AttentionOptions, missing_argument, read_options
from rollick.models.attention.paged import attend_paged
from rollick.models.decoder.batch_invariant import TILE_ROWS

CACHED = "rollick_cached"
"""The attention implementation to build an engine's module with."""


class LayerStore(Protocol):
    """Owns the cache of each layer."""

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, K, L, D] of layer `index`. The first call allocates them with the
        dtype, heads and head dim of `key` and `value` ([..., K, tokens, D])."""
        ...


class AttentionInputs(NamedTuple):
    """Projections of a layer, each [batch, heads, tokens, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions


class AttentionStep(Protocol):
    """Stores keys and values in each attention layer of one forward, and attends to them."""

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """Store the keys and values, then attend. Returns [batch, tokens, H, D]."""
        ...


class PrefillSpan(NamedTuple):
    """`length` consecutive tokens of a row, from position `start`; earlier ones are cached."""

    row: int
    start: int
    length: int


class PrefillStep:
    """Concatenated spans, [1, N]: first those with start 0, one attention call per length; then
    those that continue a row, one call for each."""

    def __init__(self, store: LayerStore, spans: Sequence[PrefillSpan]) -> None:
        order = [(span.start > 0, span.length) for span in spans]
        assert order == sorted(order), (
            "a prefill starts with the spans of start 0, sorted by length"
        )
        self._store = store
        first_spans = (span for span in spans if not span.start)
        self._first_spans: list[tuple[int, list[int]]] = [
            (length, [span.row for span in members])
            for length, members in groupby(first_spans, key=lambda span: span.length)
        ]
        self._later_spans = [span for span in spans if span.start]

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        keys, values = self._store.layer(layer, inputs.key, inputs.value)
        outputs: list[Tensor] = []
        offset = 0
        for length, rows in self._first_spans:
            stop = offset + length * len(rows)
            query, key, value = (
                packed[0, :, offset:stop].unflatten(1, (len(rows), length)).transpose(0, 1)
                for packed in inputs[:3]
            )
            keys[rows, :, :length] = key
            values[rows, :, :length] = value
            outputs.append(attend_causal(query, key, value, inputs.options))
            offset = stop
        for row, start, length in self._later_spans:
            query, key, value = (packed[:, :, offset : offset + length] for packed in inputs[:3])
            keys[row, :, start : start + length] = key[0]
            values[row, :, start : start + length] = value[0]
            cached = slice(row, row + 1), slice(None), slice(start + length)
            outputs.append(attend_causal(query, keys[cached], values[cached], inputs.options))
            offset += length
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


class DecodeStep:
    """One token at `positions` for each of the rows 0..R-1. The G query heads of a key/value head
    are the query positions of one attention, so keys and values are not expanded (GQA)."""

    def __init__(self, store: LayerStore, *, positions: Sequence[int], device: str) -> None:
        self._store = store
        self._device = device
        self._positions_R = torch.tensor(list(positions), device=device)
        self._rows_R = torch.arange(len(positions), device=device)
        self._spans = plan_spans(positions)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        keys, values = self._store.layer(layer, inputs.key, inputs.value)
        keys[self._rows_R, :, self._positions_R] = inputs.key[:, :, 0]
        values[self._rows_R, :, self._positions_R] = inputs.value[:, :, 0]
        if not inputs.options.is_plain:
            return self._attend_with_mask(inputs, keys, values)
        query_RKGD = inputs.query[:, :, 0].unflatten(1, (keys.shape[1], -1))
        is_cpu_float32 = query_RKGD.device.type == "cpu" and query_RKGD.dtype == torch.float32
        kernel = _attend_with_bmm if is_cpu_float32 else scaled_dot_product_attention
        outputs = [
            kernel(
                query_RKGD[start:stop],
                keys[start:stop, :, :length],
                values[start:stop, :, :length],
                attn_mask=self._mask(number, inputs.options.window, query_RKGD),
                scale=inputs.options.scale,
            )
            for number, (start, stop, length) in enumerate(self._spans)
        ]
        attended_RKGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return attended_RKGD.flatten(1, 2).unsqueeze(1)

    def _attend_with_mask(self, inputs: AttentionInputs, keys: Tensor, values: Tensor) -> Tensor:
        """With a soft cap or sinks, which torch's kernels lack."""
        outputs: list[Tensor] = []
        for start, stop, length in self._spans:
            masked_RL = self._masked(start, stop, length, inputs.options.window)
            key, value = (x[start:stop, :, :length] for x in (keys, values))
            attends, query = ~masked_RL[:, None, None, None], inputs.query[start:stop]
            outputs.append(attend_with_mask(query, key, value, attends, inputs.options))
        return torch.cat(outputs).transpose(1, 2)

    def _masked(self, start: int, stop: int, length: int, window: int | None) -> Tensor:
        """[rows of the span, L]: True where a row does not attend."""
        position_L = torch.arange(length, device=self._device)
        last_R1 = self._positions_R[start:stop, None]
        masked_RL = position_L > last_R1
        return masked_RL if window is None else masked_RL | (position_L <= last_R1 - window)

    def _mask(self, number: int, window: int | None, query: Tensor) -> Tensor:
        """Additive mask [rows of the span, 1, G, L]; layers with equal windows share it."""
        mask = self._masks.get((number, window))
        if mask is None:
            masked_RL = self._masked(*self._spans[number], window)
            mask = torch.zeros(masked_RL.shape, dtype=query.dtype, device=self._device)
            mask = mask.masked_fill_(masked_RL, float("-inf"))[:, None, None]
            mask = mask.expand(-1, 1, query.shape[2], -1)
            self._masks[(number, window)] = mask
        return mask


class TiledStep:
    """Any tokens of any rows, [1, N]. Attends in tiles of TILE_ROWS positions, so that prefill,
    decode and the learner's forward are bitwise equal. Tokens from index len(rows) on are padding.
    Slow: a decode computes a tile for each row and uses one query of it."""

    def __init__(self, store: LayerStore, *, rows: Sequence[int], positions: Sequence[int]) -> None:
        self._store = store
        self._rows = list(rows)
        self._positions = list(positions)
        self._tiles: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
            self._tiles[row, position // TILE_ROWS * TILE_ROWS].append(token)

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        keys, values = self._store.layer(layer, inputs.key, inputs.value)
        count = len(self._rows)
        keys[self._rows, :, self._positions] = inputs.key[0, :, :count].transpose(0, 1)
        values[self._rows, :, self._positions] = inputs.value[0, :, :count].transpose(0, 1)
        heads, tokens, size = inputs.query.shape[1:]
        output_HND = inputs.query.new_zeros(heads, tokens, values.shape[-1])
        for (row, start), members in self._tiles.items():
            query_HTD = inputs.query.new_zeros(heads, TILE_ROWS, size)
            offsets = [self._positions[token] - start for token in members]
            query_HTD[:, offsets] = inputs.query[0, :, members]
            attended = attend_tile(query_HTD, keys[row], values[row], inputs.options, start=start)
            output_HND[:, members] = attended[:, offsets]
        return output_HND.transpose(0, 1).unsqueeze(0)


class ShapeStep:
    """Stores and computes nothing; only for recording the shapes of a model's attention."""

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        batch, heads, tokens, _ = inputs.query.shape
        return inputs.query.new_zeros(batch, tokens, heads, inputs.value.shape[-1])


def plan_spans(positions: Sequence[int], *, rows: int = 32) -> list[tuple[int, int, int]]:
    """(start row, stop row, positions to read) of each attention call of a decode. One call, unless
    calls of `rows` rows read less than 0.7 times its positions."""

    def span(start: int, stop: int) -> tuple[int, int, int]:
        # Rounded up to 8, the mask alignment of GPU kernels; the cache has room for it.
        return start, stop, -(-(max(positions[start:stop]) + 1) // 8) * 8

    single = span(0, len(positions))
    count = len(positions)
    parts = [span(start, min(start + rows, count)) for start in range(0, count, rows)]
    num_reads = sum((stop - start) * length for start, stop, length in parts)
    return parts if num_reads < 0.7 * count * single[2] else [single]


def _attend_with_bmm(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, scale: float | None
) -> Tensor:
    """Attention with an additive mask as two batched matmuls. For 2 or 3 queries per head,
    torch's CPU kernel takes twice as long (measured: 32 rows of 3 heads, 80 to 256 positions)."""
    scores = torch.baddbmm(
        attn_mask.expand(*query.shape[:3], -1).flatten(0, 1),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        alpha=query.shape[-1] ** -0.5 if scale is None else scale,
    )
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).unflatten(0, query.shape[:2])


def _cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    options = read_options(module, (query, key, value), attention_mask, kwargs)
    if step is None:
        if not hasattr(module, "paged_keys"):
            raise missing_argument(module)
        return attend_paged(module, query, key, value, options), None
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    return step.attend(layer, AttentionInputs(query, key, value, options)), None


AttentionInterface.register(CACHED, _cached_attention)
