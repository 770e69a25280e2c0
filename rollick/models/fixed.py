"""One arithmetic for engine and learner, so that their log-probs agree on a GPU.

An engine computes one token of many sequences at a time, a learner whole sequences: the library's
kernels cut the work by the shape, and give a token slightly different bits in each. In bfloat16
that is a difference of some hundredths in a log-prob. Here both use the same kernels, whose result
for a row depends on nothing but the row: linear layers, norms (this file), attention
(fixed_attention.py) and the output head (head.py, `tiled`). What is left is element-wise.

    fix_arithmetic(module)    of the engine, and of the learner: parameters stay as they are

Only the forward is fixed; the backward is the library's. Where there is no GPU the tiles of
deterministic.py take the kernels' place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollick.errors import ModelError
from rollick.models.deterministic import tiled_linear


def fix_arithmetic(module: nn.Module) -> None:
    """Make every linear layer and norm inside compute with the kernels of this mode, in place."""
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for part in module.modules():
        anything: Any = part
        if type(part) is nn.Linear and part is not head:
            anything.__class__ = FixedLinear
        elif type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            anything.__dict__["eps"] = float(anything.variance_epsilon)
            anything.__class__ = FixedNorm
        elif "Norm" in type(part).__name__ and type(part) is not FixedNorm:
            raise ModelError(
                f"infer.zero_mismatch has no kernel for the norm {type(part).__name__}",
                fix="set infer.zero_mismatch=false for this model",
            )


class FixedLinear(nn.Linear):
    """nn.Linear whose rows do not depend on each other; made by `fix_arithmetic`."""

    def forward(self, input: Tensor) -> Tensor:
        return fixed_linear(input, self.weight, self.bias)


class FixedNorm(nn.Module):
    """A root-mean-square norm; made by `fix_arithmetic`."""

    weight: nn.Parameter
    eps: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return fixed_norm(hidden_states, self.weight, eps=self.eps)


def fixed_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., I] times weight [O, I] transposed, plus bias; differentiable."""
    if not input.is_cuda:
        return tiled_linear(input, weight, bias)
    flat = input.reshape(-1, input.shape[-1])
    if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
        flat = _FixedProduct.apply(flat, weight, bias)
    else:
        flat = fixed_product(flat, weight, bias, dtype=flat.dtype)
    return flat.view(*input.shape[:-1], weight.shape[0])


def fixed_product(
    flat_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """The product alone, on a GPU, without a gradient."""
    from rollick.models.fixed_kernels import launch_product

    return launch_product(flat_NI, weight_OI, bias_O, dtype=dtype)


def fixed_norm(hidden: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Differentiable; the gradient is that of the plain formula."""
    if not hidden.is_cuda:
        return plain_norm(hidden, weight, eps)
    from rollick.models.fixed_kernels import launch_norm

    return through(partial(launch_norm, eps=eps), partial(plain_norm, eps=eps), hidden, weight)


def plain_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    narrow = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * narrow.to(hidden.dtype)


def through(
    kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """The kernel's value, with the gradient of `plain`, which is computed anew backward."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Through.apply(kernel, plain, *tensors)
    return kernel(*tensors)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Tensor], plain: Callable[..., Tensor], *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.plain = plain
        return kernel(*tensors)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        given = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.plain(*given)
        asked = [tensor for tensor, needs in zip(given, wanted, strict=True) if needs]
        found = iter(torch.autograd.grad(output, asked, gradient))
        return None, None, *(next(found) if needs else None for needs in wanted)


class _FixedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(flat, weight)
        return fixed_product(flat, weight, bias, dtype=flat.dtype)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        flat, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        return (
            gradient @ weight if for_input else None,
            gradient.t() @ flat if for_weight else None,
            gradient.sum(0) if for_bias else None,
        )
