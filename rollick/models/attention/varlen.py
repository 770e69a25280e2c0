"""Causal attention over packed sequences, through transformers' attention interface.

The model is called with the concatenated tokens of many sequences, [1, N], with positions that
restart, and with a `PackedLayout` as the keyword `layout`. One kernel call computes all sequences
of equal length, [n, heads, length, D], without padding or mask. On a GPU, in half precision, one
call computes all lengths and shared prefixes, if torch has the kernel. No mask function is
registered for VARLEN, so transformers builds no mask.

A prefix that several sequences share can be in the pack once. The packed tokens are then segments:
each begins a sequence or continues another segment (its parent), and its queries attend to its keys
and those of its ancestors. shared_prefix.py plans which tokens are shared.

Legend: N packed tokens, H query heads, K key/value heads, D head dim, B segments (sequences where
nothing is shared), M keys that the segments attend to, counted for each segment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from rollick.models.attention.batch_invariant import PagePlan, attend_batch_invariant
from rollick.models.attention.causal import attend_causal, attend_in_tiles
from rollick.models.attention.options import AttentionOptions, missing_argument, read_options

VARLEN = "rollick_varlen"
"""The attention implementation of models that are called with a `layout`."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types that mix tokens through attention alone."""

ROOT = -1
"""The parent of a segment that begins a sequence."""

_HALF = (torch.bfloat16, torch.float16)

SegmentIndex = tuple[int, int]
"""The index of the call that computes a segment, and the segment's index in that call."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Adjacent segments of one length with one parent, computed by one kernel call."""

    count: int
    length: int
    before: tuple[SegmentIndex, ...] = ()
    """The ancestors of these segments, from the root."""


@dataclass(frozen=True, slots=True, eq=False)
class ContextShard:
    """The rows of a pack on this rank, if several ranks share the pack."""

    own: range
    """The calls whose queries are on this rank."""
    gather: Callable[[Tensor], Tensor]
    """The keys (or values) of all rows from those of this rank, [1, K, n, D] -> [1, K, N, D]."""


