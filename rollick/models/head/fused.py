"""Log-probs and entropy of given tokens on a GPU, with kernels that read the logits once.

A chunk's logits are computed by one product, read once for log-probs and entropy, and once more for
their gradient, which is written in the dtype of the model. Logits of the last chunk are kept for
the backward.

Legend: T rows, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollick.models.head.kernels import logit_gradient, read_rows
from rollick.models.head.logprobs import ChunkOptions, OutputHead, head_logits, times_slope


class FusedLogprobs(torch.autograd.Function):
    """(log-prob of each id, entropy of its distribution), both [T] float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        ids_T: Tensor,
        temperature_T: Tensor,
        options: ChunkOptions,
    ) -> tuple[Tensor, Tensor]:
        chunk = options.chunk
        head = OutputHead(weight_VD, bias_V, options.scale, options.softcap)
        logprobs_T, entropy_T, logsum_T = (
            torch.empty(len(ids_T), device=hidden_TD.device) for _ in range(3)
        )
        ctx.kept = {}
        for start in range(0, len(ids_T), chunk):
            rows = slice(start, start + chunk)
            logits_CV = head_logits(hidden_TD[rows], head)
            logprobs_T[rows], entropy_T[rows], logsum_T[rows] = read_rows(
                logits_CV, ids_T[rows], temperature_T[rows]
            )
            if rows.stop >= len(ids_T) and any(ctx.needs_input_grad):
                ctx.kept[start] = logits_CV
        inputs = hidden_TD, weight_VD, bias_V, ids_T, temperature_T
        ctx.save_for_backward(*inputs, entropy_T, logsum_T)
        ctx.options = options
        # An unused entropy then has the gradient None instead of zeros.
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        chosen_T, by_entropy_T = gradients
        hidden_TD, weight_VD, bias_V, ids_T, temperature_T, entropy_T, logsum_T = ctx.saved_tensors
        head = OutputHead(weight_VD, bias_V, ctx.options.scale, ctx.options.softcap)
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        chosen_T = torch.zeros_like(logsum_T) if chosen_T is None else chosen_T.float()
        hidden_grad = torch.empty_like(hidden_TD) if for_hidden else None
        weight_grad = bias_grad = None
        starts = range(0, len(ids_T), ctx.options.chunk)
        # Summed over chunks in float32, so that the result hardly depends on the chunk size.
        sums = torch.float32 if len(starts) > 1 else weight_VD.dtype
        for start in reversed(starts):
            rows = slice(start, start + ctx.options.chunk)
            logits_CV = ctx.kept.pop(start, None)
            if logits_CV is None:
                logits_CV = head_logits(hidden_TD[rows], head)
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
            narrow_CV = times_slope(narrow_CV, head.slope(logits_CV))
            del logits_CV
            if hidden_grad is not None:
                hidden_grad[rows] = narrow_CV @ weight_VD
            if for_weight:
                part = (narrow_CV.t() @ hidden_TD[rows]).to(sums)
                weight_grad = part if weight_grad is None else weight_grad.add_(part)
            if for_bias:
                part = narrow_CV.sum(0, dtype=torch.float32)
                bias_grad = part if bias_grad is None else bias_grad.add_(part)
        if not starts:
            weight_grad = torch.zeros_like(weight_VD) if for_weight else None
            bias_grad = torch.zeros_like(bias_V) if for_bias else None
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias_V.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None
