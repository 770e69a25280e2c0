"""Low-rank adapters as plain numbers: how they are named, and how one is added to its weight. Pure.

An adapter of a weight W [O, I] is a pair A [R, I] and B [O, R]; with it the layer computes with
W + scale * B A. Learner, engine and export all add it here, so that all of them get the same bits.
Knows nothing of how adapters are trained (train/lora.py) or of who keeps W (infer/native/merging).

    model.layers.0.self_attn.q_proj.weight              W, under its public name
    model.layers.0.self_attn.q_proj.lora_A.weight       A
    model.layers.0.self_attn.q_proj.lora_B.weight       B
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollick.errors import WeightError

A, B = ".lora_A", ".lora_B"
BASE = ".base_layer"
"""What a module with adapters has between a layer's name and that of its frozen weight."""
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """What is added to one weight; `name` is that of the weight."""

    name: str
    a_RI: Tensor
    b_OR: Tensor

    def merged(self, base_OI: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """base + scale * B A, summed in float32 (float64 stays) and rounded once, into `out`."""
        with torch.no_grad():
            wide = torch.float64 if base_OI.dtype is torch.float64 else torch.float32
            sum_OI = torch.addmm(
                base_OI.to(wide), self.b_OR.to(wide), self.a_RI.to(wide), alpha=scale
            )
            return sum_OI.to(base_OI.dtype) if out is None else out.copy_(sum_OI)


def public_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(BASE + ".", ".")


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the model itself under their public names, tied ones under each name."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not is_adapter(name):
            yield public_name(name), parameter


def adapted_weights(module: nn.Module) -> frozenset[str]:
    """Public names of the weights that have an adapter; none in a plain model."""
    return frozenset(
        public_name(name) for name, _ in module.named_parameters() if name.endswith(BASE + WEIGHT)
    )


def is_adapter(name: str) -> bool:
    return f"{A}." in name or f"{B}." in name


def adapter_pairs(adapters: Iterable[Adapter]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of adapters as a stream of weights."""
    for adapter in adapters:
        layer = adapter.name.removesuffix(WEIGHT)
        yield f"{layer}{A}{WEIGHT}", adapter.a_RI
        yield f"{layer}{B}{WEIGHT}", adapter.b_OR


def adapters_of(
    pairs: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]
) -> list[Adapter]:
    """The adapters in such a stream. WeightError unless each fits one of the `targets`."""
    given = dict(pairs)
    found = [
        Adapter(name.removesuffix(A + WEIGHT) + WEIGHT, a_RI, given.pop(_partner(name), a_RI))
        for name, a_RI in list(given.items())
        if name.endswith(A + WEIGHT)
    ]
    wrong = [adapter.name for adapter in found if not _fits(adapter, targets.get(adapter.name))]
    strangers = [name for name in given if not name.endswith(A + WEIGHT)]
    if wrong or strangers:
        raise WeightError(
            f"the adapters do not fit the model: {len(wrong)} without a weight of their shape "
            f"{wrong[:3]}, {len(strangers)} tensors that are no part of one {strangers[:3]}",
            fix="publish adapters that were trained on the engine's model",
        )
    return found


def _partner(name: str) -> str:
    return name.removesuffix(A + WEIGHT) + B + WEIGHT


def _fits(adapter: Adapter, weight: Tensor | None) -> bool:
    a_RI, b_OR = adapter.a_RI, adapter.b_OR
    return (
        weight is not None
        and a_RI.ndim == b_OR.ndim == weight.ndim == 2
        and (b_OR.shape[0], a_RI.shape[1]) == tuple(weight.shape)
        and a_RI.shape[0] == b_OR.shape[1]
    )
