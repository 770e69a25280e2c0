"""Linear layers over packed weights: the fastest matrix product that torch has on the CPU for the
few rows of a decode step.

A product of 32 rows with a weight as the model stores it spends a good part of its time on bringing
the weight into the order in which the kernel reads it. Here oneDNN does that once, after each
change of the weights, and keeps the result: as much memory again as the linear layers have. Layers
that read one input (query, key and value; gate and up) are packed together and make one product.

    pack_linears(module) -> Packed -> forwards use packed weights; Packed.drop() after a change, and
    the next forward packs anew

Names, parameters and their storage stay as they are: the learner may write them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that a decoder calls one after another with one input."""

MEMORY_SHARE = 0.5
"""Part of the memory that is free which packed weights may take."""

_UNKNOWN_MEMORY = 8 << 30
_DTYPES = (torch.float32, torch.bfloat16)


class Packed:
    """The packed weights of a module's linear layers, made when first needed."""

    def __init__(self, families: Sequence[_Family]) -> None:
        self._families = families

    @property
    def bytes(self) -> int:
        return sum(family.bytes for family in self._families)

    def drop(self) -> None:
        """The weights changed, or memory is short: the next forward packs anew."""
        for family in self._families:
            family.drop()


def can_pack(module: nn.Module) -> bool:
    """Whether torch has the kernels, the module is on the CPU, and there is memory for a copy."""
    parameters = list(module.parameters())
    fits = all(p.device.type == "cpu" and p.dtype in _DTYPES for p in parameters)
    if not fits or not torch.backends.mkldnn.is_available() or not _has_operators():
        return False
    return sum(p.nbytes for p in parameters) <= MEMORY_SHARE * _free_bytes()


def pack_linears(module: nn.Module) -> Packed:
    """Make every nn.Linear inside compute with a packed weight, in place."""
    families = [_Family(layers) for layers in linear_families(module)]
    for family in families:
        for layer in family.layers:
            layer.__class__ = PackedLinear
            layer.__dict__["family"] = family
    return Packed(families)


class PackedLinear(nn.Linear):
    """nn.Linear over a packed weight; made by `pack_linears`."""

    family: _Family

    def forward(self, input: Tensor) -> Tensor:
        return self.family.output(self, input)


class PackedHead:
    """A vocabulary matrix, packed in float32 whatever the module's dtype."""

    def __init__(self) -> None:
        self._packed: Tensor | None = None

    def logits(self, hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        if self._packed is None:
            self._packed = pack_weight(weight_VD.detach().float())
        bias_V = None if bias_V is None else bias_V.float()
        return packed_product(hidden_RD.float(), self._packed, bias_V)

    def drop(self) -> None:
        self._packed = None


class _Family:
    """Layers whose weights are packed as one. The first one called with an input computes the
    output of all, and the others take theirs, if they are called with that very tensor."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = layers
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        return 0 if self._packed is None else sum(layer.weight.nbytes for layer in self.layers)

    def drop(self) -> None:
        self._packed = self._bias = self._input = None
        self._outputs.clear()

    def output(self, layer: nn.Linear, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (input.requires_grad or layer.weight.requires_grad):
            return linear(input, layer.weight, layer.bias)
        if len(self.layers) == 1:
            return self.whole(input)
        if input is not self._input or id(layer) not in self._outputs:
            whole = self.whole(input)
            sizes = [one.out_features for one in self.layers]
            parts = whole.split(sizes, dim=-1)
            self._outputs = {id(one): part for one, part in zip(self.layers, parts, strict=True)}
            self._input = input
        output = self._outputs.pop(id(layer))
        if not self._outputs:
            self._input = None
        return output

    def whole(self, input: Tensor) -> Tensor:
        """The outputs of all layers side by side. No gradient flows through it."""
        if self._packed is None:
            weights = [layer.weight.detach() for layer in self.layers]
            self._packed = pack_weight(weights[0] if len(weights) == 1 else torch.cat(weights))
            biases: list[Tensor | None] = [layer.bias for layer in self.layers]
            given = [bias.detach() for bias in biases if bias is not None]
            self._bias = torch.cat(given) if given else None
        return packed_product(input, self._packed, self._bias)


def linear_families(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """All plain linear layers, siblings together. The output head is packed by who uses it."""
    found: set[int] = set()
    for part in module.modules():
        for names in SIBLINGS:
            layers: list[Any] = [getattr(part, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers) and _alike(layers):
                found |= {id(layer) for layer in layers}
                yield layers
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for part in module.modules():
        if type(part) is nn.Linear and id(part) not in found and part is not head:
            yield [part]


def _alike(layers: Sequence[Any]) -> bool:
    return (
        len({layer.in_features for layer in layers}) == 1
        and len({layer.bias is None for layer in layers}) == 1
        and len({layer.weight.dtype for layer in layers}) == 1
    )


def pack_weight(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def packed_product(input: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _has_operators() -> bool:
    """Both are operators that torch's own compiler uses, and could change with it."""
    try:
        weight, row = torch.eye(16), torch.ones(1, 16)
        return bool((packed_product(row, pack_weight(weight), None) == row).all())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _free_bytes() -> int:
    """Memory that can be had without swapping, what files only occupy included."""
    source = Path("/proc/meminfo")
    for line in source.read_text().splitlines() if source.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNKNOWN_MEMORY
