"""Triton kernels that sample on the device. device_sampler.py has a reference in torch.

Sampling takes two launches for all rows. The first passes over the logits once, a block of the
vocabulary at a time, and ignores logits below the row's floor. The second inverts the cumulative
distribution (first the block, then the token in it), takes the log-prob, and advances the row.

The floor is the lowest logit that top-k, top-p and min-p keep. It is found without a sort: the
number and the mass of the tokens above a logit fall as the logit rises. The search divides the
range of logits into four parts at a time, over integers that are ordered like float32 numbers: at
most 16 passes over the row.

Imported only where Triton is used.
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
"""Tokens of the vocabulary that are read at once."""


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
def _load_scaled(
    logits, temperature, floor, row, block, vocabulary, FLOORS: tl.constexpr, BLOCK: tl.constexpr
):
    """A block of the row's logits, divided by the temperature; -inf below the floor."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(
        logits + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf")
    )
    if FLOORS:
        x = tl.where(x >= tl.load(floor + row), x, float("-inf"))
    t = tl.load(temperature + row)
    return x / tl.where(t == 0.0, 1.0, t)


@triton.jit
def _sum_blocks(
    logits, temperature, floor, peaks, sums, vocabulary, FLOORS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    x = _load_scaled(logits, temperature, floor, row, block, vocabulary, FLOORS, BLOCK)
    peak = tl.max(x, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + row * blocks + block, peak)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(x - base), 0))


@triton.jit
def _choose_block(peaks, sums, row, blocks, uniform_number, greedy, BLOCKS_PAD: tl.constexpr):
    """The block of the sampled token, how far into its mass (0 to 1) the token is, the highest
    logit, and the mass of all blocks."""
    b = tl.arange(0, BLOCKS_PAD)
    valid = b < blocks
    peak = tl.load(peaks + row * blocks + b, mask=valid, other=float("-inf"))
    highest = tl.max(peak, 0)
    mass = tl.load(sums + row * blocks + b, mask=valid, other=0.0)
    mass = (mass * tl.exp(peak - highest)).to(tl.float64)
    total = tl.sum(mass, 0)
    target = uniform_number * total
    passed = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    block = tl.minimum(passed, tl.max(tl.where(mass > 0, b, 0), 0))
    block = tl.where(greedy, tl.argmax(peak, 0), block)
    before = tl.sum(tl.where(b < block, mass, 0.0), 0)
    block_mass = tl.sum(tl.where(b == block, mass, 0.0), 0)
    return block, (target - before) / block_mass, highest, total


@triton.jit
def _choose_token(x, highest, fraction, greedy, BLOCK: tl.constexpr):
    """The position in the block at which the cumulative mass passes `fraction`, and its logit."""
    mass = tl.exp(x - highest).to(tl.float64)
    target = fraction * tl.sum(mass, 0)
    position = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    index = tl.arange(0, BLOCK)
    position = tl.minimum(position, tl.max(tl.where(mass > 0, index, 0), 0))
    position = tl.where(greedy, tl.argmax(x, 0), position)
    return position, tl.sum(tl.where(index == position, x, 0.0), 0)


@triton.jit
def _sample(
    logits,
    temperature,
    floor,
    peaks,
    sums,
    state,
    stop_ids,
    sampled,
    logprobs,
    vocabulary,
    blocks,
    stride,
    FLOORS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    # In the order of device_sampler.StateField.
    length = tl.load(state + 1 * stride + row)
    prompt = tl.load(state + 2 * stride + row)
    limit = tl.load(state + 3 * stride + row)
    stream = tl.load(state + 4 * stride + row)
    active = tl.load(state + 5 * stride + row)
    greedy = tl.load(temperature + row) == 0.0

    uniform_number = uniform(stream, length - prompt)
    block, fraction, highest, total = _choose_block(
        peaks, sums, row, blocks, uniform_number, greedy, BLOCKS_PAD
    )
    x = _load_scaled(logits, temperature, floor, row, block, vocabulary, FLOORS, BLOCK)
    position, logit = _choose_token(x, highest, fraction, greedy, BLOCK)
    token = block * BLOCK + position
    tl.store(sampled + row, token.to(tl.int32))
    tl.store(logprobs + row, (logit - highest) - tl.log(total.to(tl.float32)))

    ends = length + 1 >= limit
    for index in tl.static_range(STOP_IDS):
        ends = ends | (token == tl.load(stop_ids + index))
    if active != 0:
        tl.store(state + row, token.to(tl.int64))
        tl.store(state + 1 * stride + row, length + 1)
        tl.store(state + 5 * stride + row, tl.where(ends, 0, 1).to(tl.int64))


def launch_sampling(
    logits_RV: Tensor,
    *,
    state: Tensor,
    temperature: Tensor,
    stop_ids: Tensor,
    sampled: Tensor,
    logprobs: Tensor,
    floor: Tensor | None = None,
) -> None:
    """Sample for rows 0..R-1, from logits at or above `floor`, and advance the rows."""
    rows, vocabulary = logits_RV.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits_RV.device)
    sums = torch.empty_like(peaks)
    inputs = logits_RV, temperature, temperature if floor is None else floor, peaks, sums
    options = {"FLOORS": floor is not None, "BLOCK": BLOCK, "num_warps": 8}
    _sum_blocks[(rows, blocks)](*inputs, vocabulary, **options)
    _sample[(rows,)](
        *inputs,
        state,
        stop_ids,
        sampled,
        logprobs,
        vocabulary,
        blocks,
        state.stride(0),
        STOP_IDS=len(stop_ids),
        BLOCKS_PAD=max(2, triton.next_power_of_2(blocks)),
        **options,
    )


