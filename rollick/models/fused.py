"""Linear layers that read one input, as one product, over parameters that stay what they are.

A decoder calls query, key and value one after another with one input, and gate and up. On a GPU
three small products take longer than one large one. Here the weights of such siblings lie one
behind another in one storage, and each layer's parameter is a part of it: names, shapes and values
stay, and an optimizer that writes the parts in place writes the whole.

    fuse_storage(module)    the owner's parameters become neighbours (a learner's, before it shares)
    use_fused(module)       layers whose parameters are neighbours compute together; others alone
    use_alone(module)       all compute alone: needed before parameters give their memory back

Whoever moves a module to another device parts them: call the first two again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that a decoder calls one after another with one input."""


def fuse_storage(module: nn.Module) -> None:
    """Move the weights (and biases) of siblings behind one another, where their shapes allow."""
    for layers in sibling_linears(module):
        for parts in _parameters(layers):
            if whole_of(parts) is None:
                _lay_together(parts)


def use_fused(module: nn.Module) -> int:
    """Siblings whose parameters are neighbours compute together from now on; how many families."""
    use_alone(module)
    count = 0
    for layers in sibling_linears(module):
        wholes = [whole for parts in _parameters(layers) if (whole := whole_of(parts)) is not None]
        if len(wholes) < len(_parameters(layers)):
            continue
        family = Family(layers, *wholes)
        for place, layer in enumerate(layers):
            layer.__class__ = FusedLinear
            layer.__dict__["family"], layer.__dict__["place"] = family, place
        count += 1
    return count


def use_alone(module: nn.Module) -> None:
    """Every layer is an nn.Linear again; a family would keep the memory of its weights."""
    for part in module.modules():
        if type(part) is FusedLinear:
            layer: Any = part
            layer.__class__ = nn.Linear
            del layer.__dict__["family"], layer.__dict__["place"]


class Family:
    """Siblings over one weight. The first one called with an input computes the output of all."""

    def __init__(
        self, layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.sizes = [layer.out_features for layer in layers]
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def output(self, place: int, input: Tensor) -> Tensor:
        if self.input is not input:
            self.outputs = linear(input, self.weight, self.bias).split(self.sizes, dim=-1)
            self.input = input
        output = self.outputs[place]
        if place == len(self.sizes) - 1:
            # The last one called by every decoder known. Another order only computes once more.
            self.input = None
            self.outputs = ()
        return output


class FusedLinear(nn.Linear):
    """nn.Linear that computes with its siblings; made by `use_fused`. Has no gradient."""

    family: Family
    place: int

    def forward(self, input: Tensor) -> Tensor:
        return self.family.output(self.place, input)


def sibling_linears(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """Plain linear layers with one input width and one dtype, by SIBLINGS."""
    for part in module.modules():
        for names in SIBLINGS:
            layers: list[Any] = [getattr(part, name, None) for name in names]
            if all(type(layer) in (nn.Linear, FusedLinear) for layer in layers) and _alike(layers):
                yield layers


def _alike(layers: Sequence[Any]) -> bool:
    return (
        len({id(layer.weight) for layer in layers}) == len(layers)
        and len({layer.in_features for layer in layers}) == 1
        and len({layer.bias is None for layer in layers}) == 1
        and len({(layer.weight.dtype, layer.weight.device) for layer in layers}) == 1
        and all(layer.weight.is_contiguous() for layer in layers)
    )


def _parameters(layers: Sequence[Any]) -> list[list[nn.Parameter]]:
    """The weights of all layers, and their biases if they have any."""
    weights = [layer.weight for layer in layers]
    return [weights] if layers[0].bias is None else [weights, [layer.bias for layer in layers]]


def _lay_together(parts: Sequence[nn.Parameter]) -> None:
    whole = torch.cat([part.data for part in parts])
    for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = place


def whole_of(parts: Sequence[nn.Parameter]) -> Tensor | None:
    """One tensor over parameters that lie behind one another; None where they do not."""
    first = parts[0].detach()
    if first.is_meta:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
