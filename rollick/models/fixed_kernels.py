"""Triton kernels whose results for a row depend on that row and the weights alone.

A product of constant tiles that adds up in one order, never split over the inputs, and the norm of
a row by one program. Whatever stands beside a row in a batch, and however many rows there are, its
bits are the same. fixed.py says where they are used. Imported only where Triton is needed.

Legend: N rows, I inputs, O outputs.
"""

# Triton's language has no types that a checker could follow, and Triton is not on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, OUTPUTS, INPUTS = 64, 64, 64
"""The tile, for every shape and every device."""


@triton.jit
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    x_row,
    weight_row,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    here = n.to(tl.int64)[:, None] * x_row
    there = o.to(tl.int64)[:, None] * weight_row
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        inside = begin + i < inputs
        a = tl.load(
            x + here + (begin + i)[None, :], mask=(n < rows)[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            weight + there + (begin + i)[None, :],
            mask=(o < outputs)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + n.to(tl.int64)[:, None] * outputs + o[None, :],
        total.to(out.dtype.element_ty),
        mask=(n < rows)[:, None] & (o < outputs)[None, :],
    )


@triton.jit
def _norm(x, weight, out, width, eps, x_row, WIDTH_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < width
    given = tl.load(x + row * x_row + d, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    mean = tl.sum(wide * wide, 0) / width
    narrow = (wide * (1.0 / tl.sqrt(mean + eps))).to(given.dtype)
    scaled = tl.load(weight + d, mask=inside, other=0.0) * narrow
    tl.store(out + row * width + d, scaled.to(out.dtype.element_ty), mask=inside)


def launch_product(
    flat_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """flat times the weight transposed, plus the bias, added up in float32: [N, O] of `dtype`."""
    flat_NI = flat_NI if flat_NI.stride(-1) == 1 else flat_NI.contiguous()
    rows, inputs = flat_NI.shape
    outputs = weight_OI.shape[0]
    out = torch.empty(rows, outputs, dtype=dtype, device=flat_NI.device)
    _product[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, OUTPUTS))](
        flat_NI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out,
        rows,
        inputs,
        outputs,
        flat_NI.stride(0),
        weight_OI.stride(0),
        BIASED=bias_O is not None,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS if flat_NI.dtype.itemsize <= 2 else 32,
        num_warps=4,
        num_stages=3 if flat_NI.dtype.itemsize <= 2 else 2,
    )
    return out


def launch_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Rows over their root mean square, rounded to their dtype, times the weight."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = torch.empty(flat.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    _norm[(len(flat),)](
        flat,
        weight,
        out,
        width,
        eps,
        flat.stride(0),
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out.view(x.shape)
