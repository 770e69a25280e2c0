"""Batch-invariant Triton kernels: a row's bits do not depend on the other rows of the batch.

The matmul has a fixed tile size and no split-K, so each output is summed in one order. The RMSNorm
runs one program per row. batch_invariant.py uses them and imports this file only on a GPU.

Legend: N rows, I inputs, O outputs.
"""

# pyright cannot type-check Triton kernels, and Triton is not installed on every machine.
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, OUTPUTS, INPUTS = 64, 64, 64
"""The tile for every shape and device. Inputs of 4 bytes use a tile of 32 INPUTS."""


@triton.jit
def _matmul(
    x, weight, bias, out, rows, inputs, outputs, x_row, weight_row,
    BIASED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.arange(0, INPUTS)
    x_rows = n.to(tl.int64)[:, None] * x_row
    weight_rows = o.to(tl.int64)[:, None] * weight_row
    accumulator = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        inside = begin + i < inputs
        columns = (begin + i)[None, :]
        a = tl.load(x + x_rows + columns, mask=(n < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(
            weight + weight_rows + columns, mask=(o < outputs)[:, None] & inside[None, :], other=0.0
        )
        accumulator = tl.dot(a, tl.trans(b), accumulator, input_precision="ieee")
    if BIASED:
        accumulator += tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out + n.to(tl.int64)[:, None] * outputs + o[None, :]
    mask = (n < rows)[:, None] & (o < outputs)[None, :]
    tl.store(out_ptrs, accumulator.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm(x, weight, out, width, eps, x_row, WIDTH_PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH_PAD)
    inside = d < width
    values = tl.load(x + row * x_row + d, mask=inside, other=0.0)
    x_f32 = values.to(tl.float32)
    mean_square = tl.sum(x_f32 * x_f32, 0) / width
    normed = (x_f32 * (1.0 / tl.sqrt(mean_square + eps))).to(values.dtype)
    scaled = tl.load(weight + d, mask=inside, other=0.0) * normed
    tl.store(out + row * width + d, scaled.to(out.dtype.element_ty), mask=inside)


def launch_matmul(
    flat_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """flat @ weight.T + bias, accumulated in float32. Returns [N, O] of `dtype`."""
    flat_NI = flat_NI if flat_NI.stride(-1) == 1 else flat_NI.contiguous()
    rows, inputs = flat_NI.shape
    outputs = weight_OI.shape[0]
    out = torch.empty(rows, outputs, dtype=dtype, device=flat_NI.device)
    bias = weight_OI if bias_O is None else bias_O
    _matmul[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, OUTPUTS))](
        *(flat_NI, weight_OI, bias, out, rows, inputs, outputs),
        *(flat_NI.stride(0), weight_OI.stride(0)),
        BIASED=bias_O is not None,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=INPUTS if flat_NI.dtype.itemsize <= 2 else 32,
        num_warps=4,
        num_stages=3 if flat_NI.dtype.itemsize <= 2 else 2,
    )
    return out


def launch_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm: x / rms(x) in float32, rounded to the dtype of x, times the weight."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = torch.empty(flat.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    _norm[(len(flat),)](
        *(flat, weight, out, width, eps, flat.stride(0)),
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out.view(x.shape)
