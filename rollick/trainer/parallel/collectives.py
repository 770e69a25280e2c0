"""Differentiable collectives.

    gather_rows     all-gather; ranks then compute the same      backward: this rank's slice
      summed=True   all-gather; ranks then divide the work       backward: reduce-scatter
    shared_input    a replicated tensor; ranks divide the work   backward: all-reduce
    exchange_rows   all-to-all                                   backward: the inverse all-to-all

Ranks may have different numbers of rows; buffers are padded to the largest.

Legend: n rows of this rank, N rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Newer versions of torch renamed both, and warn about the old names.
_DIST: Any = dist
_all_gather = getattr(dist, "all_gather_single", None) or _DIST.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or _DIST.reduce_scatter_tensor


def gather_rows(
    rows: Tensor, sizes: Sequence[int], group: ProcessGroup, *, summed: bool = False
) -> Tensor:
    """All-gather [n, ...] to [N, ...]; `sizes`: rows of each rank. `summed`: sum gradients over the
    ranks; if False, all ranks must compute the same from the result."""
    result: Any = _GatherRows.apply(rows, tuple(sizes), group, summed)
    return result


def shared_input(values: Tensor, group: ProcessGroup) -> Tensor:
    """Mark a replicated tensor as the input of work that ranks divide: its gradient is summed over
    the ranks."""

    def sum_gradient(gradient: Tensor) -> Tensor:
        return all_sum(gradient.clone(memory_format=torch.contiguous_format), group)

    values = values.view_as(values)
    if values.requires_grad:
        values.register_hook(sum_gradient)
    return values


def exchange_rows(
    rows: Tensor, *, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    """Send the first `sent[0]` rows to rank 0 and so on; returns the rows received, by rank."""
    result: Any = _ExchangeRows.apply(rows, tuple(sent), tuple(received), group)
    return result


def all_sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks in place. Not differentiable."""
    dist.all_reduce(values, group=group)
    return values


def wait_for_all() -> None:
    """Barrier over gloo, because ranks may share a device."""
    dist.all_reduce(torch.zeros(()))


def _pad_rows(rows: Tensor, count: int) -> Tensor:
    if len(rows) == count:
        return rows.contiguous()
    buffer = rows.new_zeros(count, *rows.shape[1:])
    buffer[: len(rows)] = rows
    return buffer


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes: tuple[int, ...], group: ProcessGroup, summed: bool
    ) -> Tensor:
        ctx.sizes, ctx.group, ctx.summed = sizes, group, summed
        largest = max(sizes)
        gathered = rows.new_empty(len(sizes) * largest, *rows.shape[1:])
        _all_gather(gathered, _pad_rows(rows, largest), group=group)
        if min(sizes) == largest:
            return gathered
        return torch.cat([gathered[r * largest : r * largest + n] for r, n in enumerate(sizes)])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        rank = dist.get_rank(ctx.group)
        chunks = gradient.split(ctx.sizes)
        if not ctx.summed:
            return chunks[rank].contiguous(), None, None, None
        largest = max(ctx.sizes)
        buffer = torch.cat([_pad_rows(chunk, largest) for chunk in chunks])
        received = buffer.new_empty(largest, *buffer.shape[1:])
        _reduce_scatter(received, buffer, group=ctx.group)
        return received[: ctx.sizes[rank]], None, None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: ProcessGroup,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output
