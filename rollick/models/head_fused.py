"""Log-probs and entropy of drawn tokens on a GPU, with kernels that read the logits once.

The same as head.token_logprobs, which calls this where it can: a chunk's logits are made by the
product, read once for log-probs and entropy, and once more for their gradient, which is written
in the dtype of the model. Logits of the last chunk are kept for the backward.

Legend: T rows, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollick.models.head_kernels import logit_gradient, read_rows


def fused_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    temperature_T: Tensor,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), both [T] float32, differentiable."""
    result: Any = _FusedLogprobs.apply(
        hidden_TD, weight_VD, bias_V, targets_T, temperature_T.float(), chunk
    )
    return result


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        ids_T: Tensor,
        temperature_T: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        from rollick.models.head import head_logits

        logprobs_T, entropy_T, logsum_T = (
            torch.empty(len(ids_T), device=hidden_TD.device) for _ in range(3)
        )
        ctx.kept = {}
        for start in range(0, len(ids_T), chunk):
            rows = slice(start, start + chunk)
            logits_CV = head_logits(hidden_TD[rows], weight_VD, bias_V)
            logprobs_T[rows], entropy_T[rows], logsum_T[rows] = read_rows(
                logits_CV, ids_T[rows], temperature_T[rows]
            )
            if rows.stop >= len(ids_T) and any(ctx.needs_input_grad):
                ctx.kept[start] = logits_CV
        ctx.save_for_backward(
            hidden_TD, weight_VD, bias_V, ids_T, temperature_T, entropy_T, logsum_T
        )
        ctx.chunk = chunk
        # An entropy that nobody uses then has the gradient None, not zeros to be worked on.
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, chosen_T: Tensor | None, by_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from rollick.models.head import head_logits

        hidden_TD, weight_VD, bias_V, ids_T, temperature_T, entropy_T, logsum_T = ctx.saved_tensors
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        chosen_T = torch.zeros_like(logsum_T) if chosen_T is None else chosen_T.float()
        hidden_grad = torch.empty_like(hidden_TD) if for_hidden else None
        weight_grad: Tensor | None = None
        bias_grad: Tensor | None = None
        starts = range(0, len(ids_T), ctx.chunk)
        # Summed over chunks in float32, so that the chunk size does not show in low precision.
        sums = torch.float32 if len(starts) > 1 else weight_VD.dtype
        for start in reversed(starts):
            rows = slice(start, start + ctx.chunk)
            logits_CV = ctx.kept.pop(start, None)
            if logits_CV is None:
                logits_CV = head_logits(hidden_TD[rows], weight_VD, bias_V)
            entropy = None
            if by_entropy_T is not None:
                entropy = by_entropy_T[rows].float().contiguous(), entropy_T[rows]
            narrow_CV = logit_gradient(
                logits_CV,
                ids_T[rows],
                temperature_T[rows],
                logsum_C=logsum_T[rows],
                chosen_C=chosen_T[rows].contiguous(),
                entropy=entropy,
                dtype=hidden_TD.dtype,
            )
            del logits_CV
            if hidden_grad is not None:
                hidden_grad[rows] = narrow_CV @ weight_VD
            if for_weight:
                part = (narrow_CV.t() @ hidden_TD[rows]).to(sums)
                weight_grad = part if weight_grad is None else weight_grad.add_(part)
            if for_bias:
                part = narrow_CV.sum(0, dtype=torch.float32)
                bias_grad = part if bias_grad is None else bias_grad.add_(part)
        if for_weight:
            weight_grad = torch.zeros_like(weight_VD) if weight_grad is None else weight_grad
            weight_grad = weight_grad.to(weight_VD.dtype)
        if bias_V is not None and for_bias:
            bias_grad = torch.zeros_like(bias_V) if bias_grad is None else bias_grad
            bias_grad = bias_grad.to(bias_V.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None
