"""Triton kernels of a Llama-style decoder layer: everything between its matmuls and attention.

decoder/paged.py decides what to compute and has a reference in torch. Results are rounded where the
modules of transformers round, so only the order of sums differs. Imported only where Triton is
needed.

Legend: N tokens, E hidden size, F MLP intermediate size, H query heads, K key/value heads, D head
dim.
"""

# pyright cannot type-check Triton kernels, and Triton is not installed on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollick.models.attention.paged import Cache, FusedQkv

_SILU_BLOCK = 1024
_ROTATE_TOKENS = 16


SMALL_TILE = {"ROWS": 64, "OUTPUTS": 64, "INPUTS": 64, "num_warps": 4, "num_stages": 4}
LARGE_TILE = SMALL_TILE | {"ROWS": 128, "num_warps": 8, "num_stages": 3}
"""Tiles of the gate and up matmul: up to 512 rows, and above."""
FLOAT32_TILE = {"ROWS": 32, "OUTPUTS": 32, "INPUTS": 32, "num_warps": 4, "num_stages": 2}


@triton.jit
def _rotate(x, y, cosine, sine):
    """`y`: the other half of the head. `sine`: negative for the first half. Rounds each step."""
    own = (x.to(tl.float32) * cosine.to(tl.float32)).to(x.dtype)
    other = (y.to(tl.float32) * sine.to(tl.float32)).to(x.dtype)
    return (own.to(tl.float32) + other.to(tl.float32)).to(x.dtype)


@triton.jit
def _scale(x, rstd, weight):
    """The last steps of an RMSNorm."""
    normed = (x.to(tl.float32) * rstd).to(x.dtype)
    return (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype)