@triton.jit
def _ordered_key(x):
    """An int32 key of a float32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _sum_above(row, vocabulary, peak, t, low, part, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Mass, or number (COUNT), of the tokens above low + part, low + 2 part, low + 3 part."""
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    third = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        key = _ordered_key(x).to(tl.int64)
        weight = tl.exp((x - peak) / t)
        if COUNT:
            weight = weight * 0.0 + 1.0
        first += tl.where(key > low + part, weight, 0.0)
        second += tl.where(key > low + 2 * part, weight, 0.0)
        third += tl.where(key > low + 3 * part, weight, 0.0)
    return tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _search(row, vocabulary, peak, t, low, high, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key from `low` to `high` with less than `target` above it."""
    above, _, _ = _sum_above(row, vocabulary, peak, t, low, low * 0, COUNT, BLOCK)
    if above < target:
        high = low
    while high - low > 1:
        part = tl.maximum((high - low) // 4, 1)
        a, b, c = _sum_above(row, vocabulary, peak, t, low, part, COUNT, BLOCK)
        parts = (a >= target).to(tl.int64) + (b >= target).to(tl.int64) + (c >= target).to(tl.int64)
        high = tl.where(parts < 3, tl.minimum(high, low + part * (parts + 1)), high)
        low = low + part * parts
    return high


@triton.jit
def _row_peak(row, vocabulary, BLOCK: tl.constexpr):
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocabulary, other=float("-inf"))
        highest = tl.maximum(highest, x)
    return tl.max(highest, 0)


@triton.jit
def _logit_floors(logits, top_k, sampling, floor, vocabulary, stride, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * vocabulary
    # In the order of device_sampler.SamplingField.
    t = tl.load(sampling + number)
    p = tl.load(sampling + stride + number)
    min_p = tl.load(sampling + 2 * stride + number)
    k = tl.load(top_k + number)

    peak = _row_peak(row, vocabulary, BLOCK)
    high = _ordered_key(peak).to(tl.int64)
    # The key of -inf.
    key = high * 0 - 2139095041
    if t > 0:
        if (k > 0) & (k < vocabulary):
            key = _search(row, vocabulary, peak, t, key, high, k.to(tl.float32), True, BLOCK)
        if p < 1:
            total, _, _ = _sum_above(row, vocabulary, peak, t, key - 1, key * 0, False, BLOCK)
            key = _search(row, vocabulary, peak, t, key, high, p * total, False, BLOCK)
        if min_p > 0:
            min_p_key = _ordered_key(peak + t * tl.log(min_p)).to(tl.int64)
            key = tl.maximum(key, tl.minimum(min_p_key, high))
    key_bits = key.to(tl.int32)
    bits = key_bits ^ ((key_bits >> 31) & 0x7FFFFFFF)
    tl.store(floor + number, bits.to(tl.float32, bitcast=True))


def launch_logit_floors(logits_RV: Tensor, *, top_k: Tensor, sampling: Tensor) -> Tensor:
    """The floors [R], float32. `sampling` is [SamplingField, rows] with at least R rows."""
    rows, vocabulary = logits_RV.shape
    floor = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    stride, options = sampling.stride(0), {"BLOCK": BLOCK, "num_warps": 8}
    _logit_floors[(rows,)](logits_RV, top_k, sampling, floor, vocabulary, stride, **options)
    return floor
