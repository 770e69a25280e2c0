"""Linear layers that read one input, computed as one matmul. Their parameters keep their names,
shapes and values.

A decoder calls query, key and value one after another with one input, and so gate and up. One large
matmul is faster than several small ones.

    fuse_storage(module)       makes sibling weights adjacent; call it before parameters are shared
    fuse_linears(module)       fuses siblings whose weights are adjacent
    unfuse_linears(module)     undoes this; call it before the parameters free their memory

The native engine on the CPU fuses with packed copies of the weights instead: packed_linear.py.
A move to another device separates the weights: call the first two again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that a decoder calls one after another with one input."""


class FusedWeights(Protocol):
    """The weights of all layers of a group, in a form for one matmul."""

    def product(self, input: Tensor) -> Tensor:
        """The concatenated outputs of all layers, without gradient."""
        ...


class AdjacentWeights(NamedTuple):
    """One view over weights (and biases) that are adjacent in memory."""

    weight: Tensor
    bias: Tensor | None = None

    def product(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class FusedGroup:
    """Layers with one input. The first one called with an input computes the output of all."""

    def __init__(self, layers: Sequence[nn.Linear], weights: FusedWeights) -> None:
        self.layers = tuple(layers)
        self.weights = weights
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, index: int, input: Tensor) -> Tensor:
        if self._input is not input:
            self._outputs = self.weights.product(input).split(self._sizes, dim=-1)
            self._input = input
        output = self._outputs[index]
        if index == len(self._sizes) - 1:
            # All supported decoders call this layer last. Another order only repeats the matmul.
            self.forget_outputs()
        return output

    def forget_outputs(self) -> None:
        self._input = None
        self._outputs = ()


class FusedLinear(nn.Linear):
    """nn.Linear that computes with its group, or by itself if it needs a gradient."""

    group: FusedGroup
    index: int

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad):
            return linear(input, self.weight, self.bias)
        return self.group.output(self.index, input)


def make_fused(layers: Sequence[nn.Linear], weights: FusedWeights) -> FusedGroup:
    """Turn the layers into one group, in place."""
    group = FusedGroup(layers, weights)
    for index, layer in enumerate(layers):
        layer.__class__ = FusedLinear
        layer.__dict__["group"], layer.__dict__["index"] = group, index
    return group


def fused_weights(layers: Sequence[nn.Linear]) -> FusedWeights | None:
    """The weights of these layers if they form a group."""
    first = layers[0]
    if not isinstance(first, FusedLinear) or list(first.group.layers) != list(layers):
        return None
    return first.group.weights


def fuse_storage(module: nn.Module) -> None:
    """Make the weights (and biases) of siblings adjacent, where their shapes allow it."""
    for layers in sibling_linears(module):
        for parameters in _parameters(layers):
            if adjacent_view(parameters) is None:
                fused = torch.cat([parameter.data for parameter in parameters])
                views = fused.split([len(parameter) for parameter in parameters])
                for parameter, view in zip(parameters, views, strict=True):
                    parameter.data = view


def fuse_linears(module: nn.Module) -> int:
    """Fuse siblings whose parameters are adjacent. Returns the number of groups."""
    unfuse_linears(module)
    num_groups = 0
    for layers in sibling_linears(module):
        views = [adjacent_view(parameters) for parameters in _parameters(layers)]
        weight_and_bias = [view for view in views if view is not None]
        if len(weight_and_bias) == len(views):
            make_fused(layers, AdjacentWeights(*weight_and_bias))
            num_groups += 1
    return num_groups


def unfuse_linears(module: nn.Module) -> None:
    """Turn every layer back into nn.Linear, because a group keeps the memory of its weights."""
    for part in module.modules():
        if type(part) is FusedLinear:
            layer: Any = part
            layer.__class__ = nn.Linear
            del layer.__dict__["group"], layer.__dict__["index"]


def sibling_linears(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """Groups of linear layers that one matmul can compute."""
    for part in module.modules():
        for names in _SIBLINGS:
            layers: list[Any] = [getattr(part, name, None) for name in names]
            are_linear = all(type(layer) in (nn.Linear, FusedLinear) for layer in layers)
            if are_linear and _can_fuse(layers):
                yield layers


def linear_groups(module: nn.Module) -> Iterator[list[nn.Linear]]:
    """All linear layers except the output head: siblings as one group, each other one by itself."""
    grouped: set[int] = set()
    for layers in sibling_linears(module):
        grouped |= {id(layer) for layer in layers}
        yield layers
    head: Any = module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    for part in module.modules():
        if not isinstance(part, nn.Linear) or part is head or id(part) in grouped:
            continue
        if type(part) in (nn.Linear, FusedLinear):
            yield [part]


def adjacent_view(parameters: Sequence[Tensor]) -> Tensor | None:
    """One tensor over parameters that follow each other in memory; None if they do not."""
    first = parameters[0].detach()
    if first.is_meta:
        return None
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or parameter.untyped_storage().data_ptr() != storage:
            return None
        end += parameter.nbytes
    rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _can_fuse(layers: Sequence[Any]) -> bool:
    return (
        len({id(layer.weight) for layer in layers}) == len(layers)
        and len({layer.in_features for layer in layers}) == 1
        and len({layer.bias is None for layer in layers}) == 1
        and len({(layer.weight.dtype, layer.weight.device) for layer in layers}) == 1
        and all(layer.weight.is_contiguous() for layer in layers)
    )


def _parameters(layers: Sequence[Any]) -> list[list[nn.Parameter]]:
    """The weights of all layers, then their biases if they have any."""
    weights = [layer.weight for layer in layers]
    return [weights] if layers[0].bias is None else [weights, [layer.bias for layer in layers]]
