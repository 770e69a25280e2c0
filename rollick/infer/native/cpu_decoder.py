"""The forward of a Llama-style decoder for generation on the CPU, without its modules.

In a decode step, a layer of a small model is four large matrix products and about sixty small
operations that cost more to call than to compute. Here there are half as many: queries and keys
rotate in one operation, sums and products are in place, and norms are one call. Serves supported
decoders (models/decoder/spec.py) in float32 with packed weights (packed_linear.py); every other
module runs its own forward.

Dims: B batch, T tokens, N = B * T, D hidden size, H query heads, K key/value heads, C head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu

from rollick.infer.native.packed_linear import PackedWeights
from rollick.models.attention.options import AttentionOptions
from rollick.models.attention.slot_cache import AttentionInputs, AttentionStep
from rollick.models.decoder.fused_linear import fused_weights
from rollick.models.decoder.spec import DecoderLayer, DecoderSpec, RmsNorm, describe_decoder


class RotaryEmbedding(NamedTuple):
    """Angles of a forward's tokens, each [B, T, 1, C]; the sine of the first half is negated,
    because it multiplies the second half."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def from_angles(cls, cos_BTC: Tensor, sin_BTC: Tensor) -> RotaryEmbedding:
        sin_BTC = sin_BTC.clone()
        sin_BTC[..., : sin_BTC.shape[-1] // 2].neg_()
        return cls(cos_BTC.unsqueeze(2), sin_BTC.unsqueeze(2))

    def rotate(self, heads: Tensor) -> Tensor:
        """[B, T, heads, C], rotated by position."""
        halves_swapped = heads.roll(heads.shape[-1] // 2, -1)
        return (heads * self.cos).addcmul_(halves_swapped, self.sin)


def cpu_decoder(module: nn.Module) -> CpuDecoder | None:
    """The module's decoder; None if it is not supported or its weights are not packed."""
    base: nn.Module = module.base_model  # pyright: ignore[reportAssignmentType]
    spec = describe_decoder(base)
    if spec is None or spec.dtype != torch.float32 or spec.device.type != "cpu":
        return None
    layers: list[_PackedLayer] = []
    for layer in spec.layers:
        groups = layer.qkv, (layer.output,), layer.gate_up, (layer.down,)
        weights = [fused_weights(group) for group in groups]
        packed = [weight for weight in weights if isinstance(weight, PackedWeights)]
        if len(packed) < len(groups):
            return None
        layers.append(_PackedLayer(layer, *packed))
    return CpuDecoder(spec, layers)


@dataclass(frozen=True, slots=True, eq=False)
class CpuDecoder:
    spec: DecoderSpec
    layers: list[_PackedLayer]

    def hidden(self, token_ids_BT: Tensor, positions_BT: Tensor, step: AttentionStep) -> Tensor:
        """The last hidden states [B, T, D]; `step` stores keys and values on the way."""
        spec = self.spec
        hidden_BTD = embedding(token_ids_BT, spec.embedding.weight)
        rope = RotaryEmbedding.from_angles(*spec.rotary_cos_sin(positions_BT, hidden_BTD))
        hidden_ND = hidden_BTD.flatten(0, 1)
        for layer in self.layers:
            hidden_ND = layer.forward(hidden_ND, rope, step)
        return _normalize(hidden_ND, spec.norm).view_as(hidden_BTD)


@dataclass(frozen=True, slots=True, eq=False)
class _PackedLayer:
    layer: DecoderLayer
    qkv: PackedWeights
    output: PackedWeights
    gate_up: PackedWeights
    down: PackedWeights

    def forward(self, hidden_ND: Tensor, rope: RotaryEmbedding, step: AttentionStep) -> Tensor:
        layer = self.layer
        normed_ND = _normalize(hidden_ND, layer.attention_norm)
        attended = step.attend(layer.index, self._project(normed_ND, rope))
        attended_NA = attended.reshape(len(hidden_ND), -1)
        hidden_ND = self.output.product(attended_NA).add_(hidden_ND)
        normed_ND = _normalize(hidden_ND, layer.mlp_norm)
        gate, up = self.gate_up.product(normed_ND).chunk(2, dim=-1)
        return self.down.product(silu(gate).mul_(up)).add_(hidden_ND)

    def _project(self, normed_ND: Tensor, rope: RotaryEmbedding) -> AttentionInputs:
        layer, num_heads = self.layer, self.layer.num_heads
        num_rotated = num_heads + layer.num_kv_heads
        batch, tokens = rope.cos.shape[:2]
        qkv = self.qkv.product(normed_ND).view(batch, tokens, -1, layer.head_dim)
        if layer.head_norms is None:
            rotated = rope.rotate(qkv[:, :, :num_rotated])
            query, key = rotated[:, :, :num_heads], rotated[:, :, num_heads:]
        else:
            query_norm, key_norm = layer.head_norms
            query = rope.rotate(_normalize(qkv[:, :, :num_heads], query_norm))
            key = rope.rotate(_normalize(qkv[:, :, num_heads:num_rotated], key_norm))
        value = qkv[:, :, num_rotated:]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        options = AttentionOptions(layer.scale, layer.window)
        return AttentionInputs(query, key, value, options)


def _normalize(values: Tensor, norm: RmsNorm) -> Tensor:
    return rms_norm(values, norm.weight.shape, norm.weight, norm.variance_epsilon)
