"""The critic worker: predicts a value per token, and trains on the returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rollick.algorithms.losses import ValueInputs
from rollick.algorithms.objective import Loss
from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import RlRecipe
from rollick.data.batch import Batch, TokenValues
from rollick.errors import ConfigError
from rollick.roles.protocols import CriticRole
from rollick.roles.reports import CriticReport
from rollick.trainer.critic import LocalCritic
from rollick.trainer.parallel.shares import minibatches
from rollick.trainer.strategy import ValueLossFn
from rollick.types import BoolArray, FloatArray
from rollick.workers.learner import train_on
from rollick.workers.model_worker import TrainedWorker, builds_worker


class CriticWorker(TrainedWorker[LocalCritic], CriticRole):
    def __init__(self, strategy: LocalCritic, recipe: RlRecipe) -> None:
        super().__init__(strategy)
        self.recipe = recipe
        self._loss = _bind_loss(recipe)
        self._value_components = [
            index for index, each in enumerate(recipe.algorithms) if "values" in each.needs
        ]

    def values(self, batch: Batch) -> TokenValues:
        return self.strategy.values(batch)

    def train(self, batch: Batch) -> CriticReport:
        if batch.values_N is None or batch.returns_N is None:
            message = "the critic needs old values and returns, but the batch has none"
            raise ConfigError(message, fix="annotate the batch and assign credit before training")
        mask_N = self._value_tokens(batch)
        explained = explained_variance(batch.values_N[mask_N], batch.returns_N[mask_N])
        if not mask_N.any():
            return CriticReport(None, explained)
        train, keep_groups = self.recipe.train, self.recipe.compares_pairs
        weighted = select_value_tokens(batch, mask_N)
        parts = tuple(minibatches(weighted, count=train.minibatches, keep_groups=keep_groups))
        report = train_on(
            parts * train.epochs,
            lambda part: self.strategy.forward_backward(part, self._loss),
            self.strategy.step,
        )
        return CriticReport(report, explained)

    def _value_tokens(self, batch: Batch) -> BoolArray:
        """Trained tokens of algorithms that use values; only these have a return."""
        if batch.component_N is None:
            return batch.loss_mask_N
        return batch.loss_mask_N & np.isin(batch.component_N, self._value_components)


def select_value_tokens(batch: Batch, mask_N: BoolArray) -> Batch:
    """Keep the samples with a token in `mask_N`, weighted for a mean over these tokens. The
    denominator counts the full batch, before it is split into mini-batches. The policy's weights
    are not used: they include corrections and coefficients of the policy loss."""
    weights_N = np.where(mask_N, 1 / np.count_nonzero(mask_N), 0.0)
    narrowed = replace(batch, loss_mask_N=mask_N, weights_N=weights_N)
    return narrowed.take(np.flatnonzero(narrowed.trained_B).tolist())


def explained_variance(values_T: FloatArray, returns_T: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 if all returns are equal."""
    returns_T = np.asarray(returns_T, np.float64)
    if not len(returns_T) or returns_T.min() == returns_T.max():
        return 0.0
    return float(1 - np.var(returns_T - values_T) / np.var(returns_T))


def _bind_loss(recipe: RlRecipe) -> ValueLossFn:
    options = recipe.critic.loss
    function: Any = resolve("value_losses", options.name)

    def loss(inputs: ValueInputs) -> Loss:
        output = function(inputs, options)
        return Loss((inputs.weights_T * output.loss_T).sum(), output.sums)

    return loss


@builds_worker
def create(context: HostContext, rank: int, recipe: RlRecipe) -> CriticWorker:
    return CriticWorker(LocalCritic(recipe, device=context.device), recipe)
