"""The critic worker: predicts a value per token, and trains on the returns."""

from __future__ import annotations

from typing import Any

from rollick.algorithms.losses import ValueInputs
from rollick.algorithms.objective import Loss
from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import RlRecipe
from rollick.data.batch import Batch, BatchShare, TokenValues
from rollick.roles.protocols import CriticRole
from rollick.roles.reports import TrainReport
from rollick.trainer.critic import LocalCritic
from rollick.trainer.parallel.critic import ShardedCritic
from rollick.trainer.parallel.mesh import Rendezvous
from rollick.trainer.strategy import LossReport, ValueLossFn
from rollick.workers.learner import train_on
from rollick.workers.model_worker import TrainedWorker, builds_worker, join_role


class CriticWorker(TrainedWorker[LocalCritic | ShardedCritic], CriticRole):
    def __init__(self, strategy: LocalCritic | ShardedCritic, recipe: RlRecipe) -> None:
        super().__init__(strategy)
        self.recipe = recipe
        self._loss = _bind_loss(recipe)

    def values(self, batch: Batch) -> TokenValues:
        return self.strategy.values(batch)

    def train(self, share: BatchShare) -> TrainReport:
        parts = share.minibatches * self.recipe.train.epochs
        return train_on(parts, self._forward_backward, self.strategy.step)

    def _forward_backward(self, batch: Batch) -> LossReport:
        return self.strategy.forward_backward(batch, self._loss)


def _bind_loss(recipe: RlRecipe) -> ValueLossFn:
    options = recipe.critic.loss
    function: Any = resolve("value_losses", options.name)

    def loss(inputs: ValueInputs) -> Loss:
        output = function(inputs, options)
        return Loss((inputs.weights_T * output.loss_T).sum(), output.sums)

    return loss


@builds_worker
def create(
    context: HostContext, rank: int, recipe: RlRecipe, rendezvous: Rendezvous | None = None
) -> CriticWorker:
    """Build the critic on its host; with a rendezvous, one rank of a sharded critic."""
    parallel = join_role(context, rank, recipe, "critic", rendezvous)
    if parallel is None:
        return CriticWorker(LocalCritic(recipe, device=context.device), recipe)
    return CriticWorker(ShardedCritic(recipe, parallel, device=context.device), recipe)
