"""Triton kernels of attention over a paged cache of keys and values.

attention/paged.py decides what to compute and has a reference in torch. Keys and values of a layer
are [pages, K, PAGE, D]; a row of the page table lists the pages of one sequence in order. Imported
only where Triton is needed.

Legend: R rows, H query heads, K key/value heads, G = H / K, D head dim, N packed tokens.
"""

# pyright cannot type-check Triton kernels, and Triton is not installed on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollick.models.attention.paged import PAGE, Cache, FusedQkv, QkvHeads
from rollick.models.decoder.layer_kernels import norm_and_rotate

KEY_TILE = 64
"""Keys that a program reads at once."""

_PAGE = tl.constexpr(PAGE)

PREFILL_ROWS = 32
"""Rows of queries (tokens times heads of a group) of a prefill program. With 64 the compiler uses
Hopper's wgmma instruction, and bfloat16 with a window was wrong in some memory layouts (measured:
H200, Triton 3.6; float32, and the 16 rows of the decode kernel, were correct)."""


@triton.jit
def _cap(score, softcap):
    """softcap * tanh(score / softcap)."""
    return softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)


@triton.jit
def _add_sink(peak, total, acc, sinks, member, count):
    """The online softmax with the sink of each of the first `count` heads of a group: a score
    without a value."""
    sink = tl.load(sinks + member, mask=member < count, other=float("-inf")).to(tl.float32)
    new_peak = tl.maximum(peak, sink)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    rescale = tl.exp(peak - base)
    return new_peak, total * rescale + tl.exp(sink - base), acc * rescale[:, None]