@triton.jit
def norm_and_rotate(
    head, d, inside, norm, cosine, sine, eps,
    DIM: tl.constexpr, NORMED: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """The values of the heads at `head`, normed and rotated; `d` indexes them along AXIS."""
    in_first_half = d < DIM // 2
    other = tl.where(in_first_half, d + DIM // 2, d - DIM // 2)
    x = tl.load(head + d, mask=inside, other=0.0)
    y = tl.load(head + other, mask=inside, other=0.0)
    if NORMED:
        x_f32 = x.to(tl.float32)
        mean_square = tl.sum(x_f32 * x_f32, AXIS, keep_dims=True) / DIM
        rstd = 1.0 / tl.sqrt(mean_square + eps)
        x = _scale(x, rstd, tl.load(norm + d, mask=d < DIM, other=0.0))
        y = _scale(y, rstd, tl.load(norm + other, mask=d < DIM, other=0.0))
    return _rotate(x, y, cosine, tl.where(in_first_half, -sine, sine))


@triton.jit
def _norm(
    tokens, embedding, sublayer_output, residual, weight, out, width, eps,
    FIRST: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """One row of the residual: look it up or add to it, store it and its norm."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < width
    scale = tl.load(weight + d, mask=inside, other=0.0)
    if FIRST:
        token = tl.load(tokens + row).to(tl.int64)
        x = tl.load(embedding + token * width + d, mask=inside, other=0.0)
    else:
        before = tl.load(residual + row * width + d, mask=inside, other=0.0)
        added = tl.load(sublayer_output + row * width + d, mask=inside, other=0.0)
        x = (before.to(tl.float32) + added.to(tl.float32)).to(before.dtype)
    tl.store(residual + row * width + d, x, mask=inside)
    x_f32 = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x_f32 * x_f32, 0) / width + eps)
    tl.store(out + row * width + d, _scale(x, rstd, scale), mask=inside)


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    """silu(gate) * up of a row of gate, then up."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    gate = tl.load(gate_up + row * 2 * width + d, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + d, mask=inside, other=0.0)
    tl.store(out + row * width + d, _silu_multiply(gate, up), mask=inside)


@triton.jit
def _silu_multiply(gate, up):
    gate_f32 = gate.to(tl.float32)
    activated = (gate_f32 / (1.0 + tl.exp(-gate_f32))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["rows"])
def _swiglu_linear(
    x, weight, out, rows, inputs, outputs,
    EVEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """silu(x gate') * (x up') for a tile; `weight` is gate [F, E], followed by up."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    # Rows and outputs past the end wrap around to valid ones, and are not stored.
    x_ptrs = x + (n % rows).to(tl.int64)[:, None] * inputs + i[None, :]
    gate_ptrs = weight + (o % outputs).to(tl.int64)[None, :] * inputs + i[:, None]
    up_ptrs = gate_ptrs + outputs.to(tl.int64) * inputs
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        if EVEN:
            a = tl.load(x_ptrs + begin)
            g = tl.load(gate_ptrs + begin)
            u = tl.load(up_ptrs + begin)
        else:
            left = begin + i < inputs
            a = tl.load(x_ptrs + begin, mask=left[None, :], other=0.0)
            g = tl.load(gate_ptrs + begin, mask=left[:, None], other=0.0)
            u = tl.load(up_ptrs + begin, mask=left[:, None], other=0.0)
        gate = tl.dot(a, g, gate, input_precision="ieee")
        up = tl.dot(a, u, up, input_precision="ieee")
    dtype = out.dtype.element_ty
    mask = (n < rows)[:, None] & (o < outputs)[None, :]
    out_ptrs = out + n.to(tl.int64)[:, None] * outputs + o[None, :]
    tl.store(out_ptrs, _silu_multiply(gate.to(dtype), up.to(dtype)), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _rotate_and_store(
    qkv, position, page, offset, cosine, sine, query_norm, key_norm, query, keys, values,
    tokens, eps, cache_page, cache_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    NORMED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: rotate a query and return it; store a key or value in its page."""
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, d = tl.program_id(1), tl.arange(0, DIM_PAD)
    is_token = n < tokens
    inside = is_token[:, None] & (d < DIM)[None, :]
    row = qkv + n.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    if head < HEADS + KV_HEADS:
        norm = key_norm
        if head < HEADS:
            norm = query_norm
        pos = tl.load(position + n, mask=is_token, other=0).to(tl.int64)[:, None] * DIM + d[None, :]
        c = tl.load(cosine + pos, mask=inside, other=0.0)
        s = tl.load(sine + pos, mask=inside, other=0.0)
        x = norm_and_rotate(row, d[None, :], inside, norm, c, s, eps, DIM, NORMED, 1)
    else:
        x = tl.load(row + d[None, :], mask=inside, other=0.0)
    if head < HEADS:
        out = (n.to(tl.int64)[:, None] * HEADS + head) * DIM + d[None, :]
        tl.store(query + out, x, mask=inside)
    else:
        slot = tl.load(page + n, mask=is_token, other=0).to(tl.int64) * cache_page
        slot += (head - HEADS) % KV_HEADS * cache_head
        slot += tl.load(offset + n, mask=is_token, other=0) * DIM
        if head < HEADS + KV_HEADS:
            tl.store(keys + slot[:, None] + d[None, :], x, mask=inside)
        else:
            tl.store(values + slot[:, None] + d[None, :], x, mask=inside)


def launch_embed_norm(
    token_N: Tensor, embedding_VE: Tensor, weight_E: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(the residual, its norm), both [N, E]."""
    residual = embedding_VE.new_empty(len(token_N), embedding_VE.shape[1])
    return residual, _launch_norm(residual, (token_N, embedding_VE, residual), weight_E, eps, True)


def launch_add_norm(
    residual_NE: Tensor, output_NE: Tensor, weight_E: Tensor, *, eps: float
) -> Tensor:
    """Add to the residual in place; return the norm of the sum."""
    inputs = residual_NE, residual_NE, output_NE
    return _launch_norm(residual_NE, inputs, weight_E, eps, first=False)


def _launch_norm(
    residual: Tensor, inputs: tuple[Tensor, ...], weight: Tensor, eps: float, first: bool
) -> Tensor:
    """`inputs`: tokens and embedding (read if `first`), and the sublayer output (read if not)."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    _norm[(rows,)](
        *(*inputs, residual, weight, out, width, eps),
        FIRST=first,
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )
    return out


def launch_gate(gate_up_N2F: Tensor) -> Tensor:
    """silu(gate) * up, [N, F]."""
    rows, width = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    out = gate_up_N2F.new_empty(rows, width)
    grid = rows, triton.cdiv(width, _SILU_BLOCK)
    _swiglu[grid](gate_up_N2F, out, width, BLOCK=_SILU_BLOCK, num_warps=4)
    return out


def launch_gated_product(x_NE: Tensor, weight_2FE: Tensor) -> Tensor:
    """silu(x gate') * (x up'), [N, F]; both matmuls accumulate in float32."""
    rows, inputs = x_NE.shape
    outputs = weight_2FE.shape[0] // 2
    half_tile = SMALL_TILE if rows <= 512 else LARGE_TILE
    tile = FLOAT32_TILE if x_NE.dtype.itemsize > 2 else half_tile
    out = x_NE.new_empty(rows, outputs)
    grid = triton.cdiv(rows, tile["ROWS"]), triton.cdiv(outputs, tile["OUTPUTS"])
    even = inputs % tile["INPUTS"] == 0
    _swiglu_linear[grid](x_NE, weight_2FE, out, rows, inputs, outputs, EVEN=even, **tile)
    return out


def launch_rotate(
    qkv: FusedQkv, cache: Cache, *, position_N: Tensor, page_N: Tensor, offset_N: Tensor
) -> Tensor:
    """Store keys and values in their pages; return the queries, [N, H, D]."""
    keys, values = cache
    tokens, dim = len(qkv.rows), qkv.dim
    query = qkv.rows.new_empty(tokens, qkv.heads, dim)
    norms = qkv.norms or (qkv.cosine, qkv.cosine)
    heads = qkv.heads + 2 * qkv.kv_heads
    _rotate_and_store[(triton.cdiv(tokens, _ROTATE_TOKENS), heads)](
        *(qkv.rows, position_N, page_N, offset_N, qkv.cosine, qkv.sine, *norms),
        *(query, keys, values, tokens, qkv.eps, *keys.stride()[:2]),
        HEADS=qkv.heads,
        KV_HEADS=qkv.kv_heads,
        DIM=dim,
        DIM_PAD=max(16, triton.next_power_of_2(dim)),
        NORMED=qkv.norms is not None,
        TOKENS=_ROTATE_TOKENS,
        num_warps=4,
    )
    return query
