"""Linear layers and norms that are batch-invariant: a row's bits do not depend on the batch.

A matmul gives a row slightly different bits in batches of different sizes, because the kernel
divides the work by shape. An engine computes one token of many sequences at a time, a learner all
tokens of a sequence; in bfloat16 a log-prob then differs by some hundredths. Here both sum in the
same order. Only the forward is batch-invariant.

On the CPU every linear layer computes in tiles of TILE_ROWS rows, the last one padded with zero
rows, so a row's bits depend only on that row and the weights. Element-wise kernels treat the last
few elements of an array differently (measured: silu), so packed rows should also be padded to full
tiles: see `round_up_to_tile`. A backward sums over the micro-batch; its bits repeat for the same
order of micro-batches and number of threads.

On a GPU both use the same kernels: linear layers and norms (this file), attention
(attention/batch_invariant.py) and the output head (head/logprobs.py). The rest is element-wise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollick.errors import ModelError

TILE_ROWS = 32
"""Rows per tile; the same for every thread count and batch size."""

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""rows [N, I], weight [O, I], bias [O] -> [N, O]."""


def use_batch_invariant_kernels(module: nn.Module) -> None:
    """Replace the forward of every linear layer (except the head) and norm of the module."""
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for part in module.modules():
        layer: Any = part
        if type(part) is nn.Linear and part is not head:
            layer.__class__ = BatchInvariantLinear
        elif type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            layer.__dict__["eps"] = float(layer.variance_epsilon)
            layer.__class__ = BatchInvariantNorm
        elif "Norm" in type(part).__name__ and type(part) is not BatchInvariantNorm:
            raise ModelError(
                f"infer.zero_mismatch has no kernel for the norm {type(part).__name__}",
                fix="set infer.zero_mismatch=false for this model",
            )


class BatchInvariantLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not input.is_cuda:
            return tiled_linear(input, self.weight, self.bias)
        matmul = partial(batch_invariant_matmul, dtype=input.dtype)
        return linear_with(matmul, input, self.weight, self.bias)


class BatchInvariantNorm(nn.Module):
    weight: nn.Parameter
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        reference = partial(reference_rms_norm, eps=self.eps)
        if not hidden_states.is_cuda:
            return reference(hidden_states, self.weight)
        from rollick.models.decoder.batch_invariant_kernels import launch_norm

        kernel = partial(launch_norm, eps=self.eps)
        return with_gradient_of(reference, kernel, hidden_states, self.weight)


def batch_invariant_matmul(
    rows_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """A linear layer on a GPU, without gradient."""
    from rollick.models.decoder.batch_invariant_kernels import launch_matmul

    return launch_matmul(rows_NI, weight_OI, bias_O, dtype=dtype)


def reference_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, rounded as in transformers."""
    upcast = hidden.float()
    normed = upcast * torch.rsqrt(upcast.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(hidden.dtype)


def with_gradient_of(
    reference: Callable[..., Tensor], kernel: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """The kernel's output with the gradient of `reference`, which the backward evaluates."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _WithGradientOf.apply(reference, kernel, *tensors)
    return kernel(*tensors)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, reference: Callable[..., Tensor], kernel: Callable[..., Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.reference = reference
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        needed = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in pairs]
        with torch.enable_grad():
            output = ctx.reference(*inputs)
        differentiated = [tensor for tensor in inputs if tensor.requires_grad]
        input_gradients = iter(torch.autograd.grad(output, differentiated, *gradients))
        return None, None, *(next(input_gradients) if needs else None for needs in needed)


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
    return linear_with(_tiled_matmul, input, weight, bias)


def linear_with(matmul: Matmul, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with `matmul` as its forward and the usual gradients."""
    rows = input.reshape(-1, input.shape[-1])
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (input, weight, bias) if tensor is not None
    )
    inputs = rows, weight, bias
    output: Any = _Linear.apply(*inputs, matmul) if needs_gradient else matmul(*inputs)
    return output.view(*input.shape[:-1], weight.shape[0])


def round_up_to_tile(count: int) -> int:
    """The next multiple of TILE_ROWS."""
    return -(-count // TILE_ROWS) * TILE_ROWS


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, matmul: Matmul
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return matmul(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            gradient @ weight if needs_input else None,
            gradient.t() @ rows if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
            None,
        )


def _tiled_matmul(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count = rows.shape[0]
    padded_rows = round_up_to_tile(count)
    if padded_rows != count:
        rows = torch.cat([rows, rows.new_zeros(padded_rows - count, rows.shape[1])])
    output = rows.new_empty(padded_rows, weight.shape[0])
    transposed = weight.t()
    for start in range(0, padded_rows, TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        if bias is None:
            torch.mm(rows[tile], transposed, out=output[tile])
        else:
            torch.addmm(bias, rows[tile], transposed, out=output[tile])
    return output[:count]
