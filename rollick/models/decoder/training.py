"""The forward and backward of a Llama-style decoder (spec.py) over packed sequences.

QKV and gate/up are each one matmul in the forward and one per gradient in the backward, because
their weights are adjacent (fused_linear.py). Norm, rotary embedding and SwiGLU save only their
inputs, and are one kernel in each direction on a GPU, where small operations take most of the time
outside matmuls.

Legend: N tokens of a pack, E hidden size, F MLP intermediate size, O outputs of fused layers,
H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rollick.models.attention.varlen import PackedLayout, varlen_attention
from rollick.models.decoder.fused_linear import adjacent_view, fuse_storage
from rollick.models.decoder.spec import DecoderLayer, RmsNorm, apply_rope, describe_decoder

LOG = logging.getLogger("rollick")


def prepare_decoder(decoder: nn.Module) -> None:
    """Make sibling weights of a supported decoder adjacent. Call it before anything shares the
    parameters: their storage changes, names and values do not."""
    if describe_decoder(decoder) is not None:
        fuse_storage(decoder)


def hidden_states(decoder: nn.Module, token_ids_N: Tensor, layout: PackedLayout) -> Tensor | None:
    """The last hidden states [N, E]; None if the decoder must run its own forward."""
    # Described again at each call: hooks or other layers may have been added since the last one.
    spec = describe_decoder(decoder)
    if spec is None:
        return None
    residual_NE = embedding(token_ids_N, spec.embedding.weight)
    cos_1ND, sin_1ND = spec.rotary_cos_sin(layout.position_ids_N[None], residual_NE[None])
    cos_sin = cos_1ND[0][:, None], sin_1ND[0][:, None]
    output_NE: Tensor | None = None
    for layer in spec.layers:
        residual_NE, normed_NE = _add_norm(residual_NE, output_NE, layer.attention_norm)
        output_NE = _attend(layer, normed_NE, cos_sin, layout)
        residual_NE, normed_NE = _add_norm(residual_NE, output_NE, layer.mlp_norm)
        gate_up_N2F = _fused_linear(normed_NE, layer.gate_up)
        gated_NF: Any = _SwiGlu.apply(gate_up_N2F)
        output_NE = linear(gated_NF, layer.down.weight, layer.down.bias)
    return _add_norm(residual_NE, output_NE, spec.norm)[1]


def run_decoder(decoder: Any, token_ids_N: Tensor, layout: PackedLayout) -> Tensor:
    """[N, E]: the last hidden states, computed by the model's own modules."""
    return decoder(
        input_ids=token_ids_N[None],
        position_ids=layout.position_ids_N[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state[0]


def _attend(
    layer: DecoderLayer, normed_NE: Tensor, cos_sin: tuple[Tensor, Tensor], layout: PackedLayout
) -> Tensor:
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    qkv_NHD = _fused_linear(normed_NE, layer.qkv).unflatten(1, (-1, layer.head_dim))
    query_key_NHD, value_NKD = qkv_NHD.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if layer.head_norms is not None:
        query_NHD, key_NKD = query_key_NHD.split([num_heads, num_kv_heads], dim=1)
        query_NHD = _add_norm(query_NHD, None, layer.head_norms[0])[1]
        key_NKD = _add_norm(key_NKD, None, layer.head_norms[1])[1]
        query_key_NHD = torch.cat([query_NHD, key_NKD], dim=1)
    rotated: Any = _Rope.apply(query_key_NHD, *cos_sin, num_heads)
    query, key, value = (heads.transpose(0, 1)[None] for heads in (*rotated, value_NKD))
    options = {"scaling": layer.scale, "sliding_window": layer.window}
    attended, _ = varlen_attention(
        layer.attention, query, key, value, None, layout=layout, **options
    )
    return linear(attended[0].flatten(1), layer.output.weight, layer.output.bias)


def _fused_linear(input_NE: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The concatenated outputs of layers that read one input."""
    weights = [layer.weight for layer in layers]
    fused = adjacent_view(weights)
    if fused is None:
        return torch.cat([linear(input_NE, layer.weight, layer.bias) for layer in layers], dim=-1)
    optional: list[Tensor | None] = [layer.bias for layer in layers]
    biases = [bias for bias in optional if bias is not None]
    output: Any = _FusedLinear.apply(input_NE, fused, len(weights), *weights, *biases)
    return output


def _add_norm(
    residual: Tensor, sublayer_output: Tensor | None, norm: RmsNorm
) -> tuple[Tensor, Tensor]:
    """(residual + sublayer_output, its norm)."""
    terms = (None, residual) if sublayer_output is None else (residual, sublayer_output)
    outputs: Any = _AddNorm.apply(*terms, norm.weight, norm.variance_epsilon)
    total, normed = outputs
    return residual if total is None else total, normed


def _upcast(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def norm_forward(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, 1 / rms of each row); rounds in the same places as transformers' norms."""
    upcast = _upcast(values)
    rstd = torch.rsqrt(upcast.square().mean(-1, keepdim=True) + eps)
    return weight * (upcast * rstd).to(values.dtype), rstd


def norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, rstd: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the values and of the weight. `residual_grad`, the gradient that bypasses the
    norm, is added to the first."""
    normed, weighted = _upcast(values) * rstd, _upcast(gradient) * _upcast(weight)
    projection = (normed * weighted).mean(-1, keepdim=True)
    values_grad = (weighted - normed * projection) * rstd
    if residual_grad is not None:
        values_grad = values_grad + residual_grad
    weight_grad = (_upcast(gradient) * normed).flatten(0, -2).sum(0)
    return values_grad.to(values.dtype), weight_grad.to(weight.dtype)


def add_norm_forward(
    residual: Tensor, sublayer_output: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = residual + sublayer_output
    return (total, *norm_forward(total, weight, eps))


def swiglu_forward(gate_up_N2F: Tensor) -> Tensor:
    gate, up = gate_up_N2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(gradient_NF: Tensor, gate_up_N2F: Tensor) -> Tensor:
    gate, up = (_upcast(part) for part in gate_up_N2F.chunk(2, dim=-1))
    upcast = _upcast(gradient_NF)
    sigmoid = torch.sigmoid(gate)
    activated = gate * sigmoid
    gate_grad = upcast * up * (sigmoid + activated * (1 - sigmoid))
    return torch.cat([gate_grad, upcast * activated], dim=-1).to(gate_up_N2F.dtype)


def rope_forward(heads: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Apply RoPE to queries and keys, in separate tensors, so that attention's output and its
    gradient have the same memory layout."""
    return apply_rope(heads[:, :num_heads], cos, sin), apply_rope(heads[:, num_heads:], cos, sin)


def rope_backward(query_grad: Tensor, key_grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([apply_rope(query_grad, cos, -sin), apply_rope(key_grad, cos, -sin)], dim=1)


def _run(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call one of the functions above, compiled on a GPU. Not compiled on the CPU, where starting
    the compiler costs more than it saves, or on a GPU without a working compiler."""
    if inputs[0].device.type == "cuda" and _can_compile():
        return _compile(function)(*inputs)
    return function(*inputs)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    kernel = torch.compile(function)

    def run(*inputs: Any) -> Any:
        # Detached: torch.compile reads .grad of its inputs, and torch warns for non-leaf tensors.
        return kernel(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))

    return run


@cache
def _can_compile() -> bool:
    try:
        _compile(swiglu_forward)(torch.zeros(8, 32, device="cuda"))
    except Exception as error:  # whatever an incomplete toolchain raises
        LOG.warning("training computes without compiled kernels: %s", error)
        return False
    return True


class _FusedLinear(torch.autograd.Function):
    """One matmul with the weights of several layers; their gradients are slices of one tensor."""

    @staticmethod
    def forward(
        ctx: Any, input_NE: Tensor, fused_OE: Tensor, count: int, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input_NE, fused_OE)
        ctx.sizes = [len(weight) for weight in parameters[:count]]
        ctx.has_bias = len(parameters) > count
        bias = torch.cat(parameters[count:]) if ctx.has_bias else None
        return linear(input_NE, fused_OE, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_NO,) = gradients
        input_NE, fused_OE = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        input_grad = gradient_NO @ fused_OE if needs_input else None
        no_grads = [None] * len(ctx.sizes)
        weights = (gradient_NO.t() @ input_NE).split(ctx.sizes) if needs_weight else no_grads
        biases = gradient_NO.sum(0).split(ctx.sizes) if ctx.has_bias and needs_weight else no_grads
        return input_grad, None, None, *weights, *(biases if ctx.has_bias else ())


class _AddNorm(torch.autograd.Function):
    """(residual + sublayer_output, its norm); without a residual, (None, the norm)."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor | None, sublayer_output: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        if residual is None:
            total, (normed, rstd) = None, _run(norm_forward, sublayer_output, weight, eps)
        else:
            total, normed, rstd = _run(add_norm_forward, residual, sublayer_output, weight, eps)
        ctx.save_for_backward(sublayer_output if total is None else total, weight, rstd)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total_grad, normed_grad = gradients
        if normed_grad is None:
            return total_grad, total_grad, None, None
        saved = ctx.saved_tensors
        values_grad, weight_grad = _run(norm_backward, normed_grad, *saved, total_grad)
        residual_grad = values_grad if ctx.needs_input_grad[0] else None
        return residual_grad, values_grad, weight_grad, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_N2F)
        return _run(swiglu_forward, gate_up_N2F)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _run(swiglu_backward, *gradients, *ctx.saved_tensors)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, num_heads: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _run(rope_forward, heads, cos, sin, num_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _run(rope_backward, *gradients, *ctx.saved_tensors), None, None, None
