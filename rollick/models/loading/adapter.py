"""Low-rank adapters as tensors: their names, and how an adapter is merged into its weight.

An adapter of a weight W [O, I] is a pair A [R, I] and B [O, R]; with it the layer computes with
W + scale * B A. Learner, engine and export all merge with this code, so they get the same bits.

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
"""Between a layer's name and that of its frozen weight, in a module with adapters."""
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapter of the weight `name`."""

    name: str
    a_RI: Tensor
    b_OR: Tensor

    def merged(self, base_OI: Tensor, *, scale: float, out: Tensor | None = None) -> Tensor:
        """base + scale * B A, summed in float32 (float64 stays) and rounded once, into `out`."""
        with torch.no_grad():
            sum_dtype = torch.float64 if base_OI.dtype is torch.float64 else torch.float32
            base, a_RI, b_OR = (x.to(sum_dtype) for x in (base_OI, self.a_RI, self.b_OR))
            sum_OI = torch.addmm(base, b_OR, a_RI, alpha=scale)
            return sum_OI.to(base_OI.dtype) if out is None else out.copy_(sum_OI)


def public_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    return name.replace(BASE + ".", ".")


def base_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without adapters under their public names; tied ones under each name."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not is_adapter(name):
            yield public_name(name), parameter


def adapted_weights(module: nn.Module) -> frozenset[str]:
    """Public names of the weights that have an adapter."""
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
    """The adapters in a stream of weights. Raises unless each fits one of the `targets`."""
    tensors = dict(pairs)
    adapters: list[Adapter] = []
    for name, a_RI in list(tensors.items()):
        if name.endswith(A + WEIGHT):
            layer = name.removesuffix(A + WEIGHT)
            adapters.append(Adapter(layer + WEIGHT, a_RI, tensors.pop(layer + B + WEIGHT, a_RI)))
    unfit = [adapter.name for adapter in adapters if not _fits(adapter, targets.get(adapter.name))]
    unknown = [name for name in tensors if not name.endswith(A + WEIGHT)]
    if unfit or unknown:
        raise WeightError(
            f"the adapters do not fit the model: {len(unfit)} without a weight of their shape "
            f"{unfit[:3]}, {len(unknown)} tensors that belong to no adapter {unknown[:3]}",
            fix="publish adapters that were trained on the engine's model",
        )
    return adapters


def _fits(adapter: Adapter, weight: Tensor | None) -> bool:
    a_RI, b_OR = adapter.a_RI, adapter.b_OR
    return (
        weight is not None
        and a_RI.ndim == b_OR.ndim == weight.ndim == 2
        and (b_OR.shape[0], a_RI.shape[1]) == tuple(weight.shape)
        and a_RI.shape[0] == b_OR.shape[1]
    )
