"""Linear layers over packed weights: torch's fastest matrix product on the CPU for the few rows of
a decode step.

A product of 32 rows with a weight in the model's own layout spends much of its time on reordering
the weight. Here oneDNN reorders once after each weight update and keeps the result, which takes as
much memory again as the linear layers. Layers with one input (query, key and value; gate and up)
are packed as one product (models/decoder/fused_linear.py). Parameters and their storage stay as
they are: the learner may write them in place.

Decoding reads only the packed copies, so the fingerprint of the parameters does not cover them.
Each copy has its own fingerprint, computed when it is packed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rollick.errors import EngineCorrupt
from rollick.models.decoder.fused_linear import FusedGroup, linear_groups, make_fused
from rollick.models.head.logprobs import OutputHead
from rollick.models.loading.fingerprint import fingerprint
from rollick.types import Fingerprint

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
    return sum(p.nbytes for p in parameters) <= MEMORY_SHARE * _available_bytes()


def pack_linears(module: nn.Module) -> list[tuple[FusedGroup, PackedWeights]]:
    """Make every nn.Linear inside, except the output head, compute with a packed weight. A weight
    is packed at its first use."""
    packed = [(layers, PackedWeights(layers)) for layers in list(linear_groups(module))]
    return [(make_fused(layers, weights), weights) for layers, weights in packed]


def drop_packed(packed: Sequence[tuple[FusedGroup, PackedWeights]]) -> None:
    for group, weights in packed:
        group.forget_outputs()
        weights.drop()


class PackedCopy:
    """A weight in oneDNN's layout with its bias, and the fingerprint of both."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = pack_weight(weight)
        self.bias = bias
        self._expected = self._fingerprint()

    def product(self, input: Tensor) -> Tensor:
        return packed_product(input, self.weight, self.bias)

    @property
    def is_intact(self) -> bool:
        return self._fingerprint() == self._expected

    def _fingerprint(self) -> Fingerprint:
        biases = [] if self.bias is None else [("bias", self.bias)]
        return fingerprint([("weight", packed_bytes(self.weight)), *biases])


class PackedWeights:
    """The weights of layers with one input, packed as one."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.packed: PackedCopy | None = None
        self._layers = layers

    def drop(self) -> None:
        self.packed = None

    def product(self, input: Tensor) -> Tensor:
        if self.packed is None:
            weights = [layer.weight.detach() for layer in self._layers]
            optional: list[Tensor | None] = [layer.bias for layer in self._layers]
            biases = [bias.detach() for bias in optional if bias is not None]
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            self.packed = PackedCopy(weight, torch.cat(biases) if biases else None)
        return self.packed.product(input)


class PackedHead:
    """An output head's weight, packed in float32 for any dtype of the module."""

    def __init__(self) -> None:
        self.packed: PackedCopy | None = None

    def logits(self, hidden_RD: Tensor, head: OutputHead) -> Tensor:
        if self.packed is None:
            bias_V = None if head.bias_V is None else head.bias_V.detach().float()
            self.packed = PackedCopy(head.weight_VD.detach().float(), bias_V)
        return head.finish(self.packed.product(hidden_RD.float()))

    def drop(self) -> None:
        self.packed = None


def check_copies(weights: Iterable[PackedWeights | PackedHead]) -> None:
    """Raises EngineCorrupt if a copy has changed since it was packed."""
    copies = [item.packed for item in weights if item.packed is not None]
    num_damaged = sum(not copy.is_intact for copy in copies)
    if num_damaged:
        raise EngineCorrupt(
            f"{num_damaged} of {len(copies)} packed copies of the engine's weights have another "
            "fingerprint than when they were packed: its memory was damaged",
            fix="check the machine's memory if it happens again",
        )


def pack_weight(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def packed_bytes(packed: Tensor) -> Tensor:
    """The memory of a packed weight; it must outlive the result."""
    size, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def packed_product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _has_operators() -> bool:
    """Whether torch has the operators, which are internal to its compiler and may change."""
    try:
        row, copy = torch.ones(1, 16), PackedCopy(torch.eye(16))
        return copy.is_intact and bool((copy.product(row) == row).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _available_bytes() -> int:
    """Memory available without swapping, reclaimable file cache included."""
    source = Path("/proc/meminfo")
    for line in source.read_text().splitlines() if source.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNKNOWN_MEMORY
