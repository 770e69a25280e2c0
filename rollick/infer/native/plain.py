"""Decoders of a plain, known kind, computed part by part instead of through their own forwards.

A layer of a small model in a decode step is four large matrix products and some sixty small
operations, each of which costs more to call than to compute. Here there are half as many: queries
and keys turn together, sums and products are made in place, and norms are one call.

    plain_decoder(module) -> PlainDecoder -> hidden(token_ids, positions, step)

Only what is surely known is computed so: float32 on the CPU, with packed weights (packed.py), in
the classes named here. Every other module runs its own forward. Parameters are read where they
are: only packed weights are copies.

Dims: B batch, T tokens, N = B * T, D hidden size, H query heads, K key/value heads, C size of a
head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from rollick.infer.native.packed import PackedLinear
from rollick.models.cached_attention import AttentionStep, Projected
from rollick.models.paged_decoder import is_known

_ACTIVATIONS = ("silu", "swish")


class Turn(NamedTuple):
    """Rotary embedding of a forward's tokens, each [B, T, 1, C]; the sine of the first half is
    negative, because it multiplies the second half."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, cos_BTC: Tensor, sin_BTC: Tensor) -> Turn:
        sin_BTC = sin_BTC.clone()
        sin_BTC[..., : sin_BTC.shape[-1] // 2].neg_()
        return cls(cos_BTC.unsqueeze(2), sin_BTC.unsqueeze(2))

    def applied(self, heads: Tensor) -> Tensor:
        """[B, T, heads, C], turned."""
        halves_swapped = heads.roll(heads.shape[-1] // 2, -1)
        return (heads * self.cos).addcmul_(halves_swapped, self.sin)


def plain_decoder(module: nn.Module) -> PlainDecoder | None:
    """The module's decoder, if it is of a kind that is known here and nothing in it is changed."""
    decoder: Any = module.base_model
    if not is_known(decoder) or decoder.config.hidden_act not in _ACTIVATIONS:
        return None
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in decoder.parameters()):
        return None
    layers = list(decoder.layers)[: decoder.config.num_hidden_layers]
    if not all(_is_packed(layer) for layer in layers):
        return None
    return PlainDecoder(decoder, [_Layer(layer) for layer in layers])


def _is_packed(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    joined = attention.q_proj, attention.k_proj, attention.v_proj
    gated = mlp.gate_proj, mlp.up_proj
    families = joined, gated, (attention.o_proj,), (mlp.down_proj,)
    return all(
        all(type(one) is PackedLinear for one in family)
        and list(family[0].family.layers) == list(family)
        for family in families
    )


class PlainDecoder:
    """Hidden states of a plain decoder; made by `plain_decoder`."""

    def __init__(self, decoder: Any, layers: list[_Layer]) -> None:
        self._decoder = decoder
        self._layers = layers

    def hidden(self, token_ids_BT: Tensor, positions_BT: Tensor, step: AttentionStep) -> Tensor:
        """The last hidden states [B, T, D]; `step` stores keys and values on the way."""
        decoder = self._decoder
        hidden_BTD = embedding(token_ids_BT, decoder.embed_tokens.weight)
        turn = Turn.of(*decoder.rotary_emb(hidden_BTD, position_ids=positions_BT))
        hidden_ND = hidden_BTD.flatten(0, 1)
        for layer in self._layers:
            hidden_ND = layer(hidden_ND, turn, step)
        return _normed(hidden_ND, decoder.norm).view_as(hidden_BTD)


class _Layer:
    def __init__(self, layer: Any) -> None:
        self._layer = layer
        attention: Any = layer.self_attn
        self._attention = attention
        self._index = int(attention.layer_idx)
        self._size = int(attention.head_dim)
        self._scale = float(attention.scaling)
        # Mistral's layers read it in the configuration; Llama's never look at it.
        by_config = "Mistral" in type(attention).__name__
        self._window: int | None = getattr(
            attention.config if by_config else attention, "sliding_window", None
        )
        self._queries = attention.q_proj.out_features // self._size
        self._turning = self._queries + attention.k_proj.out_features // self._size
        self._norms_heads = hasattr(attention, "q_norm")

    def __call__(self, hidden_ND: Tensor, turn: Turn, step: AttentionStep) -> Tensor:
        layer, attention, mlp = self._layer, self._attention, self._layer.mlp
        normed_ND = _normed(hidden_ND, layer.input_layernorm)
        attended = step.attend(self._index, self._projected(normed_ND, turn))
        attended_NA = attended.reshape(len(hidden_ND), -1)
        hidden_ND = attention.o_proj.family.whole(attended_NA).add_(hidden_ND)
        normed_ND = _normed(hidden_ND, layer.post_attention_layernorm)
        gate, up = mlp.gate_proj.family.whole(normed_ND).chunk(2, dim=-1)
        return mlp.down_proj.family.whole(silu(gate).mul_(up)).add_(hidden_ND)

    def _projected(self, normed_ND: Tensor, turn: Turn) -> Projected:
        batch, tokens = turn.cos.shape[:2]
        whole = self._attention.q_proj.family.whole(normed_ND)
        whole = whole.view(batch, tokens, -1, self._size)
        if self._norms_heads:
            query = turn.applied(_normed(whole[:, :, : self._queries], self._attention.q_norm))
            key = whole[:, :, self._queries : self._turning]
            key = turn.applied(_normed(key, self._attention.k_norm))
        else:
            turned = turn.applied(whole[:, :, : self._turning])
            query, key = turned[:, :, : self._queries], turned[:, :, self._queries :]
        value = whole[:, :, self._turning :]
        return Projected(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self._scale,
            self._window,
        )


def _normed(values: Tensor, norm: Any) -> Tensor:
    return rms_norm(values, norm.weight.shape, norm.weight, norm.variance_epsilon)
