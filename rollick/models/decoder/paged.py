"""The forward of a Llama-style decoder over a paged cache, without its modules.

Supports the decoders of spec.py. attention/paged.py computes the attention, which also applies RoPE
and stores keys and values.

Through its modules a layer is about fifty Python calls and eleven kernels: a GPU waits for the host
in a prefill, and between kernels in a decode. Here a layer is eight kernels.

Legend: N tokens, E hidden size, F MLP intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from rollick.models.attention.paged import NO_WINDOW, Cache, FusedQkv, PagedStep
from rollick.models.decoder.batch_invariant import reference_rms_norm
from rollick.models.decoder.fused_linear import AdjacentWeights, fused_weights
from rollick.models.decoder.spec import DecoderLayer, DecoderSpec, describe_decoder

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""

FUSED_GATE_MAX_BYTES = 12_000_000
"""Up to this size of the gate and up weights, one kernel computes the matmul and SwiGLU, because
kernel launches take most of the time. Above it, torch's matmul and a separate kernel are faster."""


class PagedLayer(NamedTuple):
    """The parameters of a layer: a weight and bias for each linear layer."""

    attention_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    head_norms: tuple[Tensor, Tensor] | None
    output: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int
    cache: Cache


class PagedDecoder:
    """Computes the hidden states of a decoder; created by `paged_decoder`."""

    def __init__(
        self,
        spec: DecoderSpec,
        layers: Sequence[PagedLayer],
        *,
        cos_sin: tuple[Tensor, Tensor],
        kernels: bool,
    ) -> None:
        self._embedding = spec.embedding.weight
        self._last_norm = spec.norm.weight
        self._eps = float(spec.norm.variance_epsilon)
        self._layers = layers
        self._cos_sin = cos_sin
        self._kernels: Any = None
        if kernels:
            from rollick.models.decoder import layer_kernels

            self._kernels = layer_kernels

    def hidden(self, token_N: Tensor, step: PagedStep) -> Tensor:
        """Store keys and values; return the hidden states after the last norm, [N, E]."""
        residual, normed = self._embed_and_norm(token_N, self._layers[0].attention_norm)
        next_norms = [layer.attention_norm for layer in self._layers[1:]]
        for layer, next_norm in zip(self._layers, [*next_norms, self._last_norm], strict=True):
            attended = step.attend_fused(self._project_qkv(layer, normed), layer.cache)
            output = linear(attended.flatten(1), *layer.output)
            normed = self._add_norm(residual, output, layer.mlp_norm)
            output = linear(self._swiglu(normed, *layer.gate_up), *layer.down)
            normed = self._add_norm(residual, output, next_norm)
        return normed

    def _project_qkv(self, layer: PagedLayer, normed_NE: Tensor) -> FusedQkv:
        rows, heads = linear(normed_NE, *layer.qkv), (layer.num_heads, layer.num_kv_heads)
        options = layer.scale, layer.window, layer.head_norms, self._eps
        return FusedQkv(rows, *heads, *self._cos_sin, *options)

    def _embed_and_norm(self, token_N: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        if self._kernels:
            return self._kernels.launch_embed_norm(
                token_N, self._embedding, weight_E, eps=self._eps
            )
        residual = embedding(token_N, self._embedding)
        return residual, reference_rms_norm(residual, weight_E, self._eps)

    def _add_norm(self, residual_NE: Tensor, output_NE: Tensor, weight_E: Tensor) -> Tensor:
        if self._kernels:
            return self._kernels.launch_add_norm(residual_NE, output_NE, weight_E, eps=self._eps)
        residual_NE += output_NE
        return reference_rms_norm(residual_NE, weight_E, self._eps)

    def _swiglu(self, normed_NE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None) -> Tensor:
        if not self._kernels:
            gate, up = linear(normed_NE, weight_2FE, bias_2F).chunk(2, dim=-1)
            return silu(gate) * up
        if bias_2F is None and weight_2FE.nbytes <= FUSED_GATE_MAX_BYTES:
            return self._kernels.launch_gated_product(normed_NE, weight_2FE)
        return self._kernels.launch_gate(linear(normed_NE, weight_2FE, bias_2F))


def paged_decoder(
    module: nn.Module, caches: Sequence[Cache], *, positions: int, kernels: bool
) -> PagedDecoder | None:
    """None if the decoder is not supported, or sibling weights are not fused. `positions` is the
    largest length of a sequence."""
    base: nn.Module = module.base_model  # pyright: ignore[reportAssignmentType]
    spec = describe_decoder(base)
    if spec is None or spec.rotary_embedding.rope_type not in STATIC_ROPE_TYPES:
        return None
    paged = [_paged_layer(layer, cache) for layer, cache in zip(spec.layers, caches, strict=True)]
    layers = [layer for layer in paged if layer is not None]
    if len(layers) < len(paged):
        return None
    positions_1T = torch.arange(positions, device=spec.device)[None]
    with torch.no_grad():
        cos, sin = spec.rotary_cos_sin(positions_1T, spec.embedding.weight.new_empty(1))
    cos_sin = cos[0].contiguous(), sin[0].contiguous()
    return PagedDecoder(spec, layers, cos_sin=cos_sin, kernels=kernels)


def _paged_layer(layer: DecoderLayer, cache: Cache) -> PagedLayer | None:
    qkv, gate_up = fused_weights(layer.qkv), fused_weights(layer.gate_up)
    if not isinstance(qkv, AdjacentWeights) or not isinstance(gate_up, AdjacentWeights):
        return None
    norms = layer.head_norms
    return PagedLayer(
        attention_norm=layer.attention_norm.weight,
        qkv=qkv,
        head_norms=None if norms is None else (norms[0].weight, norms[1].weight),
        output=(layer.output.weight, layer.output.bias),
        mlp_norm=layer.mlp_norm.weight,
        gate_up=gate_up,
        down=(layer.down.weight, layer.down.bias),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        scale=layer.scale,
        window=NO_WINDOW if layer.window is None else int(layer.window),
        cache=cache,
    )
