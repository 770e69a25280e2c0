"""Linear layers over packed weights: torch's fastest matrix product on the CPU for the few rows of
a decode step.

A product of 32 rows with a weight in the model's own layout spends much of its time on reordering
the weight. Here oneDNN reorders once after each weight update and keeps the result, which takes as
much memory again as the linear layers. Layers with one input (query, key and value; gate and up)
are packed as one product (models/decoder/fused_linear.py). Parameters and their storage stay as
they are: the learner may write them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rollick.models.decoder.fused_linear import FusedGroup, linear_groups, make_fused
from rollick.models.head.logprobs import OutputHead

MEMORY_SHARE = 0.5
"""Largest fraction of the free memory that packed weights may take."""

_UNKNOWN_MEMORY = 8 << 30
_DTYPES = (torch.float32, torch.bfloat16)


def can_pack(module: nn.Module) -> bool:
    """Whether torch has the kernels, the module is on the CPU, and there is memory for a copy."""
    parameters = list(module.parameters())
    is_supported = all(p.device.type == "cpu" and p.dtype in _DTYPES for p in parameters)
    if not is_supported or not torch.backends.mkldnn.is_available() or not _has_operators():
        return False
    return sum(p.nbytes for p in parameters) <= MEMORY_SHARE * _free_bytes()


def pack_linears(module: nn.Module) -> list[tuple[FusedGroup, PackedWeights]]:
    """Make every nn.Linear inside, except the output head, compute with a packed weight, made when
    first needed."""
    packed = [(layers, PackedWeights(layers)) for layers in list(linear_groups(module))]
    return [(make_fused(layers, weights), weights) for layers, weights in packed]


def drop_packed(packed: Sequence[tuple[FusedGroup, PackedWeights]]) -> None:
    for group, weights in packed:
        group.forget_outputs()
        weights.drop()


class PackedWeights:
    """The weights of layers with one input, packed as one."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.packed: Tensor | None = None
        self._layers = layers
        self._bias: Tensor | None = None

    def drop(self) -> None:
        self.packed = self._bias = None

    def product(self, input: Tensor) -> Tensor:
        if self.packed is None:
            weights = [layer.weight.detach() for layer in self._layers]
            self.packed = pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights))
            optional: list[Tensor | None] = [layer.bias for layer in self._layers]
            biases = [bias.detach() for bias in optional if bias is not None]
            self._bias = torch.cat(biases) if biases else None
        return packed_product(input, self.packed, self._bias)


class PackedHead:
    """An output head's weight, packed in float32 for any dtype of the module."""

    def __init__(self) -> None:
        self._packed: Tensor | None = None

    def logits(self, hidden_RD: Tensor, head: OutputHead) -> Tensor:
        if self._packed is None:
            self._packed = pack_weight(head.weight_VD.detach().float())
        bias_V = None if head.bias_V is None else head.bias_V.float()
        return head.finish(packed_product(hidden_RD.float(), self._packed, bias_V))

    def drop(self) -> None:
        self._packed = None


def pack_weight(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def packed_product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _has_operators() -> bool:
    """Whether torch has both operators: they are internal to its compiler and may change."""
    try:
        weight, row = torch.eye(16), torch.ones(1, 16)
        return bool((packed_product(row, pack_weight(weight), None) == row).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _free_bytes() -> int:
    """Memory available without swapping, reclaimable file cache included."""
    source = Path("/proc/meminfo")
    for line in source.read_text().splitlines() if source.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNKNOWN_MEMORY
