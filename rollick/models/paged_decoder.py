"""The forward of a plain decoder over a paged cache, without its modules.

Owns which decoders are plain, and what their forward computes from the modules' own parameters.
Does not own the parameters, the cache, or the attention (paged_attention.py).

    tokens -> embedding, norm -> for each layer: one product for query, key and value; attention,
    which turns and stores them; product; add and norm; product of gate and up; product; add and
    norm -> hidden states

Through modules a layer is about fifty calls of Python and eleven kernels, and a GPU waits for
the host in a prefill and between kernels in a decode; here it is eight kernels. A decoder is
plain by its class: others may have the same parts and put them together in another way. One with
hooks, or with layers that were exchanged, is not plain; it runs as it is.

Legend: N tokens, E width of the model, F width between gate/up and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

from rollick.models.fixed import plain_norm
from rollick.models.fused import FusedLinear
from rollick.models.paged_attention import NO_WINDOW, Cache, Packed, PagedStep
from rollick.models.shape import PLAIN_KINDS

PLAIN = frozenset(f"{kind.capitalize()}Model" for kind in PLAIN_KINDS)
"""Decoders of transformers: norm, attention, norm, gated MLP, and two residual sums a layer."""

STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Ways to turn by position that do not depend on how long a sequence is."""

GATED_BYTES = 12_000_000
"""Weights of gate and up, up to which one kernel that also multiplies them is used: there the time
goes into starting kernels, and above into the product, which the library does better."""


class PlainLayer(NamedTuple):
    """The parameters of a layer: each product with its weight and bias."""

    first_norm: Tensor
    attention: tuple[Tensor, Tensor | None]
    """Query, key and value behind one another."""
    head_norms: tuple[Tensor, Tensor] | None
    output: tuple[Tensor, Tensor | None]
    second_norm: Tensor
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]
    scale: float
    window: int
    cache: Cache


class PlainDecoder:
    """Computes what `module.base_model` computes. Made by `plain_decoder`."""

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[PlainLayer],
        *,
        angles: tuple[Tensor, Tensor],
        kernels: bool,
    ) -> None:
        decoder, config = _parts(module)
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._last_norm: Tensor = decoder.norm.weight
        self._eps = float(config.rms_norm_eps)
        self._layers = layers
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._angles = angles
        self._kernels = kernels

    def hidden(self, token_N: Tensor, step: PagedStep) -> Tensor:
        """[N, E], after the last norm; keys and values are stored."""
        residual, normed = self._first_norm(token_N, self._layers[0].first_norm)
        following = [layer.first_norm for layer in self._layers[1:]]
        for layer, next_norm in zip(self._layers, [*following, self._last_norm], strict=True):
            attended = step.attend_packed(self._packed(layer, normed), layer.cache)
            change = linear(attended.flatten(1), *layer.output)
            normed = self._add_norm(residual, change, layer.second_norm)
            change = linear(self._gated(normed, *layer.gate_up), *layer.down)
            normed = self._add_norm(residual, change, next_norm)
        return normed

    def _packed(self, layer: PlainLayer, normed_NE: Tensor) -> Packed:
        return Packed(
            linear(normed_NE, *layer.attention),
            self._heads,
            self._kv_heads,
            *self._angles,
            scale=layer.scale,
            window=layer.window,
            norms=layer.head_norms,
            eps=self._eps,
        )

    def _first_norm(self, token_N: Tensor, weight_E: Tensor) -> tuple[Tensor, Tensor]:
        if self._kernels:
            from rollick.models.paged_layer_kernels import launch_first_norm

            return launch_first_norm(token_N, self._embedding, weight_E, eps=self._eps)
        residual = embedding(token_N, self._embedding)
        return residual, plain_norm(residual, weight_E, self._eps)

    def _add_norm(self, residual_NE: Tensor, change_NE: Tensor, weight_E: Tensor) -> Tensor:
        if self._kernels:
            from rollick.models.paged_layer_kernels import launch_add_norm

            return launch_add_norm(residual_NE, change_NE, weight_E, eps=self._eps)
        residual_NE += change_NE
        return plain_norm(residual_NE, weight_E, self._eps)

    def _gated(self, normed_NE: Tensor, weight_2FE: Tensor, bias_2F: Tensor | None) -> Tensor:
        if not self._kernels:
            gate, up = linear(normed_NE, weight_2FE, bias_2F).chunk(2, dim=-1)
            return silu(gate) * up
        from rollick.models.paged_layer_kernels import launch_gate, launch_gated_product

        if bias_2F is None and weight_2FE.nbytes <= GATED_BYTES:
            return launch_gated_product(normed_NE, weight_2FE)
        return launch_gate(linear(normed_NE, weight_2FE, bias_2F))


