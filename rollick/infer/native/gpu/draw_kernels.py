"""Triton kernels that draw a token of each row and write down that it was drawn.

Two launches for all rows: the first goes once over the logits, a block of the vocabulary at a
time, and leaves out what lies below a row's floor; the second inverts the cumulative distribution
(which block, then which token of it), takes the log-prob, and moves the row on: its token, its
length, whether it goes on. draw.py has the same in plain torch. Imported only where Triton is
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
"""Tokens of the vocabulary that are summed together."""


@triton.jit
def uniform(stream, position):
    """philox.uniforms for one stream and position."""
    c0 = (position & 0xFFFFFFFF).to(tl.uint64)
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint64)
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = (stream & 0xFFFFFFFF).to(tl.uint64)
    k1 = ((stream >> 32) & 0xFFFFFFFF).to(tl.uint64)
    for _ in tl.static_range(10):
        product_0 = c0 * 0xD2511F53
        product_2 = c2 * 0xCD9E8D57
        c0 = (product_2 >> 32) ^ c1 ^ k0
        c1 = product_2 & 0xFFFFFFFF
        c2 = (product_0 >> 32) ^ c3 ^ k1
        c3 = product_0 & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    bits = ((c0 << 21) | (c1 >> 11)).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _sum_blocks(
    logits,
    temperature,
    floor,
    peaks,
    sums,
    vocabulary,
    FLOORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row.to(tl.int64) * vocabulary + token,
        mask=token < vocabulary,
        other=float("-inf"),
    )
    if FLOORS:
        x = tl.where(x >= tl.load(floor + row), x, float("-inf"))
    t = tl.load(temperature + row)
    x = x / tl.where(t == 0.0, 1.0, t)
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * blocks + block, peak)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _pick(
    logits,
    temperature,
    floor,
    peaks,
    sums,
    state,
    stops,
    drawn,
    logprobs,
    vocabulary,
    blocks,
    state_field,
    FLOORS: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    # The fields of draw.Field, in their order.
    length = tl.load(state + 1 * state_field + row)
    prompt = tl.load(state + 2 * state_field + row)
    limit = tl.load(state + 3 * state_field + row)
    stream = tl.load(state + 4 * state_field + row)
    active = tl.load(state + 5 * state_field + row)
    t = tl.load(temperature + row)

    b = tl.arange(0, BLOCKS_PAD)
    real = b < blocks
    peak = tl.load(peaks + row * blocks + b, mask=real, other=float("-inf"))
    highest = tl.max(peak, 0)
    share = tl.load(sums + row * blocks + b, mask=real, other=0.0)
    share = (share * tl.exp(peak - highest)).to(tl.float64)
    total = tl.sum(share, 0)
    goal = uniform(stream, length - prompt) * total
    passed = tl.sum((tl.cumsum(share, 0) <= goal).to(tl.int32), 0)
    block = tl.minimum(passed, tl.max(tl.where(share > 0, b, 0), 0))
    block = tl.where(t == 0.0, tl.argmax(peak, 0), block)

    before = tl.sum(tl.where(b < block, share, 0.0), 0)
    own = tl.sum(tl.where(b == block, share, 0.0), 0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row.to(tl.int64) * vocabulary + token,
        mask=token < vocabulary,
        other=float("-inf"),
    )
    if FLOORS:
        x = tl.where(x >= tl.load(floor + row), x, float("-inf"))
    x = x / tl.where(t == 0.0, 1.0, t)
    mass = tl.exp(x - highest).to(tl.float64)
    cumulative = tl.cumsum(mass, 0)
    rest = (goal - before) / own * tl.sum(mass, 0)
    nth = tl.sum((cumulative <= rest).to(tl.int32), 0)
    inside = tl.arange(0, BLOCK)
    nth = tl.minimum(nth, tl.max(tl.where(mass > 0, inside, 0), 0))
    nth = tl.where(t == 0.0, tl.argmax(x, 0), nth)
    chosen = block * BLOCK + nth
    logit = tl.sum(tl.where(inside == nth, x, 0.0), 0)
    logprob = (logit - highest) - tl.log(total.to(tl.float32))

    tl.store(drawn + row, chosen.to(tl.int32))
    tl.store(logprobs + row, logprob)
    ends = length + 1 >= limit
    for number in tl.static_range(STOPS):
        ends = ends | (chosen == tl.load(stops + number))
    if active != 0:
        tl.store(state + row, chosen.to(tl.int64))
        tl.store(state + 1 * state_field + row, length + 1)
        tl.store(state + 5 * state_field + row, tl.where(ends, 0, 1).to(tl.int64))


def launch_draw(
    logits_RV: Tensor,
    *,
    state: Tensor,
    temperature: Tensor,
    stops: Tensor,
    drawn: Tensor,
    logprobs: Tensor,
    floor: Tensor | None = None,
) -> None:
    """Draw for rows 0..R-1 and move them on; none draws a logit below its floor."""
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits_RV.device)
    sums = torch.empty_like(peaks)
    floors = temperature if floor is None else floor
    _sum_blocks[(rows, blocks)](
        logits_RV,
        temperature,
        floors,
        peaks,
        sums,
        vocabulary,
        FLOORS=floor is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _pick[(rows,)](
        logits_RV,
        temperature,
        floors,
        peaks,
        sums,
        state,
        stops,
        drawn,
        logprobs,
        vocabulary,
        blocks,
        state.stride(0),
        FLOORS=floor is not None,
        STOPS=len(stops),
        BLOCK=BLOCK,
        BLOCKS_PAD=max(2, triton.next_power_of_2(blocks)),
        num_warps=8,
    )
