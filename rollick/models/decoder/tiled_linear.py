"""Batch-invariant linear layers on the CPU: a row's result is bitwise independent of the batch.

A matrix product gives a row slightly different bits in batches of different sizes, because the
kernel divides the work by shape. Here every linear layer computes in tiles of TILE_ROWS rows,
the last one padded with zero rows, so a row's bits depend only on that row and the weights.
Element-wise kernels treat the last few elements of an array differently (measured: silu), so packed
rows should also be padded to full tiles: see `round_up_to_tile`.

Only the forward is tiled. A backward sums over the micro-batch anyway; it repeats bit for bit if
micro-batches come in the same order with the same number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TILE_ROWS = 32
"""Rows per tile; the same for every thread count and batch size."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""rows [N, I], weight [O, I], bias [O] -> [N, O]."""


def tile_linears(module: nn.Module) -> None:
    """Convert every nn.Linear in `module` (and itself) to TiledLinear; parameters stay."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = TiledLinear


class TiledLinear(nn.Linear):
    """Batch-invariant nn.Linear; created by `tile_linears`."""

    def forward(self, input: Tensor) -> Tensor:
        return tiled_linear(input, self.weight, self.bias)


def tiled_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., I] times weight [O, I] transposed, plus bias; differentiable."""
    return linear_with(_tiled_product, input, weight, bias)


def linear_with(product: Product, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with `product` as its forward and the usual gradients."""
    rows = input.reshape(-1, input.shape[-1])
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (input, weight, bias) if tensor is not None
    )
    inputs = rows, weight, bias
    output: Any = _Linear.apply(*inputs, product) if needs_gradient else product(*inputs)
    return output.view(*input.shape[:-1], weight.shape[0])


def round_up_to_tile(count: int) -> int:
    """The next multiple of TILE_ROWS."""
    return -(-count // TILE_ROWS) * TILE_ROWS


def deterministic_threads(count: int = 1) -> None:
    """Set the number of CPU threads. With more than one, results repeat only for equal batches:
    element-wise kernels divide the work by the batch's size, which can change a row's bits."""
    torch.set_num_threads(count)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, product: Product
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        for_input, for_weight, for_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if for_input else None,
            gradient.t() @ rows if for_weight else None,
            gradient.sum(0) if for_bias else None,
            None,
        )


def _tiled_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count = rows.shape[0]
    height = round_up_to_tile(count)
    if height != count:
        rows = torch.cat([rows, rows.new_zeros(height - count, rows.shape[1])])
    output = rows.new_empty(height, weight.shape[0])
    transposed = weight.t()
    for start in range(0, height, TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        if bias is None:
            torch.mm(rows[tile], transposed, out=output[tile])
        else:
            torch.addmm(bias, rows[tile], transposed, out=output[tile])
    return output[:count]
