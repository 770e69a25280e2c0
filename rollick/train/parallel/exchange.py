"""Exchanges between ranks that gradients go through.

    gather_rows     rows of all ranks; all go on with the same work      backward: the own rows
    gather_summed   rows of all ranks; each goes on with its own work    backward: summed rows
    shared_input    the same tensor, for work that ranks divide          backward: summed
    trade_rows      rows to the ranks that they are for, all to all      backward: the way back

Ranks may have different numbers of rows: these are sent in buffers of the largest number.

Legend: n rows of this rank, N those of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# torch has renamed both; the older names warn where there are newer ones.
_DIST: Any = dist
_all_gather = getattr(dist, "all_gather_single", None) or _DIST.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or _DIST.reduce_scatter_tensor


def gather_rows(rows: torch.Tensor, sizes: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    """[N, ...] of [n, ...]; `sizes` are the rows of each rank. All ranks must go on alike."""
    result: Any = _GatherRows.apply(rows, tuple(sizes), group, False)
    return result


def gather_summed(rows: torch.Tensor, sizes: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    """[N, ...] of [n, ...]; the gradient of a row is the sum of what all ranks have for it."""
    result: Any = _GatherRows.apply(rows, tuple(sizes), group, True)
    return result


def shared_input(values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The same values on all ranks, each of which computes a part of what comes of them."""
    result: Any = _SharedInput.apply(values, group)
    return result


def trade_rows(
    rows: torch.Tensor, *, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> torch.Tensor:
    """The first `sent[0]` rows go to rank 0 and so on; gives those that came, by rank."""
    result: Any = _TradeRows.apply(rows, tuple(sent), tuple(received), group)
    return result


def scaled_gradient(values: torch.Tensor, factor: float) -> torch.Tensor:
    """The values, whose gradient is multiplied by the factor."""
    result: Any = _ScaledGradient.apply(values, factor)
    return result


def all_sum(values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, in place. No gradient."""
    dist.all_reduce(values, group=group)
    return values


def wait_for_all() -> None:
    """Returns when every rank has come here. Over gloo: there need not be one device for each."""
    dist.all_reduce(torch.zeros(()))


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    if len(rows) == count:
        return rows.contiguous()
    buffer = rows.new_zeros(count, *rows.shape[1:])
    buffer[: len(rows)] = rows
    return buffer


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: tuple[int, ...], group: ProcessGroup, summed: bool
    ) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.summed = sizes, group, summed
        most = max(sizes)
        every = rows.new_empty(len(sizes) * most, *rows.shape[1:])
        _all_gather(every, _padded(rows, most), group=group)
        if min(sizes) == most:
            return every
        return torch.cat([every[r * most : r * most + n] for r, n in enumerate(sizes)])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        own = dist.get_rank(ctx.group)
        parts = gradient.split(ctx.sizes)
        if not ctx.summed:
            return parts[own].contiguous(), None, None, None
        most = max(ctx.sizes)
        buffer = torch.cat([_padded(part, most) for part in parts])
        received = buffer.new_empty(most, *buffer.shape[1:])
        _reduce_scatter(received, buffer, group=ctx.group)
        return received[: ctx.sizes[own]], None, None, None


class _SharedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return all_sum(gradient.clone(memory_format=torch.contiguous_format), ctx.group), None


class _TradeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: ProcessGroup,
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _trade(rows, sent, received, group)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return _trade(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _trade(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup
) -> torch.Tensor:
    came = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent), group=group)
    return came


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None
