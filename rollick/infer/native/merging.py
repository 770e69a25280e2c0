"""How a native engine takes adapters: its module always holds the sums of weights and adapters.

A sum cannot be taken back without rounding, so the weights that adapters were added to are kept,
and every new version is added to them afresh. In the learner's own process the learner holds them;
elsewhere the engine keeps a copy, on its device, of those that get adapters.

    take(adapters) -> check all -> module = kept + scale * B A, in place
    forget()       -> the module's weights are whole ones again: nothing is kept
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollick.infer.engine import VerifiedWeights
from rollick.models.adapter import adapters_of


class Merging:
    """The weights of a module without adapters, as far as it has them added."""

    def __init__(self, module: nn.Module, lent: Iterable[tuple[str, Tensor]] = ()) -> None:
        """`lent` are such weights that somebody else keeps; they never change."""
        self.module = module
        self.lent = dict(lent)
        self.kept: dict[str, Tensor] = {}

    def take(self, weights: VerifiedWeights) -> None:
        """Add adapters; WeightError, and nothing is done, if one does not fit.

        A weight that had an adapter before and has none now gets its old value back.
        """
        assert weights.scale is not None
        targets = dict(self.module.named_parameters())
        adapters = adapters_of(weights.pairs, targets)
        with torch.no_grad():
            for name in self.kept.keys() - {adapter.name for adapter in adapters}:
                targets[name].copy_(self.kept.pop(name))
            for adapter in adapters:
                target = targets[adapter.name]
                base = self._base(adapter.name, target)
                adapter.merged(base, scale=weights.scale, out=_own_memory(target))

    def forget(self) -> None:
        """The module has whole weights of its own."""
        self.kept.clear()

    def move(self, device: str) -> None:
        """What is kept goes where the module goes."""
        self.kept = {name: weight.to(device) for name, weight in self.kept.items()}

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """All weights without adapters, tied ones once."""
        held: Mapping[str, Tensor] = self.lent | self.kept
        for name, parameter in self.module.named_parameters():
            yield name, held.get(name, parameter.detach())

    def _base(self, name: str, target: Tensor) -> Tensor:
        if name not in self.kept:
            self.kept[name] = self.lent[name] if name in self.lent else target.detach().clone()
        return self.kept[name]


def _own_memory(target: nn.Parameter) -> Tensor:
    """The parameter's own memory, to be written; one in adopted memory gets some."""
    parameter: Any = target
    if getattr(parameter, "is_adopted", False):
        parameter.data, parameter.is_adopted = torch.empty_like(target), False
    return parameter.data
