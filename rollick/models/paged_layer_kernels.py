"""Triton kernels of a plain decoder layer: all that lies between its products and its attention.

Owns the arithmetic on the GPU and how it is launched; paged_decoder.py says what is computed, and
has the same in plain torch. Every result is rounded where the modules of transformers round, so
that nothing but the order of sums differs from them. Imported only where Triton is needed.

Legend: N tokens, E width of the model, F width between gate/up and down, H query heads, K
key/value heads, D head dim.
"""

# Triton's language has no types that a checker could follow, and Triton is not on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollick.models.paged_attention import Packed

_SILU_BLOCK = 1024
_ROTATE_TOKENS = 16


class Tile(NamedTuple):
    """How the product of gate and up is cut and run."""

    rows: int = 64
    outputs: int = 64
    inputs: int = 64
    warps: int = 4
    stages: int = 4


FEW, MANY = Tile(), Tile(rows=128, warps=8, stages=3)
"""Up to 512 rows, and above."""


OVERLAP = False
"""Whether kernels may be started while the one before still runs (Hopper and later): they then wait
for it themselves, before they read or write anything."""


def overlap() -> dict[str, Any]:
    """What a launch is told of it."""
    return {"OVERLAP": True, "launch_pdl": True} if OVERLAP else {"OVERLAP": False}


@triton.jit
def meet(OVERLAP: tl.constexpr):
    """All work before this kernel is done from here on; the next one may be started."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rotated(x, y, cosine, sine):
    """`sine` has the sign that `turned` gives it; each step is rounded."""
    here = (x.to(tl.float32) * cosine.to(tl.float32)).to(x.dtype)
    there = (y.to(tl.float32) * sine.to(tl.float32)).to(x.dtype)
    return (here.to(tl.float32) + there.to(tl.float32)).to(x.dtype)


@triton.jit
def scaled(x, factor, weight):
    """A root-mean-square norm's last steps."""
    narrow = (x.to(tl.float32) * factor).to(x.dtype)
    return (weight.to(tl.float32) * narrow.to(tl.float32)).to(x.dtype)


