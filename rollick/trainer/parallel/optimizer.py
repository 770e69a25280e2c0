"""The optimizer of sharded parameters: each rank updates its shards.

    gradients (FSDP has summed them over shards) -> this rank's shard of each, summed over `tensor`
    where needed -> the norm over all ranks -> AdamW on the shards, in place

The shards are the memory of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollick.config.schema import Recipe
from rollick.trainer.parallel.checkpoint import like
from rollick.trainer.parallel.collectives import all_sum
from rollick.trainer.parallel.mesh import Grid
from rollick.trainer.parallel.shard import local_tensor, replica_count
from rollick.trainer.parallel.tensor import summed_parameters
from rollick.trainer.strategy import OptimReport
from rollick.trainer.trainable_model import policy_optimizer


class ShardedOptimizer:
    """Updates the parameters of a sharded module. All ranks make the same calls."""

    def __init__(self, tree: nn.Module, recipe: Recipe, *, grid: Grid, device: str) -> None:
        self.grid = grid
        self.device = device
        self.parameters = dict(tree.named_parameters())
        divided = grid.shape.tensor > 1
        self._summed = summed_parameters(tree, self.parameters) if divided else set[str]()
        named = self.parameters.items()
        shards = ((name, nn.Parameter(local_tensor(value))) for name, value in named)
        self.parts = policy_optimizer(shards, recipe, total_norm=self._total_norm)
        # Allocated at the start, so that a checkpoint can be read into it.
        for master in self.parts.masters.values():
            self.parts.adamw.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self) -> OptimReport:
        """One update, clipped by the norm over all ranks; skipped by all ranks or none."""
        for name, master in self.parts.masters.items():
            master.grad = self.gradient(name)
        report = self.parts.step()
        self.drop_gradients()
        return report

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Masters and moments as sharded tensors over their live memory."""
        state: dict[str, Tensor] = {}
        for name, local in self.parts.tensors().items():
            kind, _, parameter = name.partition(".")
            if kind != "step":
                state[name] = like(self.parameters[parameter].detach(), local)
        return state

    def resume(self, steps: int) -> None:
        """Continue after this many steps, with values read into the tensors of `state`."""
        self.parts.steps = steps
        for held in self.parts.adamw.state.values():
            held["step"].fill_(steps)
        self.drop_gradients()

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """This rank's shard of a parameter's gradient.

        Ranks of `tensor` have the full gradient of undivided parameters (averaged here, to be equal
        bit for bit), but only a part of it if each uses the parameter for its own heads.
        """
        parameter, ranks = self.parameters[name], self.grid.shape.tensor
        if parameter.grad is None:
            return None
        gradient = local_tensor(parameter.grad)
        if ranks == 1 or replica_count(parameter) == 1:
            return gradient
        gradient = all_sum(gradient.clone(), self.grid.tensors.get_group())
        return gradient if name in self._summed else gradient.div_(ranks)

    def _total_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Over all ranks; a shard that several of them hold counts once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            square = gradient.double().square().sum() / replica_count(self.parameters[name])
            squares += square.to(self.device)
        dist.all_reduce(squares)
        # On the masters' device: they may be offloaded.
        some = next(iter(self.parts.masters.values()))
        return squares.sqrt().to(some.device, some.dtype)
