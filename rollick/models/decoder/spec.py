"""Describes Llama-style decoders by their parts, so that a forward can use the parts directly.

Three forwards read the description, each faster than the modules' own for its case.

    describe_decoder(decoder) -> DecoderSpec -> CpuDecoder           generation on the CPU
                                             -> PagedDecoder         generation on a GPU
                                             -> hidden_states        training
                              -> None: the module runs its own forward

The description holds modules, not tensors: parameters may be replaced while it is in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollick.models.decoder.fused_linear import FusedLinear
from rollick.models.loading.shape import LLAMA_STYLE_MODELS

_CLASS_NAMES = frozenset(f"{name.capitalize()}Model" for name in LLAMA_STYLE_MODELS)
_SILU_NAMES = ("silu", "swish")


class RmsNorm(Protocol):
    """An RMSNorm module of transformers."""

    weight: Tensor
    variance_epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The parts of one layer: norm and attention, norm and MLP, each pair with a residual."""

    index: int
    attention: nn.Module
    attention_norm: RmsNorm
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    head_norms: tuple[RmsNorm, RmsNorm] | None
    """Norms of each query head and of each key head."""
    output: nn.Linear
    mlp_norm: RmsNorm
    gate_up: tuple[nn.Linear, nn.Linear]
    down: nn.Linear
    head_dim: int
    scale: float
    window: int | None
    """Positions that a token attends to, itself included; None: all before it."""

    @property
    def num_heads(self) -> int:
        return self.qkv[0].out_features // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.qkv[1].out_features // self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class DecoderSpec:
    """The parts of a decoder; created by `describe_decoder`."""

    embedding: nn.Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RmsNorm
    rotary_embedding: Any
    dtype: torch.dtype
    device: torch.device

    def rotary_cos_sin(self, positions_BT: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position, [B, T, head_dim], in the dtype of `like`."""
        return self.rotary_embedding(like, position_ids=positions_BT)


def describe_decoder(decoder: nn.Module) -> DecoderSpec | None:
    """The decoder's parts; None if its class is not supported or any part of it was changed."""
    # By name: other classes may have the same parts and combine them differently.
    is_known_class = type(decoder).__name__ in _CLASS_NAMES
    if not is_known_class or not type(decoder).__module__.startswith("transformers."):
        return None
    parts: Any = decoder
    for part in parts.modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__:
            return None
    parameters = list(decoder.parameters())
    layers = tuple(
        _describe_layer(layer) for layer in parts.layers[: int(parts.config.num_hidden_layers)]
    )
    linears = [x for part in layers for x in (*part.qkv, part.output, *part.gate_up, part.down)]
    if (
        type(parts.embed_tokens) is not nn.Embedding
        or parts.config.hidden_act not in _SILU_NAMES
        or not all(type(linear) in (nn.Linear, FusedLinear) for linear in linears)
        or any(2 * len(parts.rotary_emb.inv_freq) != layer.head_dim for layer in layers)
        # A shard of a parameter is a tensor of another type.
        or not all(type(parameter) is nn.Parameter for parameter in parameters)
        or len({(parameter.dtype, parameter.device) for parameter in parameters}) != 1
    ):
        return None
    dtype, device = parameters[0].dtype, parameters[0].device
    return DecoderSpec(parts.embed_tokens, layers, parts.norm, parts.rotary_emb, dtype, device)


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding along the last dimension. Its gradient rotates by the negative angle."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _describe_layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    # Mistral's attention reads its window in the configuration; Llama's ignores one there.
    window_owner = attention.config if "Mistral" in type(attention).__name__ else attention
    has_head_norms = hasattr(attention, "q_norm")
    return DecoderLayer(
        index=int(attention.layer_idx),
        attention=attention,
        attention_norm=layer.input_layernorm,
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm, attention.k_norm) if has_head_norms else None,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        head_dim=int(attention.head_dim),
        scale=float(attention.scaling),
        window=getattr(window_owner, "sliding_window", None),
    )
