"""The optimizer of parameters that are spread over ranks: each rank steps the parts that it holds.

    gradients (FSDP has summed them over shards) -> this rank's part of each, summed over `tensor`
    where that is needed -> the norm of the whole gradient -> AdamW on the parts, in place

The parts are the memory of the parameters, so a step is seen by the next forward. Does not own how
parameters are spread (shard.py), or the files of its state (checkpoint.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from rollick.config.schema import Recipe
from rollick.train.optimizer import MasterAdamW
from rollick.train.parallel.checkpoint import like
from rollick.train.parallel.exchange import all_sum
from rollick.train.parallel.mesh import Grid
from rollick.train.parallel.shard import holders, local_of
from rollick.train.parallel.tensor import summed_parameters
from rollick.train.strategy import OptimReport


class ShardedOptimizer:
    """Steps the parameters of a tree that is sharded over a grid. All ranks call it alike."""

    def __init__(self, tree: nn.Module, recipe: Recipe, *, grid: Grid, device: str) -> None:
        self.grid = grid
        self.device = device
        self.parameters = dict(tree.named_parameters())
        self._summed = (
            summed_parameters(tree, self.parameters) if grid.shape.tensor > 1 else set[str]()
        )
        train = recipe.train
        self.parts = MasterAdamW(
            ((name, nn.Parameter(local_of(value))) for name, value in self.parameters.items()),
            train.optimizer,
            schedule=train.schedule,
            total_steps=recipe.optimizer_steps,
            total_norm=self._total_norm,
        )
        # There from the start, so that a checkpoint has memory to be read into.
        for master in self.parts.masters.values():
            self.parts.adamw.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self) -> OptimReport:
        """By the norm of the whole gradient; skipped by all ranks or by none."""
        for name, master in self.parts.masters.items():
            master.grad = self._gradient(name)
        report = self.parts.step()
        self.drop_gradients()
        return report

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was accumulated, as tensors that lie over ranks as the parameters do."""
        for name, parameter in self.parameters.items():
            gradient = self._gradient(name)
            if gradient is not None:
                yield name, like(parameter, gradient)

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments as tensors over all ranks, on the memory that they live in."""
        state: dict[str, torch.Tensor] = {}
        for name, local in self.parts.tensors().items():
            kind, _, parameter = name.partition(".")
            if kind != "step":
                state[name] = like(self.parameters[parameter].detach(), local)
        return state

    def resume(self, steps: int) -> None:
        """Go on after so many steps, with what was read into the tensors of `state`."""
        self.parts.steps = steps
        for held in self.parts.adamw.state.values():
            held["step"].fill_(steps)
        self.drop_gradients()

    @torch.no_grad()
    def _gradient(self, name: str) -> torch.Tensor | None:
        """This rank's part of a parameter's gradient.

        Ranks of `tensor` have whole gradients of what they do not cut (made equal bit for bit
        here), but only parts of those that each uses for its own heads.
        """
        parameter, ranks = self.parameters[name], self.grid.shape.tensor
        if parameter.grad is None:
            return None
        gradient = local_of(parameter.grad)
        if ranks == 1 or holders(parameter) == 1:
            return gradient
        gradient = all_sum(gradient.clone(), self.grid.tensors.get_group())
        return gradient if name in self._summed else gradient.div_(ranks)

    def _total_norm(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Over all ranks; a part that several of them hold counts once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            square = gradient.double().square().sum() / holders(self.parameters[name])
            squares += square.to(self.device)
        dist.all_reduce(squares)
        # Where the masters are: they may be offloaded.
        some = next(iter(self.parts.masters.values()))
        return squares.sqrt().to(some.device, some.dtype)