@triton.jit
def _attend_cached(
    q, position, peak, total, acc, keys, values, pages, start, stop, scale, window, softcap,
    cache_page, DIM: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the cached positions [start, stop) of the sequence with these `pages`:
    updates each query's highest score, sum of weights and weighted sum of values. A query at
    `position` attends to the `window` keys up to its position."""
    d = tl.arange(0, q.shape[1])
    for begin in range(start, stop, TILE):
        key_position = begin + tl.arange(0, TILE)
        inside = key_position < stop
        page = tl.load(pages + key_position // _PAGE, mask=inside, other=0)
        offset = page.to(tl.int64) * cache_page + (key_position % _PAGE) * DIM
        mask = inside[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + offset[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(values + offset[:, None] + d[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            score = _cap(score, softcap)
        distance = position[:, None] - key_position[None, :]
        attended = inside[None, :] & (distance >= 0) & (distance < window)
        score = tl.where(attended, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        # A query that has attended to nothing yet has no peak; -inf minus -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp(peak - base)
        weight = tl.exp(score - base[:, None])
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * rescale[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def _store_token(keys, values, pages, position, key, value, cache_page, DIM: tl.constexpr):
    d = tl.arange(0, key.shape[0])
    page = tl.load(pages + position // _PAGE).to(tl.int64)
    offset = page * cache_page + (position % _PAGE) * DIM
    tl.store(keys + offset + d, key, mask=d < DIM)
    tl.store(values + offset + d, value, mask=d < DIM)


@triton.jit
def _load_and_rotate(
    query, key, mask, position, cosine, sine, query_norm, key_norm, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The queries and the key of a token, normed and rotated to its position."""
    d = tl.arange(0, DIM_PAD)
    row_d = d[None, :]
    in_dim = d < DIM
    angle = position.to(tl.int64) * DIM + d
    c = tl.load(cosine + angle, mask=in_dim, other=0.0)
    s = tl.load(sine + angle, mask=in_dim, other=0.0)
    q = norm_and_rotate(query, row_d, mask, query_norm, c[None, :], s[None, :], eps, DIM, NORMED, 1)
    return q, norm_and_rotate(key, d, in_dim, key_norm, c, s, eps, DIM, NORMED, 0)


@triton.jit
def _start_from_new_token(q, new_k, new_v, in_split, scale, softcap, CAPPED: tl.constexpr):
    """The online softmax of the new token alone, or of nothing if it is not in this split."""
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        score = _cap(score, softcap)
    peak = tl.where(in_split, score, float("-inf"))
    total = tl.where(in_split, score * 0.0 + 1.0, 0.0)
    acc = tl.where(in_split, 1.0, 0.0) * new_v.to(tl.float32)[None, :]
    return peak, total, acc + tl.zeros([q.shape[0], q.shape[1]], tl.float32)


@triton.jit
def _split_range(last, window, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """The positions [start, stop) of one of SPLITS parts of the keys of the token at `last`."""
    first = tl.maximum(last + 1 - window, 0)
    size = tl.cdiv(last + 1 - first, SPLITS * TILE) * TILE
    start = first + split * size
    return start, tl.minimum(start + size, last + 1)


@triton.jit
def _decode(
    query, key, value, keys, values, table, length, output, parts, peaks, sums,
    cosine, sine, query_norm, key_norm, sinks, scale, window, softcap, eps,
    query_head, query_row, key_head, key_row, value_head, value_row, table_row,
    cache_page, cache_head, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, ROTATED: tl.constexpr,
    NORMED: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store a row's new key of one head; attend to a split of the keys. ROTATED: rotate first."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    last = tl.load(length + row).to(tl.int32) - 1
    start, stop = _split_range(last, window, split, SPLITS, TILE)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    in_dim, member = d < DIM, head * GROUP + g
    mask = (g < GROUP)[:, None] & in_dim[None, :]
    q_ptrs = query + member[:, None] * query_head + row * query_row
    k_ptr = key + head * key_head + row * key_row
    if ROTATED:
        position = tl.maximum(last, 0)  # an unused row has no last token
        q, new_k = _load_and_rotate(
            q_ptrs, k_ptr, mask, position, cosine, sine, query_norm, key_norm, eps,
            DIM, DIM_PAD, NORMED,
        )  # fmt: skip
    else:
        q = tl.load(q_ptrs + d[None, :], mask=mask, other=0.0)
        new_k = tl.load(k_ptr + d, mask=in_dim, other=0.0)
    new_v = tl.load(value + head * value_head + row * value_row + d, mask=in_dim, other=0.0)
    keys, values = keys + head * cache_head, values + head * cache_head
    pages, in_split = table + row * table_row, (last >= start) & (last < stop)
    if in_split:
        _store_token(keys, values, pages, last, new_k, new_v, cache_page, DIM)
    # The stored token may not be visible yet to this program's loads: the sums start from it, and
    # the loop covers the older tokens.
    peak, total, acc = _start_from_new_token(q, new_k, new_v, in_split, scale, softcap, CAPPED)
    position, end = last + 0 * g, tl.minimum(stop, last)
    peak, total, acc = _attend_cached(
        q, position, peak, total, acc, keys, values, pages, start, end,
        scale, window, softcap, cache_page, DIM, TILE, CAPPED,
    )  # fmt: skip
    if SINKS:
        count = tl.where(split == 0, GROUP, 0)  # only the first split has sinks
        peak, total, acc = _add_sink(peak, total, acc, sinks + head * GROUP, g, count)
    if SPLITS == 1:
        out = (row * heads * GROUP + member)[:, None] * DIM + d[None, :]
        tl.store(output + out, (acc / total[:, None]).to(output.dtype.element_ty), mask=mask)
    else:
        slot = ((row * heads + head) * SPLITS + split) * GROUP_PAD + g
        tl.store(parts + slot[:, None] * DIM_PAD + d[None, :], acc)
        tl.store(peaks + slot, peak)
        tl.store(sums + slot, total)


@triton.jit
def _combine(
    parts, peaks, sums, output, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and key/value head, in their order."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    base = (row * heads + head) * SPLITS
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        peak = tl.maximum(peak, tl.load(peaks + (base + split) * GROUP_PAD + g))
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        slot = (base + split) * GROUP_PAD + g
        weight = tl.exp(tl.load(peaks + slot) - peak)
        total += weight * tl.load(sums + slot)
        acc += weight[:, None] * tl.load(parts + slot[:, None] * DIM_PAD + d[None, :])
    out = (row * heads * GROUP + head * GROUP + g)[:, None] * DIM + d[None, :]
    result = acc / total[:, None]
    mask = (g < GROUP)[:, None] & (d < DIM)[None, :]
    tl.store(output + out, result.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_row"])
def _prefill(
    query, keys, values, table, output, tiles, sinks, scale, window, softcap,
    query_head, query_token, table_row, cache_page, cache_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Consecutive tokens of one sequence and one key/value head, over all keys up to them."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    # A tile: its first token in the pack, the count, the first token's position, the row.
    tile = tiles + tl.program_id(0) * 4
    token, count = tl.load(tile), tl.load(tile + 1)
    position, row = tl.load(tile + 2), tl.load(tile + 3)
    m, d = tl.arange(0, QUERIES * GROUP_PAD), tl.arange(0, DIM_PAD)
    i, member = m // GROUP_PAD, m % GROUP_PAD
    mask = ((i < count) & (member < GROUP))[:, None] & (d < DIM)[None, :]
    q_offset = (head * GROUP + member)[:, None] * query_head + (token + i)[:, None] * query_token
    q = tl.load(query + q_offset + d[None, :], mask=mask, other=0.0)
    start = (tl.maximum(position + 1 - window, 0) // TILE) * TILE
    stop = position + count
    peak = tl.full([QUERIES * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    acc = tl.zeros([QUERIES * GROUP_PAD, DIM_PAD], tl.float32)
    keys, values = keys + head * cache_head, values + head * cache_head
    query_position, pages = position + i, table + row * table_row
    peak, total, acc = _attend_cached(
        q, query_position, peak, total, acc, keys, values, pages, start, stop,
        scale, window, softcap, cache_page, DIM, TILE, CAPPED,
    )  # fmt: skip
    if SINKS:
        peak, total, acc = _add_sink(peak, total, acc, sinks + head * GROUP, member, GROUP)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = ((token + i) * heads * GROUP + head * GROUP + member)[:, None] * DIM + d[None, :]
    tl.store(output + out, result.to(output.dtype.element_ty), mask=mask)


def launch_decode(
    qkv: QkvHeads,
    cache: Cache,
    *,
    table: Tensor,
    length: Tensor,
    splits: int,
    fused: FusedQkv | None = None,
) -> Tensor:
    """query [H, R, D], key and value [K, R, D] -> [R, H, D]; stores key and value. With `fused`,
    query and key are views of its rows, not yet normed and rotated."""
    query, key, value = qkv.query, qkv.key, qkv.value
    keys, values = cache
    heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    sizes = {"GROUP": group, "GROUP_PAD": max(16, triton.next_power_of_2(group))}
    sizes |= {"DIM": dim, "DIM_PAD": max(16, triton.next_power_of_2(dim))}
    output = query.new_empty(rows, heads, dim)
    parts, peaks, sums = output, output, output
    if splits > 1:
        slots = rows * kv_heads * splits * sizes["GROUP_PAD"]
        parts = query.new_empty(slots, sizes["DIM_PAD"], dtype=torch.float32)
        peaks = query.new_empty(slots, dtype=torch.float32)
        sums = torch.empty_like(peaks)
    cos_sin = (query, query) if fused is None else (fused.cosine, fused.sine)
    norms = None if fused is None else fused.norms
    eps = 0.0 if fused is None else fused.eps
    sinks = query if qkv.sinks is None else qkv.sinks
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    _decode[(rows, kv_heads, splits)](
        *(query, key, value, keys, values, table, length, output, parts, peaks, sums),
        *(*cos_sin, *(norms or cos_sin), sinks, qkv.scale, qkv.window, qkv.softcap, eps),
        *(*strides, table.stride(0), *keys.stride()[:2]),
        **sizes,
        TILE=KEY_TILE,
        SPLITS=splits,
        ROTATED=fused is not None,
        NORMED=norms is not None,
        CAPPED=qkv.softcap > 0,
        SINKS=qkv.sinks is not None,
        num_warps=2,
        num_stages=2,
    )
    if splits > 1:
        _combine[(rows, kv_heads)](parts, peaks, sums, output, **sizes, SPLITS=splits)
    return output


def prefill_queries(group: int) -> int:
    """Tokens of a prefill program, for `group` query heads per key/value head."""
    return max(1, PREFILL_ROWS // triton.next_power_of_2(group))


def launch_prefill(
    query: Tensor, cache: Cache, table: Tensor, tiles: Tensor, qkv: QkvHeads | FusedQkv
) -> Tensor:
    """query [H, N, D] -> [N, H, D]; the cache already holds the keys of the tokens. `tiles` [T, 4]:
    first token, count (at most prefill_queries), first position, row of the table. `qkv` has the
    options of the attention."""
    keys, values = cache
    heads, tokens, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    queries = prefill_queries(group)
    group_pad = triton.next_power_of_2(group)
    group_pad = 16 if queries * group_pad < 16 else group_pad
    output = query.new_empty(tokens, heads, dim)
    _prefill[(len(tiles), kv_heads)](
        *(query, keys, values, table, output, tiles),
        *(query if qkv.sinks is None else qkv.sinks, qkv.scale, qkv.window, qkv.softcap),
        *(*query.stride()[:2], table.stride(0), *keys.stride()[:2]),
        GROUP=group,
        GROUP_PAD=group_pad,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        QUERIES=queries,
        TILE=32 if query.dtype.itemsize > 2 else KEY_TILE,
        CAPPED=qkv.softcap > 0,
        SINKS=qkv.sinks is not None,
        num_warps=4,
        num_stages=2,
    )
    return output