@dataclass(frozen=True, slots=True, eq=False)
class AttendedKeys:
    """The concatenated keys of all segments: for each, its ancestors' keys, then its own."""

    indices_M: Tensor
    """The index of each key in the pack."""
    starts_B1: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], *, device: str) -> AttendedKeys:
        paths = [path_to(parents, b) for b in range(len(parents))]
        sizes = [sum(lengths[b] for b in path) for path in paths]
        order = _token_order(lengths, [b for path in paths for b in path])
        return cls(
            indices_M=torch.from_numpy(order).to(device),
            starts_B1=torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)).to(device),
            longest=int(max(sizes)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """The segments of the packed tokens, built once per micro-batch. `calls` divides the tokens in
    the order `order_N`. `order_N` and `inverse_N` are None if the segments of each call are already
    adjacent; then the kernel reads the tokens in place."""

    lengths: tuple[int, ...]
    calls: tuple[AttentionCall, ...]
    position_ids_N: Tensor
    starts_B1: Tensor
    per_sequence: bool = False
    order_N: Tensor | None = None
    inverse_N: Tensor | None = None
    attended: AttendedKeys | None = None
    """Set if segments continue others; for the kernel for all lengths."""
    page_plan: PagePlan | None = None
    """Set to attend with the engine's kernel (batch_invariant.py)."""
    parents: tuple[int, ...] = ()
    shard: ContextShard | None = None
    """Set if only some rows are on this rank; `position_ids_N` are then those of these rows."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        device: str = "cpu",
        per_sequence: bool = False,
        batch_invariant: bool = False,
    ) -> PackedLayout:
        """`parents` is the earlier segment that each segment continues (ROOT: none, the default).
        `per_sequence` makes a separate call for each segment, so that no result depends on the
        others; complete sequences then get the bits of an engine (attend_in_tiles)."""
        parents = [ROOT] * len(lengths) if parents is None else parents
        _check_segments(lengths, parents)
        segments = range(len(lengths))
        keys = list(segments) if per_sequence else list(zip(parents, lengths, strict=True))
        adjacent = len(list(groupby(keys))) == len(set(keys))
        ordered = segments if adjacent else sorted(segments, key=keys.__getitem__)
        order = None if adjacent else _token_order(lengths, ordered)
        has_parents = any(parent != ROOT for parent in parents)
        ancestors = [path_to(parents, parent) for parent in parents]
        return cls(
            lengths=tuple(int(length) for length in lengths),
            parents=tuple(parents),
            calls=plan_calls(lengths, parents, keys, ordered=ordered),
            position_ids_N=torch.from_numpy(_positions(lengths, parents)).to(device),
            starts_B1=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
            per_sequence=per_sequence,
            order_N=None if order is None else torch.from_numpy(order).to(device),
            inverse_N=None if order is None else torch.from_numpy(np.argsort(order)).to(device),
            attended=AttendedKeys.of(lengths, parents, device=device) if has_parents else None,
            page_plan=PagePlan(lengths, ancestors, device=device) if batch_invariant else None,
        )


def unsupported_layer_types(config: PretrainedConfig) -> list[str]:
    """Layer types that mix tokens without our attention, and so would mix packed sequences."""
    text = config.get_text_config()
    return sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS)


def path_to(parents: Sequence[int], segment: int) -> list[int]:
    """The segments from a root down to `segment`; empty for ROOT."""
    upwards: list[int] = []
    while segment != ROOT:
        upwards.append(segment)
        segment = parents[segment]
    return upwards[::-1]


def _check_segments(lengths: Sequence[int], parents: Sequence[int]) -> None:
    if min(lengths, default=0) < 1:
        raise ValueError(f"a layout needs sequences of at least one token, got lengths {lengths}")
    if not all(ROOT <= parent < b for b, parent in enumerate(parents)):
        raise ValueError(f"a parent must be an earlier segment or ROOT, got parents {parents}")


def _positions(lengths: Sequence[int], parents: Sequence[int]) -> np.ndarray[Any, Any]:
    stops: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        stops.append(length + (0 if parent == ROOT else stops[parent]))
    spans = zip(stops, lengths, strict=True)
    return np.concatenate([np.arange(stop - length, stop) for stop, length in spans])


def _token_order(lengths: Sequence[int], segments: Sequence[int]) -> np.ndarray[Any, Any]:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in segments])


def plan_calls(
    lengths: Sequence[int], parents: Sequence[int], keys: Sequence[Any], *, ordered: Sequence[int]
) -> tuple[AttentionCall, ...]:
    """One call for each run of segments with equal keys, in the order `ordered`."""
    calls: list[AttentionCall] = []
    indices: dict[int, SegmentIndex] = {}
    for _, group in groupby(ordered, key=keys.__getitem__):
        members = list(group)
        first = members[0]
        before = tuple(indices[b] for b in path_to(parents, parents[first]))
        indices |= {b: (len(calls), index) for index, b in enumerate(members)}
        calls.append(AttentionCall(len(members), int(lengths[first]), before))
    return tuple(calls)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    if layout is None:
        raise missing_argument(module)
    options = read_options(module, (query, key, value), attention_mask, kwargs)
    reference = partial(_attend_packed, layout=layout, options=options)
    if layout.page_plan is None:
        return reference(query, key, value)[None], None
    packed = query, key, value
    output = attend_batch_invariant(packed, layout.page_plan, options, reference=reference)
    return output[None], None


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, *, layout: PackedLayout, options: AttentionOptions
) -> Tensor:
    """One kernel call for all lengths, or one for each length, [N, H, D]."""
    calls = layout.calls
    own_calls = range(len(calls))
    if layout.shard is not None:
        own_calls = layout.shard.own
        key, value = (layout.shard.gather(packed) for packed in (key, value))
    elif _can_attend_ragged(query, value, layout, options):
        return attend_ragged(query, key, value, layout, options)
    elif layout.order_N is not None:
        query, key, value = (x.index_select(2, layout.order_N) for x in (query, key, value))
    queries = _split_by_call(query, calls[own_calls.start : own_calls.stop])
    keys, values = (_keys_by_call(x, calls, options.window, own_calls) for x in (key, value))
    has_parents = any(call.before for call in calls)
    in_tiles = layout.per_sequence and layout.shard is None and not has_parents
    outputs = [
        attend_in_tiles(q[0], k[0], v[0], options) if in_tiles else attend_causal(q, k, v, options)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    output_NHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output_NHD if layout.inverse_N is None else output_NHD.index_select(0, layout.inverse_N)


def _can_attend_ragged(
    query: Tensor, value: Tensor, layout: PackedLayout, options: AttentionOptions
) -> bool:
    """Whether one kernel call for all lengths is possible, and faster than one for each length."""
    is_half_on_gpu = query.is_cuda and query.dtype in _HALF
    is_plain = options.is_plain and query.shape[-1] == value.shape[-1]
    is_ragged = not layout.per_sequence and len(layout.calls) > 1
    return is_half_on_gpu and is_plain and is_ragged and ragged_kernel() is not None


@cache
def ragged_kernel() -> Callable[..., Any] | None:
    """torch's kernel for sequences of different lengths; None in versions without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size"} <= parameters.keys() else None


def attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, options: AttentionOptions
) -> Tensor:
    """All sequences in one call, [N, H, D]."""
    kernel = ragged_kernel()
    assert kernel is not None
    query_NHD, key_NKD, value_NKD = (packed[0].transpose(0, 1) for packed in (query, key, value))
    longest = longest_key = max(layout.lengths)
    key_starts_B1 = layout.starts_B1
    if layout.attended is not None:
        indices_M = layout.attended.indices_M
        key_NKD, value_NKD = (_Gather.apply(x, indices_M) for x in (key_NKD, value_NKD))
        key_starts_B1, longest_key = layout.attended.starts_B1, layout.attended.longest
    # Key/value heads are repeated here because not every version of the kernel does it.
    group = query.shape[1] // key.shape[1]
    key_NHD, value_NHD = (x.repeat_interleave(group, dim=1) for x in (key_NKD, value_NKD))
    # Tokens to the left (-1: all) and to the right (0: causal) that a query attends to. The last
    # query of a segment is at its last key.
    window_size = -1 if options.window is None else options.window - 1, 0
    return kernel(
        *(packed.contiguous() for packed in (query_NHD, key_NHD, value_NHD)),
        *(layout.starts_B1, key_starts_B1, longest, longest_key),
        scale=options.scale,
        window_size=window_size,
    )