@triton.jit
def turned(
    at,
    place,
    inside,
    norm,
    cosine,
    sine,
    eps,
    DIM: tl.constexpr,
    NORMED: tl.constexpr,
    AXIS: tl.constexpr,
):
    """What stands at `at + place`, normed and turned; `place` goes along a head, which is AXIS."""
    ahead = place < DIM // 2
    other = tl.where(ahead, place + DIM // 2, place - DIM // 2)
    x = tl.load(at + place, mask=inside, other=0.0)
    y = tl.load(at + other, mask=inside, other=0.0)
    if NORMED:
        wide = x.to(tl.float32)
        mean = tl.sum(wide * wide, AXIS, keep_dims=True) / DIM
        factor = 1.0 / tl.sqrt(mean + eps)
        x = scaled(x, factor, tl.load(norm + place, mask=place < DIM, other=0.0))
        y = scaled(y, factor, tl.load(norm + other, mask=place < DIM, other=0.0))
    return rotated(x, y, cosine, tl.where(ahead, -sine, sine))


@triton.jit
def _norm(
    tokens,
    embedding,
    change,
    residual,
    weight,
    out,
    width,
    eps,
    FIRST: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A row of the residual: looked up or added to, stored, and its norm."""
    meet(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < width
    scale = tl.load(weight + d, mask=inside, other=0.0)
    if FIRST:
        token = tl.load(tokens + row).to(tl.int64)
        x = tl.load(embedding + token * width + d, mask=inside, other=0.0)
    else:
        before = tl.load(residual + row * width + d, mask=inside, other=0.0)
        added = tl.load(change + row * width + d, mask=inside, other=0.0)
        x = (before.to(tl.float32) + added.to(tl.float32)).to(before.dtype)
    tl.store(residual + row * width + d, x, mask=inside)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + row * width + d, scaled(x, factor, scale), mask=inside)


@triton.jit
def _gate(both, out, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """silu(gate) * up of a row whose first half is gate and whose second is up."""
    meet(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    gate = tl.load(both + row * 2 * width + d, mask=inside, other=0.0)
    up = tl.load(both + row * 2 * width + width + d, mask=inside, other=0.0)
    tl.store(out + row * width + d, gated(gate, up), mask=inside)


@triton.jit
def gated(gate, up):
    wide = gate.to(tl.float32)
    bent = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (bent.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["rows"])
def _gated_product(
    x,
    weight,
    out,
    rows,
    inputs,
    outputs,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """silu(x gate') * (x up') for a tile; `weight` is gate [F, E], and up behind it."""
    meet(OVERLAP)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    # Rows and outputs beyond the last are computed from real ones, and not stored.
    x_at = x + (n % rows).to(tl.int64)[:, None] * inputs + i[None, :]
    gate_at = weight + (o % outputs).to(tl.int64)[None, :] * inputs + i[:, None]
    up_at = gate_at + outputs.to(tl.int64) * inputs
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        if EVEN:
            a = tl.load(x_at + begin)
            g = tl.load(gate_at + begin)
            u = tl.load(up_at + begin)
        else:
            left = begin + i < inputs
            a = tl.load(x_at + begin, mask=left[None, :], other=0.0)
            g = tl.load(gate_at + begin, mask=left[:, None], other=0.0)
            u = tl.load(up_at + begin, mask=left[:, None], other=0.0)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    kind = out.dtype.element_ty
    tl.store(
        out + n.to(tl.int64)[:, None] * outputs + o[None, :],
        gated(gate.to(kind), up.to(kind)),
        mask=(n < rows)[:, None] & (o < outputs)[None, :],
    )


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    packed,
    position,
    page,
    offset,
    cosine,
    sine,
    query_norm,
    key_norm,
    query,
    keys,
    values,
    tokens,
    eps,
    cache_page,
    cache_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NORMED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Some tokens of one head: a query turned and put aside, a key or value put into its page."""
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.arange(0, DIM_PAD)
    there = n < tokens
    inside = there[:, None] & (d < DIM)[None, :]
    row = packed + n.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    if head < HEADS + KV_HEADS:
        norm = key_norm
        if head < HEADS:
            norm = query_norm
        at = tl.load(position + n, mask=there, other=0).to(tl.int64)[:, None] * DIM + d[None, :]
        c = tl.load(cosine + at, mask=inside, other=0.0)
        s = tl.load(sine + at, mask=inside, other=0.0)
        x = turned(row, d[None, :], inside, norm, c, s, eps, DIM, NORMED, 1)
    else:
        x = tl.load(row + d[None, :], mask=inside, other=0.0)
    if head < HEADS:
        place = (n.to(tl.int64)[:, None] * HEADS + head) * DIM + d[None, :]
        tl.store(query + place, x, mask=inside)
    else:
        kv_head = (head - HEADS) % KV_HEADS
        here = tl.load(page + n, mask=there, other=0).to(tl.int64) * cache_page
        here += kv_head * cache_head + tl.load(offset + n, mask=there, other=0) * DIM
        if head < HEADS + KV_HEADS:
            tl.store(keys + here[:, None] + d[None, :], x, mask=inside)
        else:
            tl.store(values + here[:, None] + d[None, :], x, mask=inside)


def launch_first_norm(
    token_N: Tensor, embedding_VE: Tensor, weight_E: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(the residual, its norm), both [N, E]."""
    residual = embedding_VE.new_empty(len(token_N), embedding_VE.shape[1])
    out = torch.empty_like(residual)
    _launch_norm(token_N, embedding_VE, residual, residual, weight_E, out, eps=eps)
    return residual, out


def launch_add_norm(residual_NE: Tensor, change_NE: Tensor, weight_E: Tensor, *, eps: float) -> Any:
    """Adds to the residual in place; gives the norm of the sum."""
    out = torch.empty_like(residual_NE)
    _launch_norm(None, residual_NE, change_NE, residual_NE, weight_E, out, eps=eps)
    return out


def _launch_norm(
    tokens: Tensor | None,
    embedding: Tensor,
    change: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float,
) -> None:
    rows, width = residual.shape
    _norm[(rows,)](
        residual if tokens is None else tokens,
        embedding,
        change,
        residual,
        weight,
        out,
        width,
        eps,
        FIRST=tokens is not None,
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
        **overlap(),
    )


def launch_gate(both_N2F: Tensor) -> Tensor:
    """silu(gate) * up, [N, F]."""
    rows, width = both_N2F.shape[0], both_N2F.shape[1] // 2
    out = both_N2F.new_empty(rows, width)
    _gate[(rows, triton.cdiv(width, _SILU_BLOCK))](
        both_N2F, out, width, BLOCK=_SILU_BLOCK, num_warps=4, **overlap()
    )
    return out


def launch_gated_product(x_NE: Tensor, weight_2FE: Tensor, *, tile: Tile | None = None) -> Tensor:
    """silu(x gate') * (x up'), [N, F]; the products are added up in float32."""
    rows, inputs = x_NE.shape
    outputs = weight_2FE.shape[0] // 2
    tile = tile or (FEW if rows <= 512 else MANY)
    if x_NE.dtype.itemsize > 2:
        tile = Tile(32, 32, 32, 4, 2)
    out = x_NE.new_empty(rows, outputs)
    _gated_product[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))](
        x_NE,
        weight_2FE,
        out,
        rows,
        inputs,
        outputs,
        EVEN=inputs % tile.inputs == 0,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        INPUTS=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(),
    )
    return out


def launch_rotate(
    given: Packed,
    cache: tuple[Tensor, Tensor],
    *,
    position_N: Tensor,
    page_N: Tensor,
    offset_N: Tensor,
) -> Tensor:
    """Keys and values go into their pages; gives the queries, [N, H, D]."""
    keys, values = cache
    tokens, dim = len(given.rows), given.dim
    query = given.rows.new_empty(tokens, given.heads, dim)
    normed = given.norms is not None
    query_norm, key_norm = given.norms or (given.cosine, given.cosine)
    heads = given.heads + 2 * given.kv_heads
    _rotate[(triton.cdiv(tokens, _ROTATE_TOKENS), heads)](
        given.rows,
        position_N,
        page_N,
        offset_N,
        given.cosine,
        given.sine,
        query_norm,
        key_norm,
        query,
        keys,
        values,
        tokens,
        given.eps,
        *keys.stride()[:2],
        HEADS=given.heads,
        KV_HEADS=given.kv_heads,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        NORMED=normed,
        TOKENS=_ROTATE_TOKENS,
        num_warps=4,
    )
    return query
