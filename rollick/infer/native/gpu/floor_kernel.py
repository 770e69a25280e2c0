"""A Triton kernel that finds the least logit which top-k, top-p and min-p leave to each row.

No sort: a token is left if the tokens above it are fewer than k, or hold less than p of the mass;
both fall as the logit rises. So the floor is searched for between the lowest and the highest logit,
four parts at a time, over the integers in which float32 numbers are ordered: at most 16 passes over
the row, and the result is exactly one of its logits. draw.py has the same in plain torch. Imported
only where Triton is needed.
"""

# Triton's language has no types that a checker could follow, and Triton is not on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Tokens of the vocabulary that are looked at together."""


@triton.jit
def _ordered(x):
    """float32 to int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _above(row, vocabulary, peak, heat, low, part, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens (or mass) above the first, second and third of the parts that begin at `low`."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    third = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        key = _ordered(x).to(tl.int64)
        weight = tl.exp((x - peak) / heat)
        if COUNT:
            weight = weight * 0.0 + 1.0
        first += tl.where(key > low + part, weight, 0.0)
        second += tl.where(key > low + 2 * part, weight, 0.0)
        third += tl.where(key > low + 3 * part, weight, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _search(row, vocabulary, peak, heat, low, high, goal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The least key above which there is less than `goal`; `low` has as much, `high` has less."""
    while high - low > 1:
        part = tl.maximum((high - low) // 4, 1)
        a, b, c = _above(row, vocabulary, peak, heat, low, part, COUNT, BLOCK)
        enough = (a >= goal).to(tl.int64) + (b >= goal).to(tl.int64) + (c >= goal).to(tl.int64)
        high = tl.where(enough < 3, tl.minimum(high, low + part * (enough + 1)), high)
        low = low + part * enough
    return high


@triton.jit
def _floors(
    logits,
    top_k,
    shares,
    floor,
    vocabulary,
    share_field,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * vocabulary
    # The fields of draw.Share, in their order.
    heat = tl.load(shares + number)
    p = tl.load(shares + share_field + number)
    min_p = tl.load(shares + 2 * share_field + number)
    k = tl.load(top_k + number)

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        highest = tl.maximum(highest, x)
    peak = tl.max(highest, 0)
    high = _ordered(peak).to(tl.int64)
    # The key of -inf.
    nothing = high * 0 - 2139095041
    found = nothing
    if heat > 0:
        if (k > 0) & (k < vocabulary):
            goal = k.to(tl.float32)
            a, _, _ = _above(row, vocabulary, peak, heat, nothing, nothing * 0, True, BLOCK)
            if a >= goal:
                found = _search(row, vocabulary, peak, heat, nothing, high, goal, True, BLOCK)
        if p < 1:
            whole, _, _ = _above(row, vocabulary, peak, heat, found - 1, nothing * 0, False, BLOCK)
            goal = p * whole
            a, _, _ = _above(row, vocabulary, peak, heat, found, nothing * 0, False, BLOCK)
            if a >= goal:
                found = _search(row, vocabulary, peak, heat, found, high, goal, False, BLOCK)
        if min_p > 0:
            least = _ordered(peak + heat * tl.log(min_p)).to(tl.int64)
            found = tl.maximum(found, tl.minimum(least, high))
    key = found.to(tl.int32)
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    tl.store(floor + number, bits.to(tl.float32, bitcast=True))


def launch_floors(logits_RV: Tensor, *, top_k: Tensor, shares: Tensor) -> Tensor:
    """[R] float32; `shares` is [Share, R] of at least as many rows."""
    rows, vocabulary = logits_RV.shape
    floor = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    _floors[(rows,)](
        logits_RV,
        top_k,
        shares,
        floor,
        vocabulary,
        shares.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return floor