class _Gather(torch.autograd.Function):
    """Select rows by index; the gradients of a row are summed in float32."""

    @staticmethod
    def forward(ctx: Any, packed_NKD: Tensor, indices_M: Tensor) -> Tensor:
        ctx.save_for_backward(indices_M)
        ctx.rows = len(packed_NKD)
        return packed_NKD.index_select(0, indices_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_MKD,), (indices_M,) = gradients, ctx.saved_tensors
        sums = gradient_MKD.new_zeros(ctx.rows, *gradient_MKD.shape[1:], dtype=torch.float32)
        return sums.index_add_(0, indices_M, gradient_MKD.float()).to(gradient_MKD.dtype), None


def _split_by_call(packed: Tensor, calls: Sequence[AttentionCall]) -> list[Tensor]:
    """The tokens of each call, [count, heads, length, D]. One split, because the gradient of a
    slice would have the length of the pack."""
    parts = packed[0].split([call.count * call.length for call in calls], dim=1)
    return [
        part.unflatten(1, (call.count, call.length)).transpose(0, 1)
        for part, call in zip(parts, calls, strict=True)
    ]


def _keys_by_call(
    packed: Tensor, calls: Sequence[AttentionCall], window: int | None, own_calls: range
) -> list[Tensor]:
    """Keys (or values) of each own call: its ancestors' within the window, then its own."""
    parts = _split_by_call(packed, calls)
    if not any(call.before for call in calls):
        return [parts[number] for number in own_calls]
    segments = [part.unbind(0) for part in parts]
    keys: list[Tensor] = []
    for number in own_calls:
        part, call = parts[number], calls[number]
        if call.before:
            before = torch.cat([segments[other][index] for other, index in call.before], dim=1)
            if window is not None:
                before = before[:, max(0, before.shape[1] - window + 1) :]
            part = torch.cat([before.expand(call.count, -1, -1, -1), part], dim=2)
        keys.append(part)
    return keys


AttentionInterface.register(VARLEN, varlen_attention)
