"""Causal attention over packed sequences, through transformers' attention interface.

The model is called with the tokens of many sequences end to end, [1, N], with positions that
restart, and with a `PackedLayout` as the keyword `layout`, which transformers hands on to this
function in every layer. Sequences of equal length make one kernel call, [n, heads, length, d]:
no padding, no mask, nothing approximate. On a GPU, in half precision, one call takes all lengths,
and what they share, where torch has the kernel. No mask function is registered under VARLEN, which
is how transformers is told to build none.

What several sequences begin with can be in the pack once. The packed tokens are then segments:
each begins a sequence or continues another segment (its parent), and its queries see the keys of
the segments on the way to it and its own. Which tokens are shared is planned in prefix.py.

Legend: N packed tokens, H heads, K key-value heads, D size of a head, B segments (whole sequences
where nothing is shared), M keys that the segments see, shared ones once for each.
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
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from rollick.errors import ModelError
from rollick.models.fixed_attention import FixedPlan, attend_fixed
from rollick.models.tiled_attention import attend_in_tiles

VARLEN = "rollick_varlen"
"""The `attention` to load a model with, to call it with a `layout`."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that see a sequence through attention alone."""

ROOT = -1
"""The parent of a segment that begins a sequence."""

_HALF = (torch.bfloat16, torch.float16)


Place = tuple[int, int]
"""Which run a segment is in, and which one of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring segments of one length with one parent: one kernel call."""

    start: int
    count: int
    length: int
    before: tuple[Place, ...] = ()
    """The segments that these continue, first one first; all of these see their keys."""


