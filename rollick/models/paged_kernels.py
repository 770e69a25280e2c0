"""Triton kernels of attention over a paged cache of keys and values.

Owns the arithmetic on the GPU and how it is launched; paged_attention.py says what is to be
computed, and has the same in plain torch. Imported only where Triton is needed.

A page holds PAGE positions of one sequence: keys and values are [pages, K, PAGE, D] for each
layer. A row of the table names the pages of one sequence in order.

Legend: R rows, H query heads, K key/value heads, G = H / K, D head dim, N packed tokens.
"""

# Triton's language has no types that a checker could follow, and Triton is not on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollick.models.paged_attention import Packed
from rollick.models.paged_layer_kernels import meet, overlap, turned


class Launch(NamedTuple):
    """How a program is cut and run."""

    tile: int = 64
    """Keys looked at together."""
    warps: int = 2
    stages: int = 2


DECODE = Launch()
PREFILL = Launch(warps=4)

PREFILL_ROWS = 32
"""Rows of queries (tokens times heads of a group) of a prefill's program. With 64 the compiler
takes Hopper's own matrix instruction, and bfloat16 with a window came out wrong in some layouts
(measured: H200, Triton 3.6; float32, and the 16 rows of the decode kernel, were right)."""


@triton.jit
def _decode(
    query,
    key,
    value,
    keys,
    values,
    table,
    length,
    output,
    parts,
    peaks,
    sums,
    cosine,
    sine,
    query_norm,
    key_norm,
    scale,
    window,
    eps,
    query_head,
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    table_row,
    cache_page,
    cache_head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row and one key/value head (and one part of its keys): store the new key, attend.

    With ROTATED, query and key are as they were projected, and are turned by their position here.
    """
    meet(OVERLAP)
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    last = tl.load(length + row).to(tl.int32) - 1
    first = tl.maximum(last + 1 - window, 0)
    share = tl.cdiv(last + 1 - first, SPLITS * TILE) * TILE
    start = first + split * share
    stop = tl.minimum(start + share, last + 1)

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    in_group = g < GROUP
    in_dim = d < DIM
    member = head * GROUP + g
    real = in_group[:, None] & in_dim[None, :]
    query_at = query + member[:, None] * query_head + row * query_row
    key_at = key + head * key_head + row * key_row
    if ROTATED:
        # A row that nobody has used yet has no last token.
        angle = tl.maximum(last, 0).to(tl.int64) * DIM + d
        c = tl.load(cosine + angle, mask=in_dim, other=0.0)
        s = tl.load(sine + angle, mask=in_dim, other=0.0)
        along = d[None, :]
        q = turned(query_at, along, real, query_norm, c[None, :], s[None, :], eps, DIM, NORMED, 1)
        new_k = turned(key_at, d, in_dim, key_norm, c, s, eps, DIM, NORMED, 0)
    else:
        q = tl.load(query_at + d[None, :], mask=real, other=0.0)
        new_k = tl.load(key_at + d, mask=in_dim, other=0.0)
    new_v = tl.load(value + head * value_head + row * value_row + d, mask=in_dim, other=0.0)
    own = (last >= start) & (last < stop)
    if own:
        own_page = tl.load(table + row * table_row + last // PAGE).to(tl.int64)
        own_place = own_page * cache_page + head * cache_head + (last % PAGE) * DIM
        tl.store(keys + own_place + d, new_k, mask=in_dim)
        tl.store(values + own_place + d, new_v, mask=in_dim)

    # What this program has just stored may not be visible to its own loads yet: the new token is
    # where the sums begin, and the loop goes over the older ones.
    fresh = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    peak = tl.where(own, fresh, float("-inf"))
    total = tl.where(own, fresh * 0.0 + 1.0, 0.0)
    mixed = tl.where(own, 1.0, 0.0) * new_v.to(tl.float32)[None, :]
    mixed = mixed + tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    stop = tl.minimum(stop, last)
    for begin in range(start, stop, TILE):
        position = begin + tl.arange(0, TILE)
        seen = position < stop
        page = tl.load(table + row * table_row + position // PAGE, mask=seen, other=0)
        place = page.to(tl.int64) * cache_page + head * cache_head + (position % PAGE) * DIM
        wanted = seen[:, None] & in_dim[None, :]
        k = tl.load(keys + place[:, None] + d[None, :], mask=wanted, other=0.0)
        v = tl.load(values + place[:, None] + d[None, :], mask=wanted, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        shrink = tl.exp(peak - higher)
        weight = tl.exp(score - higher[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = higher

    if SPLITS == 1:
        out = (row * heads * GROUP + member)[:, None] * DIM + d[None, :]
        result = mixed / total[:, None]
        tl.store(
            output + out,
            result.to(output.dtype.element_ty),
            mask=real,
        )
    else:
        slot = ((row * heads + head) * SPLITS + split) * GROUP_PAD + g
        tl.store(parts + slot[:, None] * DIM_PAD + d[None, :], mixed)
        tl.store(peaks + slot, peak)
        tl.store(sums + slot, total)


@triton.jit
def _combine(
    parts,
    peaks,
    sums,
    output,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Put the parts of one row and key/value head together, in their order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    base = (row * heads + head) * SPLITS
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(peaks + (base + split) * GROUP_PAD + g))
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        slot = (base + split) * GROUP_PAD + g
        weight = tl.exp(tl.load(peaks + slot) - peak)
        total += weight * tl.load(sums + slot)
        mixed += weight[:, None] * tl.load(parts + slot[:, None] * DIM_PAD + d[None, :])
    out = (row * heads * GROUP + head * GROUP + g)[:, None] * DIM + d[None, :]
    result = mixed / total[:, None]
    tl.store(
        output + out,
        result.to(output.dtype.element_ty),
        mask=(g < GROUP)[:, None] & (d < DIM)[None, :],
    )


@triton.jit(do_not_specialize=["table_row"])
def _prefill(
    query,
    keys,
    values,
    table,
    output,
    tiles,
    scale,
    window,
    query_head,
    query_token,
    table_row,
    cache_page,
    cache_head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Some neighbouring tokens of one sequence and one key/value head, over all keys so far."""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    # A tile: its first token in the pack, how many there are, the first one's position, its row.
    at = tiles + tl.program_id(0) * 4
    token = tl.load(at)
    count = tl.load(at + 1)
    position = tl.load(at + 2)
    row = tl.load(at + 3)

    m = tl.arange(0, QUERIES * GROUP_PAD)
    d = tl.arange(0, DIM_PAD)
    in_dim = d < DIM
    nth = m // GROUP_PAD
    member = m % GROUP_PAD
    real = (nth < count) & (member < GROUP)
    here = position + nth
    q = tl.load(
        query
        + (head * GROUP + member)[:, None] * query_head
        + (token + nth)[:, None] * query_token
        + d[None, :],
        mask=real[:, None] & in_dim[None, :],
        other=0.0,
    )
    stop = position + count
    start = (tl.maximum(position + 1 - window, 0) // TILE) * TILE
    peak = tl.full([QUERIES * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    mixed = tl.zeros([QUERIES * GROUP_PAD, DIM_PAD], tl.float32)
    for begin in range(start, stop, TILE):
        there = begin + tl.arange(0, TILE)
        inside = there < stop
        page = tl.load(table + row * table_row + there // PAGE, mask=inside, other=0)
        place = page.to(tl.int64) * cache_page + head * cache_head + (there % PAGE) * DIM
        wanted = inside[:, None] & in_dim[None, :]
        k = tl.load(keys + place[:, None] + d[None, :], mask=wanted, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (there[None, :] <= here[:, None]) & (there[None, :] > here[:, None] - window)
        score = tl.where(seen & inside[None, :], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # A query that has seen nothing yet has no peak; -inf minus -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(peak - base)
        weight = tl.exp(score - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(values + place[:, None] + d[None, :], mask=wanted, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = higher
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    out = ((token + nth) * heads * GROUP + head * GROUP + member)[:, None] * DIM + d[None, :]
    tl.store(
        output + out,
        result.to(output.dtype.element_ty),
        mask=real[:, None] & in_dim[None, :],
    )


def launch_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    table: Tensor,
    length: Tensor,
    scale: float,
    window: int,
    splits: int,
    packed: Packed | None = None,
    launch: Launch = DECODE,
) -> Tensor:
    """query [H, R, D], key and value [K, R, D] -> [R, H, D]; stores key and value.

    With `packed`, query and key are of its rows: not turned by their positions yet.
    """
    keys, values = cache
    heads, rows, dim = query.shape
    kv_heads, page = keys.shape[1:3]
    group = heads // kv_heads
    shape: dict[str, Any] = {
        "GROUP": group,
        "GROUP_PAD": max(16, triton.next_power_of_2(group)),
        "DIM": dim,
        "DIM_PAD": max(16, triton.next_power_of_2(dim)),
    }
    output = query.new_empty(rows, heads, dim)
    parts, peaks, sums = output, output, output
    angles, norms = (query, query), None
    if packed is not None:
        angles, norms = (packed.cosine, packed.sine), packed.norms
    if splits > 1:
        slots = rows * kv_heads * splits * shape["GROUP_PAD"]
        parts = query.new_empty(slots, shape["DIM_PAD"], dtype=torch.float32)
        peaks = query.new_empty(slots, dtype=torch.float32)
        sums = torch.empty_like(peaks)
    _decode[(rows, kv_heads, splits)](
        query,
        key,
        value,
        keys,
        values,
        table,
        length,
        output,
        parts,
        peaks,
        sums,
        *angles,
        *(norms or angles),
        scale,
        window,
        0.0 if packed is None else packed.eps,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        table.stride(0),
        *keys.stride()[:2],
        **shape,
        PAGE=page,
        TILE=launch.tile,
        SPLITS=splits,
        ROTATED=packed is not None,
        NORMED=norms is not None,
        num_warps=launch.warps,
        num_stages=launch.stages if query.dtype.itemsize <= 2 else 2,
        **overlap(),
    )
    if splits > 1:
        _combine[(rows, kv_heads)](parts, peaks, sums, output, **shape, SPLITS=splits)
    return output


def prefill_queries(group: int, rows: int = PREFILL_ROWS) -> int:
    """Tokens that a prefill program takes together."""
    return max(1, rows // triton.next_power_of_2(group))


def launch_prefill(
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    table: Tensor,
    tiles: Tensor,
    scale: float,
    window: int,
    launch: Launch = PREFILL,
    rows: int = PREFILL_ROWS,
) -> Tensor:
    """query [H, N, D] -> [N, H, D]; the cache holds the keys of the tokens already.

    `tiles` [T, 4] int32 cuts the tokens: first token, count (of prefill_queries at most), first
    position, row of the table.
    """
    keys, values = cache
    heads, tokens, dim = query.shape
    kv_heads, page = keys.shape[1:3]
    group = heads // kv_heads
    queries = prefill_queries(group, rows)
    group_pad = triton.next_power_of_2(group)
    if queries * group_pad < 16:
        group_pad = 16
    output = query.new_empty(tokens, heads, dim)
    _prefill[(len(tiles), kv_heads)](
        query,
        keys,
        values,
        table,
        output,
        tiles,
        scale,
        window,
        *query.stride()[:2],
        table.stride(0),
        *keys.stride()[:2],
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        PAGE=page,
        QUERIES=queries,
        TILE=32 if query.dtype.itemsize > 2 else launch.tile,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return output
