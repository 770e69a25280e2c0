"""The forward and backward of a Llama-style decoder (spec.py) over packed sequences.

Query, key and value, and gate and up, are one product in the forward and one for each gradient:
their weights are adjacent (fused_linear.py). Norm, rotary embedding and gate save only their
inputs, and are one kernel in each direction on a GPU, where small operations take most of the time
outside products.

Legend: N tokens of a pack, E width of the model, F width between gate/up and down, H query heads,
K key/value heads, C head dim.
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
    cos_1NC, sin_1NC = spec.rotary_angles(layout.position_ids_N[None], residual_NE[None])
    angles = cos_1NC[0][:, None], sin_1NC[0][:, None]
    change_NE: Tensor | None = None
    for layer in spec.layers:
        residual_NE, normed_NE = _add_norm(residual_NE, change_NE, layer.attention_norm)
        change_NE = _attend(layer, normed_NE, angles, layout)
        residual_NE, normed_NE = _add_norm(residual_NE, change_NE, layer.mlp_norm)
        gate_up_N2F = _fused_product(normed_NE, layer.gate_up)
        gated_NF: Any = _Gate.apply(gate_up_N2F)
        change_NE = linear(gated_NF, layer.down.weight, layer.down.bias)
    return _add_norm(residual_NE, change_NE, spec.norm)[1]


def run_decoder(decoder: Any, token_ids_N: Tensor, layout: PackedLayout) -> Tensor:
    """[N, D]: the last hidden states, computed by the model's own modules."""
    return decoder(
        input_ids=token_ids_N[None],
        position_ids=layout.position_ids_N[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state[0]


def _attend(
    layer: DecoderLayer, normed_NE: Tensor, angles: tuple[Tensor, Tensor], layout: PackedLayout
) -> Tensor:
    queries, keys = layer.num_heads, layer.num_kv_heads
    qkv_NHC = _fused_product(normed_NE, layer.qkv).unflatten(1, (-1, layer.head_dim))
    query_key_NHC, value_NKC = qkv_NHC.split([queries + keys, keys], dim=1)
    if layer.head_norms is not None:
        query_NHC, key_NKC = query_key_NHC.split([queries, keys], dim=1)
        query_NHC = _add_norm(query_NHC, None, layer.head_norms[0])[1]
        key_NKC = _add_norm(key_NKC, None, layer.head_norms[1])[1]
        query_key_NHC = torch.cat([query_NHC, key_NKC], dim=1)
    rotated: Any = _Rope.apply(query_key_NHC, *angles, queries)
    query, key, value = (heads.transpose(0, 1)[None] for heads in (*rotated, value_NKC))
    options = {"scaling": layer.scale, "sliding_window": layer.window}
    attended, _ = varlen_attention(
        layer.attention, query, key, value, None, layout=layout, **options
    )
    return linear(attended[0].flatten(1), layer.output.weight, layer.output.bias)


def _fused_product(input_NE: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The outputs of layers that read one input, side by side."""
    weights = [layer.weight for layer in layers]
    fused = adjacent_view(weights)
    if fused is None:
        return torch.cat([linear(input_NE, layer.weight, layer.bias) for layer in layers], dim=-1)
    optional: list[Tensor | None] = [layer.bias for layer in layers]
    biases = [bias for bias in optional if bias is not None]
    output: Any = _FusedProduct.apply(input_NE, fused, len(weights), *weights, *biases)
    return output


def _add_norm(residual: Tensor, change: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """(residual + change, its norm)."""
    terms = (None, residual) if change is None else (residual, change)
    result: Any = _AddNorm.apply(*terms, norm.weight, norm.variance_epsilon)
    total, normed = result
    return residual if total is None else total, normed


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def norm_forward(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, the factor of each row); rounds in the same places as transformers' norms."""
    wide = _wide(values)
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * factor).to(values.dtype), factor


def norm_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, factor: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the values and of the weight. `residual_grad`, the gradient that bypasses the
    norm, is added to the first."""
    normed, weighted = _wide(values) * factor, _wide(gradient) * _wide(weight)
    projection = (normed * weighted).mean(-1, keepdim=True)
    values_grad = (weighted - normed * projection) * factor
    if residual_grad is not None:
        values_grad = values_grad + residual_grad
    weight_grad = (_wide(gradient) * normed).flatten(0, -2).sum(0)
    return values_grad.to(values.dtype), weight_grad.to(weight.dtype)


def add_norm_forward(
    residual: Tensor, change: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = residual + change
    return (total, *norm_forward(total, weight, eps))


def gate_forward(gate_up_N2F: Tensor) -> Tensor:
    gate, up = gate_up_N2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gate_backward(gradient_NF: Tensor, gate_up_N2F: Tensor) -> Tensor:
    gate, up = (_wide(part) for part in gate_up_N2F.chunk(2, dim=-1))
    wide = _wide(gradient_NF)
    sigmoid = torch.sigmoid(gate)
    activated = gate * sigmoid
    gate_grad = wide * up * (sigmoid + activated * (1 - sigmoid))
    return torch.cat([gate_grad, wide * activated], dim=-1).to(gate_up_N2F.dtype)


def rope_forward(heads: Tensor, cos: Tensor, sin: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated, each in memory of its own: attention then returns its output in
    the memory order of the gradient that it receives."""
    return apply_rope(heads[:, :queries], cos, sin), apply_rope(heads[:, queries:], cos, sin)


def rope_backward(query_grad: Tensor, key_grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([apply_rope(query_grad, cos, -sin), apply_rope(key_grad, cos, -sin)], dim=1)


def _run(work: Callable[..., Any], *inputs: Any) -> Any:
    """Call one of the functions above, compiled on a GPU. Not compiled on the CPU, where starting
    the compiler costs more than it saves, or on a GPU without a working compiler."""
    if inputs[0].device.type == "cuda" and _can_compile():
        return _compiled(work)(*inputs)
    return work(*inputs)


@cache
def _compiled(work: Callable[..., Any]) -> Callable[..., Any]:
    kernel = torch.compile(work)

    def run(*inputs: Any) -> Any:
        # Detached: torch.compile reads .grad of its inputs, and torch warns for non-leaf tensors.
        return kernel(*(x.detach() if isinstance(x, Tensor) else x for x in inputs))

    return run


@cache
def _can_compile() -> bool:
    try:
        _compiled(gate_forward)(torch.zeros(8, 32, device="cuda"))
    except Exception as error:  # whatever an incomplete toolchain raises
        LOG.warning("training computes without compiled kernels: %s", error)
        return False
    return True


class _FusedProduct(torch.autograd.Function):
    """One product with the weights of several layers, whose gradients are parts of one."""

    @staticmethod
    def forward(
        ctx: Any, input_NE: Tensor, fused_OE: Tensor, count: int, *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(input_NE, fused_OE)
        ctx.sizes = [len(weight) for weight in parameters[:count]]
        ctx.biased = len(parameters) > count
        bias = torch.cat(parameters[count:]) if ctx.biased else None
        return linear(input_NE, fused_OE, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_NO,) = gradients
        input_NE, fused_OE = ctx.saved_tensors
        for_input, for_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        input_grad = gradient_NO @ fused_OE if for_input else None
        nothing = [None] * len(ctx.sizes)
        weights = (gradient_NO.t() @ input_NE).split(ctx.sizes) if for_weight else nothing
        biases = gradient_NO.sum(0).split(ctx.sizes) if ctx.biased and for_weight else nothing
        return input_grad, None, None, *weights, *(biases if ctx.biased else ())


class _AddNorm(torch.autograd.Function):
    """(residual + change, its norm); without a residual, (None, the norm of `change`)."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor | None, change: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | None, Tensor]:
        if residual is None:
            total, (normed, factor) = None, _run(norm_forward, change, weight, eps)
        else:
            total, normed, factor = _run(add_norm_forward, residual, change, weight, eps)
        ctx.save_for_backward(change if total is None else total, weight, factor)
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        residual_grad, gradient = gradients
        if gradient is None:
            return residual_grad, residual_grad, None, None
        saved = ctx.saved_tensors
        values_grad, weight_grad = _run(norm_backward, gradient, *saved, residual_grad)
        for_residual = values_grad if ctx.needs_input_grad[0] else None
        return for_residual, values_grad, weight_grad, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_N2F)
        return _run(gate_forward, gate_up_N2F)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _run(gate_backward, *gradients, *ctx.saved_tensors)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, queries: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _run(rope_forward, heads, cos, sin, queries)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _run(rope_backward, *gradients, *ctx.saved_tensors), None, None, None