@dataclass(frozen=True, slots=True, eq=False)
class PackPart:
    """Of a pack that several processes hold in parts: which runs have their queries here, and how
    the keys (or values) of all rows are got from those here, [1, K, n, D] -> [1, K, N, D]."""

    own: range
    gather: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SeenKeys:
    """The keys of each segment one after another: of what it continues, then its own."""

    places_M: torch.Tensor
    """Where each of them is in the pack."""
    starts_B1: torch.Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], *, device: str) -> SeenKeys:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        paths = [[*_path(parents, parent), b] for b, parent in enumerate(parents)]
        spans = [np.arange(offsets[b], offsets[b + 1]) for path in paths for b in path]
        sizes = [sum(lengths[b] for b in path) for path in paths]
        return cls(
            places_M=torch.from_numpy(np.concatenate(spans)).to(device),
            starts_B1=torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int32)).to(device),
            longest=int(max(sizes)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where segments lie in the packed tokens. Built once per micro-batch, on the host.

    `runs` cuts the tokens after they were reordered by `order_N`; both orders are None where
    segments of a run are neighbours already, and then the kernel reads the tokens in place.
    """

    lengths: tuple[int, ...]
    runs: tuple[Run, ...]
    position_ids_N: torch.Tensor
    starts_B1: torch.Tensor
    per_sequence: bool = False
    order_N: torch.Tensor | None = None
    inverse_N: torch.Tensor | None = None
    seen: SeenKeys | None = None
    """Where segments continue others, for the kernel that takes all of them at once."""
    fixed: FixedPlan | None = None
    """Attend with the engine's kernel (fixed_attention.py)."""
    parents: tuple[int, ...] = ()
    part: PackPart | None = None
    """Only some rows are here; `position_ids_N` are theirs."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        device: str = "cpu",
        per_sequence: bool = False,
        fixed: bool = False,
    ) -> PackedLayout:
        """`parents` says which earlier segment each one continues (ROOT: none); without it, all
        are sequences of their own. `per_sequence` makes each segment calls of its own, so that
        no result depends on the others; whole sequences then go through tiled_attention.py, and
        have the bits that an engine's tokens have."""
        parents = [ROOT] * len(lengths) if parents is None else parents
        _check_segments(lengths, parents)
        kinds = list(zip(parents, lengths, strict=True))
        places = range(len(lengths))
        grouped = per_sequence or len(list(groupby(kinds))) == len(set(kinds))
        placed = places if grouped else sorted(places, key=lambda b: kinds[b])
        order = None if grouped else _token_order(lengths, placed)
        return cls(
            lengths=tuple(int(length) for length in lengths),
            parents=tuple(parents),
            runs=_runs(lengths, parents, placed=placed, per_sequence=per_sequence),
            position_ids_N=torch.from_numpy(_positions(lengths, parents)).to(device),
            starts_B1=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
            per_sequence=per_sequence,
            order_N=None if order is None else torch.from_numpy(order).to(device),
            inverse_N=None if order is None else torch.from_numpy(np.argsort(order)).to(device),
            seen=None
            if all(parent == ROOT for parent in parents)
            else SeenKeys.of(lengths, parents, device=device),
            fixed=FixedPlan(lengths, [_path(parents, p) for p in parents], device=device)
            if fixed
            else None,
        )

    @property
    def is_ragged(self) -> bool:
        """Whether one kernel for all lengths may replace (and beats) one call for each run."""
        return not self.per_sequence and len(self.runs) > 1

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def other_layers(config: PretrainedConfig) -> list[str]:
    """Kinds of layers that mix tokens without our attention: packed sequences would leak there."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)


def _check_segments(lengths: Sequence[int], parents: Sequence[int]) -> None:
    if min(lengths, default=0) < 1:
        raise ValueError(f"a layout needs sequences of at least one token, got {lengths}")
    if not all(ROOT <= parent < b for b, parent in enumerate(parents)):
        raise ValueError(f"a segment continues an earlier one or none, got parents {parents}")


def _positions(lengths: Sequence[int], parents: Sequence[int]) -> np.ndarray[Any, Any]:
    stops: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        stops.append(length + (0 if parent == ROOT else stops[parent]))
    spans = zip(stops, lengths, strict=True)
    return np.concatenate([np.arange(stop - length, stop) for stop, length in spans])


def _token_order(lengths: Sequence[int], segments: Sequence[int]) -> np.ndarray[Any, Any]:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in segments])


def _runs(
    lengths: Sequence[int],
    parents: Sequence[int],
    *,
    placed: Sequence[int],
    per_sequence: bool,
) -> tuple[Run, ...]:
    """The calls for segments that lie in the order `placed`."""
    runs: list[Run] = []
    places: dict[int, Place] = {}
    start = 0
    for (parent, length), same in groupby(placed, key=lambda b: (parents[b], lengths[b])):
        members = list(same)
        before = tuple(places[b] for b in _path(parents, parent))
        for part in [[b] for b in members] if per_sequence else [members]:
            places |= {b: (len(runs), number) for number, b in enumerate(part)}
            runs.append(Run(start, len(part), int(length), before))
            start += len(part) * int(length)
    return tuple(runs)


def _path(parents: Sequence[int], segment: int) -> list[int]:
    """The segments from a root down to `segment`."""
    upwards: list[int] = []
    while segment != ROOT:
        upwards.append(segment)
        segment = parents[segment]
    return upwards[::-1]


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    if attention_mask is not None or softcap is not None or rest.get("s_aux") is not None:
        raise ModelError(
            f"{type(module).__name__} attends with a mask, a soft cap or sinks, which the local "
            "strategy lacks",
            fix="use a decoder with plain causal attention",
        )
    plain = partial(_attend_packed, layout=layout, scaling=scaling, window=sliding_window)
    if layout.fixed is None:
        return plain(query, key, value)[None], None
    packed = query, key, value
    output_NHD = attend_fixed(
        packed, layout.fixed, scale=scaling, window=sliding_window, plain=plain
    )
    return output_NHD[None], None


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """One kernel call for all lengths, or one for each run, [N, H, D]."""
    if layout.part is not None:
        return _attend_part(query, key, value, layout.part, layout.runs, scaling, window)
    if query.is_cuda and query.dtype in _HALF and layout.is_ragged and ragged_kernel():
        return attend_ragged(query, key, value, layout, scaling, window)
    if layout.order_N is not None:
        query, key, value = (x.index_select(2, layout.order_N) for x in (query, key, value))
    queries, keys, values = (_by_run(packed, layout.runs) for packed in (query, key, value))
    keys, values = (_with_before(each, layout.runs, window) for each in (keys, values))
    tiled = layout.per_sequence and not any(run.before for run in layout.runs)
    outputs = [
        attend_in_tiles(*(each[0] for each in given), scale=scaling, window=window)
        if tiled
        else _attend_run(*given, scaling=scaling, window=window)
        for given in zip(queries, keys, values, strict=True)
    ]
    output_NHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if layout.inverse_N is not None:
        output_NHD = output_NHD.index_select(0, layout.inverse_N)
    return output_NHD


def _attend_part(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: PackPart,
    runs: Sequence[Run],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """The rows that are here, [n, H, D]."""
    own = [runs[number] for number in part.own]
    keys, values = (_by_run(part.gather(packed), runs) for packed in (key, value))
    keys, values = (_with_before(each, runs, window, part.own) for each in (keys, values))
    outputs = [
        _attend_run(*given, scaling=scaling, window=window)
        for given in zip(_by_run(query, own), keys, values, strict=True)
    ]
    return torch.cat(outputs)


@cache
def ragged_kernel() -> Callable[..., Any] | None:
    """torch's kernel for sequences of different lengths; None before the version that has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size"} <= takes.keys() else None


def attend_ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """All sequences in one call, whatever their lengths, [N, H, D]."""
    kernel = ragged_kernel()
    assert kernel is not None
    longest = max(layout.lengths)
    query_NHD, key_NKD, value_NKD = (packed[0].transpose(0, 1) for packed in (query, key, value))
    key_starts_B1, longest_key = layout.starts_B1, longest
    if layout.seen is not None:
        key_NKD, value_NKD = (
            _gathered(each, layout.seen.places_M) for each in (key_NKD, value_NKD)
        )
        key_starts_B1, longest_key = layout.seen.starts_B1, layout.seen.longest
    # Key-value heads are repeated here because not every version of the kernel does it.
    queries_each = query.shape[1] // key.shape[1]
    key_NHD, value_NHD = (x.repeat_interleave(queries_each, dim=1) for x in (key_NKD, value_NKD))
    return kernel(
        query_NHD.contiguous(),
        key_NHD.contiguous(),
        value_NHD.contiguous(),
        layout.starts_B1,
        key_starts_B1,
        longest,
        longest_key,
        scale=scaling,
        # Tokens that a query sees to its left (-1: all) and to its right (0: causal). The last
        # query of a segment is at its last key.
        window_size=(-1 if window is None else window - 1, 0),
    )


def _gathered(packed_NKD: torch.Tensor, places_M: torch.Tensor) -> torch.Tensor:
    gathered: Any = _Gather.apply(packed_NKD, places_M)
    return gathered


class _Gather(torch.autograd.Function):
    """Rows by their places. What a row gets from many who see it is summed in float32."""

    @staticmethod
    def forward(ctx: Any, packed_NKD: torch.Tensor, places_M: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places_M)
        ctx.rows = len(packed_NKD)
        return packed_NKD.index_select(0, places_M)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient_MKD: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (places_M,) = ctx.saved_tensors
        sums = gradient_MKD.new_zeros(ctx.rows, *gradient_MKD.shape[1:], dtype=torch.float32)
        return sums.index_add_(0, places_M, gradient_MKD.float()).to(gradient_MKD.dtype), None


def _by_run(packed: torch.Tensor, runs: Sequence[Run]) -> list[torch.Tensor]:
    """The tokens of each run, [count, heads, length, D].

    One split for all of them: the gradient of a slice is as long as the whole pack.
    """
    cuts = packed[0].split([run.count * run.length for run in runs], dim=1)
    return [
        cut.unflatten(1, (run.count, run.length)).transpose(0, 1)
        for cut, run in zip(cuts, runs, strict=True)
    ]


def _with_before(
    own: Sequence[torch.Tensor],
    runs: Sequence[Run],
    window: int | None,
    asked: range | None = None,
) -> list[torch.Tensor]:
    """Keys (or values) that each run sees: of what comes before it, as far as in reach, and own.
    Only of the runs `asked`, where these are given."""
    asked = range(len(runs)) if asked is None else asked
    if not any(run.before for run in runs):
        return [own[number] for number in asked]
    segments = [of_run.unbind(0) for of_run in own]
    seen: list[torch.Tensor] = []
    for of_run, run in ((own[number], runs[number]) for number in asked):
        if run.before:
            before = torch.cat([segments[number][place] for number, place in run.before], dim=1)
            if window is not None:
                before = before[:, max(0, before.shape[1] - window + 1) :]
            of_run = torch.cat([before.expand(run.count, -1, -1, -1), of_run], dim=2)
        seen.append(of_run)
    return seen


def _attend_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """The segments of one run, whose queries are the last of the keys, [count * length, H, D]."""
    queries, keys = query.shape[2], key.shape[2]
    banded = window is not None and keys > window
    masked = banded or keys > queries > 1
    if masked and query.is_cuda:
        # The GPU's kernel that takes a mask wants a key for every head; what torch falls back to
        # holds all scores at once.
        each = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(each, dim=1) for x in (key, value))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_band(queries, keys, window, device=query.device) if masked else None,
        is_causal=not masked and keys == queries > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _band(queries: int, keys: int, window: int | None, *, device: torch.device) -> torch.Tensor:
    """True where a query may look: itself and the tokens before it, `window` in all. The queries
    are the last of the keys."""
    place = torch.arange(keys, device=device)
    behind = place[keys - queries :, None] - place[None, :]
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


AttentionInterface.register(VARLEN, varlen_attention)
