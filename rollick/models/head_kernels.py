"""Triton kernels of the head: what a row of logits says, and its gradient, in one reading each.

Plain torch goes some ten times over the logits of a chunk (temperature, log-softmax, entropy,
gradient, rounding), and with a vocabulary of 150,000 that takes longer than their product.
head_fused.py is built on these; head.py has the same in plain torch. Imported only where Triton is
needed.
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
"""Tokens of the vocabulary that are read together."""


@triton.jit
def _read_rows(
    logits, temperature, ids, logprobs, entropies, logsums, vocabulary, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * vocabulary
    t = tl.load(temperature + row)
    # Each lane has a peak of its own; its sums are relative to it: of exp(x - peak), and of that
    # times (x - peak).
    peak = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        real = token < vocabulary
        x = tl.div_rn(tl.load(start_of_row + token, mask=real, other=0.0), t)
        above = tl.where(real, tl.maximum(peak, x), peak)
        fall = tl.exp(peak - above)
        moment = fall * (moment + total * (peak - above))
        share = tl.where(real, tl.exp(x - above), 0.0)
        moment += tl.where(real, share * (x - above), 0.0)
        total = fall * total + share
        peak = above
    top = tl.max(peak, 0)
    fall = tl.exp(peak - top)
    moment = tl.sum(fall * (moment + tl.where(total > 0, total * (peak - top), 0.0)), 0)
    total = tl.sum(fall * total, 0)
    logsum = top + tl.log(total)
    chosen = tl.div_rn(tl.load(start_of_row + tl.load(ids + row)), t)
    tl.store(logprobs + row, chosen - logsum)
    tl.store(entropies + row, tl.log(total) - moment / total)
    tl.store(logsums + row, logsum)


@triton.jit
def _write_gradient(
    logits,
    temperature,
    ids,
    logsums,
    chosen,
    by_entropy,
    entropies,
    gradient,
    vocabulary,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = token < vocabulary
    place = row.to(tl.int64) * vocabulary + token
    t = tl.load(temperature + row)
    given = tl.load(chosen + row)
    logprob = tl.div_rn(tl.load(logits + place, mask=real, other=0.0), t) - tl.load(logsums + row)
    factor = given
    if ENTROPY:
        factor += tl.load(by_entropy + row) * (logprob + tl.load(entropies + row))
    back = tl.where(token == tl.load(ids + row), given, 0.0) - tl.exp(logprob) * factor
    tl.store(gradient + place, tl.div_rn(back, t), mask=real)


def read_rows(logits_CV: Tensor, ids_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, ...]:
    """(log-prob of the row's token, entropy, log of the sum of exponentials), each [C] float32."""
    rows, vocabulary = logits_CV.shape
    found = [torch.empty(rows, device=logits_CV.device) for _ in range(3)]
    if rows:
        _read_rows[(rows,)](
            logits_CV, temperature_C, ids_C, *found, vocabulary, BLOCK=BLOCK, num_warps=8
        )
    return tuple(found)


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
    """Gradient [C, V] of the logits, before the temperature. `chosen_C` is the gradient of the
    log-probs of `ids_C`, `entropy` the (gradient, value) of the entropy."""
    rows, vocabulary = logits_CV.shape
    gradient_CV = torch.empty_like(logits_CV, dtype=dtype)
    by_entropy_C, entropy_C = entropy or (chosen_C, chosen_C)
    if rows:
        _write_gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
            logits_CV,
            temperature_C,
            ids_C,
            logsum_C,
            chosen_C,
            by_entropy_C,
            entropy_C,
            gradient_CV,
            vocabulary,
            ENTROPY=entropy is not None,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return gradient_CV
