"""Log-probs and entropy of tokens on a GPU, with kernels that read the logits once.

torch reads the logits of a chunk about ten times (temperature, log-softmax, entropy, gradient,
rounding), which takes longer than the matmul that computes them, for a vocabulary of 150,000. Here
one matmul computes a chunk's logits, one kernel reads them for log-probs and entropy, and another
for their gradient, which is written in the dtype of the model. The backward reuses the logits of
the last chunk. logprobs.py has a reference in torch. Imported only where Triton is needed.

Legend: T rows, D hidden size, V vocabulary, C rows of a chunk.
"""

# pyright cannot type-check Triton kernels, and Triton is not installed on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollick.models.head.logprobs import ChunkOptions, OutputHead, head_logits, multiply_by_slope

BLOCK = 4096
"""Vocabulary entries per tile."""


@triton.jit
def _read_rows(
    logits, temperature, ids, logprobs, entropies, logsums, vocabulary, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * vocabulary
    t = tl.load(temperature + row)
    # Online softmax per lane: total sums exp(x - peak), moment sums (x - peak) exp(x - peak).
    peak = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        valid = token < vocabulary
        x = tl.div_rn(tl.load(start_of_row + token, mask=valid, other=0.0), t)
        new_peak = tl.where(valid, tl.maximum(peak, x), peak)
        rescale = tl.exp(peak - new_peak)
        moment = rescale * (moment + total * (peak - new_peak))
        weight = tl.where(valid, tl.exp(x - new_peak), 0.0)
        moment += tl.where(valid, weight * (x - new_peak), 0.0)
        total = rescale * total + weight
        peak = new_peak
    row_peak = tl.max(peak, 0)
    rescale = tl.exp(peak - row_peak)
    moment = tl.sum(rescale * (moment + tl.where(total > 0, total * (peak - row_peak), 0.0)), 0)
    total = tl.sum(rescale * total, 0)
    logsum = row_peak + tl.log(total)
    chosen = tl.div_rn(tl.load(start_of_row + tl.load(ids + row)), t)
    tl.store(logprobs + row, chosen - logsum)
    tl.store(entropies + row, tl.log(total) - moment / total)
    tl.store(logsums + row, logsum)


@triton.jit
def _write_gradient(
    logits, temperature, ids, logsums, logprob_grads, entropy_grads, entropies, gradient,
    vocabulary, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = token < vocabulary
    index = row.to(tl.int64) * vocabulary + token
    t = tl.load(temperature + row)
    grad_logprob = tl.load(logprob_grads + row)
    logprob = tl.div_rn(tl.load(logits + index, mask=valid, other=0.0), t) - tl.load(logsums + row)
    factor = grad_logprob
    if ENTROPY:
        factor += tl.load(entropy_grads + row) * (logprob + tl.load(entropies + row))
    grad_logit = tl.where(token == tl.load(ids + row), grad_logprob, 0.0) - tl.exp(logprob) * factor
    tl.store(gradient + index, tl.div_rn(grad_logit, t), mask=valid)


def read_rows(logits_CV: Tensor, ids_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, ...]:
    """(log-prob of the row's token, entropy, log of the sum of exponentials), each [C] float32."""
    rows, vocabulary = logits_CV.shape
    outputs = [torch.empty(rows, device=logits_CV.device) for _ in range(3)]
    if rows:
        _read_rows[(rows,)](
            logits_CV, temperature_C, ids_C, *outputs, vocabulary, BLOCK=BLOCK, num_warps=8
        )
    return tuple(outputs)


def logit_gradient(
    logits_CV: Tensor,
    ids_C: Tensor,
    temperature_C: Tensor,
    *,
    logsum_C: Tensor,
    logprob_grad_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [C, V] with respect to the raw logits (before the division by the temperature).
    `logprob_grad_C`: gradient of the log-probs of `ids_C`. `entropy`: its (gradient, value)."""
    rows, vocabulary = logits_CV.shape
    gradient_CV = torch.empty_like(logits_CV, dtype=dtype)
    entropy_grad_C, entropy_C = entropy or (logprob_grad_C, logprob_grad_C)
    if rows:
        _write_gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
            *(logits_CV, temperature_C, ids_C, logsum_C, logprob_grad_C),
            *(entropy_grad_C, entropy_C, gradient_CV, vocabulary),
            ENTROPY=entropy is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return gradient_CV


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
        logprob_grad_T, entropy_grad_T = gradients
        hidden_TD, weight_VD, bias_V, ids_T, temperature_T, entropy_T, logsum_T = ctx.saved_tensors
        head = OutputHead(weight_VD, bias_V, ctx.options.scale, ctx.options.softcap)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        logprob_grad_T = (
            torch.zeros_like(logsum_T) if logprob_grad_T is None else logprob_grad_T.float()
        )
        hidden_grad = torch.empty_like(hidden_TD) if needs_hidden else None
        weight_grad = bias_grad = None
        starts = range(0, len(ids_T), ctx.options.chunk)
        # Summed over chunks in float32, so that the result hardly depends on the chunk size.
        sum_dtype = torch.float32 if len(starts) > 1 else weight_VD.dtype
        for start in reversed(starts):
            rows = slice(start, start + ctx.options.chunk)
            logits_CV = ctx.kept.pop(start, None)
            if logits_CV is None:
                logits_CV = head_logits(hidden_TD[rows], head)
            entropy = None
            if entropy_grad_T is not None:
                entropy = entropy_grad_T[rows].float().contiguous(), entropy_T[rows]
            grad_CV = logit_gradient(
                logits_CV,
                ids_T[rows],
                temperature_T[rows],
                logsum_C=logsum_T[rows],
                logprob_grad_C=logprob_grad_T[rows].contiguous(),
                entropy=entropy,
                dtype=hidden_TD.dtype,
            )
            grad_CV = multiply_by_slope(grad_CV, head.slope(logits_CV))
            del logits_CV
            if hidden_grad is not None:
                hidden_grad[rows] = grad_CV @ weight_VD
            if needs_weight:
                part = (grad_CV.t() @ hidden_TD[rows]).to(sum_dtype)
                weight_grad = part if weight_grad is None else weight_grad.add_(part)
            if needs_bias:
                part = grad_CV.sum(0, dtype=torch.float32)
                bias_grad = part if bias_grad is None else bias_grad.add_(part)
        if not starts:
            weight_grad = torch.zeros_like(weight_VD) if needs_weight else None
            bias_grad = torch.zeros_like(bias_V) if needs_bias else None
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias_V.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None
