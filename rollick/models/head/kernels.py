"""Triton kernels of the head: log-probs, entropy and gradient of a row of logits, each in one pass.

torch reads the logits of a chunk about ten times (temperature, log-softmax, entropy, gradient,
rounding), which takes longer than their product with a vocabulary of 150,000. fused.py uses these
kernels; logprobs.py has a reference in torch. Imported only where Triton is needed.
"""

# Triton's language has no types that a checker could follow, and Triton is not on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    top = tl.max(peak, 0)
    rescale = tl.exp(peak - top)
    moment = tl.sum(rescale * (moment + tl.where(total > 0, total * (peak - top), 0.0)), 0)
    total = tl.sum(rescale * total, 0)
    logsum = top + tl.log(total)
    chosen = tl.div_rn(tl.load(start_of_row + tl.load(ids + row)), t)
    tl.store(logprobs + row, chosen - logsum)
    tl.store(entropies + row, tl.log(total) - moment / total)
    tl.store(logsums + row, logsum)


@triton.jit
def _write_gradient(
    logits, temperature, ids, logsums, chosen, by_entropy, entropies, gradient, vocabulary,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = token < vocabulary
    index = row.to(tl.int64) * vocabulary + token
    t = tl.load(temperature + row)
    grad_logprob = tl.load(chosen + row)
    logprob = tl.div_rn(tl.load(logits + index, mask=valid, other=0.0), t) - tl.load(logsums + row)
    factor = grad_logprob
    if ENTROPY:
        factor += tl.load(by_entropy + row) * (logprob + tl.load(entropies + row))
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
    chosen_C: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [C, V] with respect to the raw logits (before the division by the temperature).
    `chosen_C`: gradient of the log-probs of `ids_C`. `entropy`: its (gradient, value)."""
    rows, vocabulary = logits_CV.shape
    gradient_CV = torch.empty_like(logits_CV, dtype=dtype)
    by_entropy_C, entropy_C = entropy or (chosen_C, chosen_C)
    if rows:
        _write_gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
            *(logits_CV, temperature_C, ids_C, logsum_C, chosen_C),
            *(by_entropy_C, entropy_C, gradient_CV, vocabulary),
            ENTROPY=entropy is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return gradient_CV
