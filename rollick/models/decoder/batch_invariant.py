"""One arithmetic for engine and learner, so that their log-probs agree on a GPU.

An engine computes one token of many sequences at a time, a learner all tokens of a sequence. The
library's kernels divide the work by shape and give a token slightly different bits in each; in
bfloat16 a log-prob then differs by some hundredths. Here both use the same batch-invariant kernels:
linear layers and norms (this file), attention (attention/batch_invariant.py) and the output head
(head/logprobs.py). The rest is element-wise. Only the forward is batch-invariant. Without a GPU the
tiles of tiled_linear.py replace the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollick.errors import ModelError
from rollick.models.decoder.tiled_linear import linear_with, tiled_linear


def use_batch_invariant_kernels(module: nn.Module) -> None:
    """Replace the forward of every linear layer (except the head) and norm inside, in place."""
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for part in module.modules():
        anything: Any = part
        if type(part) is nn.Linear and part is not head:
            anything.__class__ = BatchInvariantLinear
        elif type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            anything.__dict__["eps"] = float(anything.variance_epsilon)
            anything.__class__ = BatchInvariantNorm
        elif "Norm" in type(part).__name__ and type(part) is not BatchInvariantNorm:
            raise ModelError(
                f"infer.zero_mismatch has no kernel for the norm {type(part).__name__}",
                fix="set infer.zero_mismatch=false for this model",
            )


class BatchInvariantLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not input.is_cuda:
            return tiled_linear(input, self.weight, self.bias)
        product = partial(batch_invariant_product, dtype=input.dtype)
        return linear_with(product, input, self.weight, self.bias)


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


def batch_invariant_product(
    rows_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """The product on a GPU, without a gradient."""
    from rollick.models.decoder.batch_invariant_kernels import launch_product

    return launch_product(rows_NI, weight_OI, bias_O, dtype=dtype)


def reference_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A root-mean-square norm, rounded as in transformers."""
    wide = hidden.float()
    narrow = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * narrow.to(hidden.dtype)


def with_gradient_of(
    reference: Callable[..., Tensor], kernel: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """The kernel's value with the gradient of `reference`, which is evaluated in the backward."""
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
        differentiable = [tensor for tensor in inputs if tensor.requires_grad]
        input_gradients = iter(torch.autograd.grad(output, differentiable, *gradients))
        return None, None, *(next(input_gradients) if needs else None for needs in needed)
