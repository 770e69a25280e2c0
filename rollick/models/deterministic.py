"""Results that do not depend on the neighbours in a batch, bit for bit.

A matrix product gives a row slightly different bits in batches of different height, because the
kernel cuts the work by the shape. Here every linear layer works on tiles of one constant height,
the last one filled up with zero rows: a row's bits then follow from the row and the weights
alone. Element-wise kernels treat the last few numbers of an array in another way than the rest
(measured: silu), so packed rows should also be filled up to whole tiles: see `padded_rows`.

Only the forward is tiled. A backward is a sum over the whole micro-batch in any case; it repeats
bit for bit when micro-batches are made in one order and the number of threads is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS = 32
"""Height of a tile. Every thread count and batch uses the same one."""


def tile_linears(module: nn.Module, rows: int = ROWS) -> None:
    """Make every nn.Linear inside (and `module` itself) compute in tiles, in place.

    Names, parameters and their storage stay as they are.
    """
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = TiledLinear
            part.rows = rows  # pyright: ignore[reportArgumentType]


class TiledLinear(nn.Linear):
    """nn.Linear whose rows do not depend on each other; made by `tile_linears`."""

    rows: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return tiled_linear(input, self.weight, self.bias, rows=self.rows)


def tiled_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rows: int = ROWS,
) -> torch.Tensor:
    """input [..., I] times weight [O, I] transposed, plus bias; differentiable."""
    flat = input.reshape(-1, input.shape[-1])
    needs_gradient = torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    output = (
        _TiledProduct.apply(flat, weight, bias, rows)
        if needs_gradient
        else _product(flat, weight, bias, rows)
    )
    return output.view(*input.shape[:-1], weight.shape[0])


def padded_rows(count: int, rows: int = ROWS) -> int:
    """The next multiple of `rows`: how many rows to compute for `count` that are wanted."""
    return -(-count // rows) * rows


def deterministic_threads(count: int = 1) -> None:
    """Fix the number of CPU threads. With more than one, results repeat for equal batches, but
    element-wise kernels cut the work by the batch's size, so neighbours can show in the bits."""
    torch.set_num_threads(count)


class _TiledProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(flat, weight)
        return _product(flat, weight, bias, rows)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        for_input, for_weight, for_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if for_input else None,
            gradient.t() @ flat if for_weight else None,
            gradient.sum(0) if for_bias else None,
            None,
        )


def _product(
    flat: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> torch.Tensor:
    count = flat.shape[0]
    height = padded_rows(count, rows)
    if height != count:
        flat = torch.cat([flat, flat.new_zeros(height - count, flat.shape[1])])
    output = flat.new_empty(height, weight.shape[0])
    transposed = weight.t()
    for start in range(0, height, rows):
        tile = slice(start, start + rows)
        if bias is None:
            torch.mm(flat[tile], transposed, out=output[tile])
        else:
            torch.addmm(bias, flat[tile], transposed, out=output[tile])
    return output[:count]