def plain_decoder(
    module: nn.Module, caches: Sequence[Cache], *, positions: int, kernels: bool
) -> PlainDecoder | None:
    """None where the decoder is not plain, or its products are not over neighbouring weights.

    `positions` is how long a sequence may get.
    """
    decoder, config = _parts(module)
    if not _is_plain(decoder, config):
        return None
    layers: list[PlainLayer] = []
    for layer, cache in zip(decoder.layers, caches, strict=True):
        found = _layer(layer, config, cache)
        if found is None:
            return None
        layers.append(found)
    weight = decoder.embed_tokens.weight
    at = torch.arange(positions, device=weight.device)[None]
    with torch.no_grad():
        cosine, sine = decoder.rotary_emb(weight.new_empty(1), position_ids=at)
    angles = cosine[0].contiguous(), sine[0].contiguous()
    if angles[0].shape[1] != caches[0][0].shape[-1]:
        # Only a part of each head is turned.
        return None
    return PlainDecoder(module, layers, angles=angles, kernels=kernels)


def _parts(module: nn.Module) -> tuple[Any, Any]:
    anything: Any = module
    return anything.base_model, anything.config


def _is_plain(decoder: Any, config: Any) -> bool:
    return (
        is_known(decoder)
        and type(decoder.embed_tokens) is nn.Embedding
        and config.hidden_act == "silu"
        and getattr(decoder.rotary_emb, "rope_type", None) in STEADY_ROPES
        and len({(part.dtype, part.device) for part in decoder.parameters()}) == 1
    )


def is_known(decoder: nn.Module) -> bool:
    """Whether the decoder is of a kind in PLAIN, and nobody changed or watches a part of it."""
    kind = type(decoder)
    return (
        kind.__name__ in PLAIN
        and kind.__module__.startswith("transformers.")
        and not any(_is_watched(part) for part in decoder.modules())
    )


def _is_watched(part: nn.Module) -> bool:
    """Whether somebody wants to be called when the module is, or takes its place."""
    anything: Any = part
    return bool(
        anything._forward_hooks or anything._forward_pre_hooks or "forward" in part.__dict__
    )


def _layer(layer: Any, config: Any, cache: Cache) -> PlainLayer | None:
    attention, mlp = layer.self_attn, layer.mlp
    together = (attention.q_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    if any(type(part) is not FusedLinear for part in together):
        return None
    if any(type(part) is not nn.Linear for part in (attention.o_proj, mlp.down_proj)):
        return None
    query, gate = attention.q_proj.family, mlp.gate_proj.family
    normed = hasattr(attention, "q_norm")
    window = (
        config.sliding_window
        if "Mistral" in type(attention).__name__
        else getattr(attention, "sliding_window", None)
    )
    return PlainLayer(
        first_norm=layer.input_layernorm.weight,
        attention=(query.weight, query.bias),
        head_norms=(attention.q_norm.weight, attention.k_norm.weight) if normed else None,
        output=(attention.o_proj.weight, attention.o_proj.bias),
        second_norm=layer.post_attention_layernorm.weight,
        gate_up=(gate.weight, gate.bias),
        down=(mlp.down_proj.weight, mlp.down_proj.bias),
        scale=float(attention.scaling),
        window=NO_WINDOW if window is None else int(window),
        cache=cache,
    )
