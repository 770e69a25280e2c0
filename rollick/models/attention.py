"""Causal attention over packed sequences, through transformers' attention interface.

The model is called with the tokens of many sequences end to end, [1, N], with positions that
restart, and with a `PackedLayout` as the keyword `layout`, which transformers hands on to this
function in every layer. Sequences of equal length make one kernel call, [n, heads, length, d]:
no padding, no mask, nothing approximate. On a GPU, in half precision, one call takes all lengths
where torch has the kernel. No mask function is registered under VARLEN, which is how transformers
is told to build none.

Legend: N packed tokens, H heads, K key-value heads, D size of a head, L length of a sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from rollick.errors import ModelError

VARLEN = "rollick_varlen"
"""The `attention` to load a model with, to call it with a `layout`."""

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that see a sequence through attention alone."""

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences of one length: one kernel call."""

    start: int
    count: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """Where sequences lie in the packed tokens. Built once per micro-batch, on the host.

    `runs` cuts the tokens after they were reordered by `order_N`; both orders are None where
    equal lengths are neighbours already, and then the kernel reads the tokens in place.
    """

    lengths: tuple[int, ...]
    runs: tuple[Run, ...]
    position_ids_N: torch.Tensor
    starts_B1: torch.Tensor
    per_sequence: bool = False
    order_N: torch.Tensor | None = None
    inverse_N: torch.Tensor | None = None

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, device: str = "cpu", per_sequence: bool = False
    ) -> PackedLayout:
        """`per_sequence` makes each sequence a call of its own, so that no result depends on
        how many others have its length."""
        if min(lengths, default=0) < 1:
            raise ValueError(f"a layout needs sequences of at least one token, got {lengths}")
        positions = np.concatenate([np.arange(length) for length in lengths])
        by_length = sorted(range(len(lengths)), key=lambda b: lengths[b])
        grouped = per_sequence or len(list(groupby(lengths))) == len(set(lengths))
        placed = list(lengths) if grouped else [lengths[b] for b in by_length]
        order = None if grouped else _token_order(lengths, by_length)
        return cls(
            lengths=tuple(int(length) for length in lengths),
            runs=_runs(placed, per_sequence=per_sequence),
            position_ids_N=torch.from_numpy(positions).to(device),
            starts_B1=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
            per_sequence=per_sequence,
            order_N=None if order is None else torch.from_numpy(order).to(device),
            inverse_N=None if order is None else torch.from_numpy(np.argsort(order)).to(device),
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


def _token_order(lengths: Sequence[int], sequences: Sequence[int]) -> np.ndarray[Any, Any]:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.concatenate([np.arange(offsets[b], offsets[b + 1]) for b in sequences])


def _runs(lengths: Sequence[int], *, per_sequence: bool) -> tuple[Run, ...]:
    runs: list[Run] = []
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        for size in [1] * count if per_sequence else [count]:
            runs.append(Run(start, size, int(length)))
            start += size * int(length)
    return tuple(runs)


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
    if query.is_cuda and query.dtype in _HALF and layout.is_ragged and ragged_kernel():
        return _attend_ragged(query, key, value, layout, scaling, sliding_window)[None], None
    if layout.order_N is not None:
        query, key, value = (x.index_select(2, layout.order_N) for x in (query, key, value))
    outputs = [
        _attend_run(query, key, value, run=run, scaling=scaling, window=sliding_window)
        for run in layout.runs
    ]
    output_NHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if layout.inverse_N is not None:
        output_NHD = output_NHD.index_select(0, layout.inverse_N)
    return output_NHD[None], None


@cache
def ragged_kernel() -> Callable[..., Any] | None:
    """torch's kernel for sequences of different lengths; None before the version that has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size"} <= takes.keys() else None


def _attend_ragged(
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
    # Key-value heads are repeated here because not every version of the kernel does it.
    queries_each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(queries_each, dim=1) for x in (key, value))
    return kernel(
        *(packed[0].transpose(0, 1).contiguous() for packed in (query, key, value)),
        layout.starts_B1,
        layout.starts_B1,
        longest,
        longest,
        scale=scaling,
        # Tokens that a query sees to its left (-1: all) and to its right (0: causal).
        window_size=(-1 if window is None else window - 1, 0),
    )


def _attend_run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    run: Run,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """The sequences of one run, [count * length, H, D]."""
    start, count, length = run.start, run.count, run.length

    def per_sequence(packed: torch.Tensor) -> torch.Tensor:
        cut = packed[0, :, start : start + count * length]
        return cut.unflatten(1, (count, length)).transpose(0, 1)

    banded = window is not None and length > window
    output = scaled_dot_product_attention(
        per_sequence(query),
        per_sequence(key),
        per_sequence(value),
        attn_mask=_band(length, window, device=query.device) if banded and window else None,
        is_causal=not banded and length > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


def _band(length: int, window: int, *, device: torch.device) -> torch.Tensor:
    """True where a query may look: itself and the `window` - 1 tokens before it."""
    place = torch.arange(length, device=device)
    behind = place[:, None] - place[None, :]
    return (behind >= 0) & (behind < window)


AttentionInterface.register(VARLEN, varlen_attention)
