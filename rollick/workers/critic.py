"""The critic: gives the values of a batch's tokens, and learns from the returns."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollick.algorithms.objective import Loss
from rollick.algorithms.value import ValueInputs
from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import Recipe
from rollick.data.batch import Batch, TokenValues
from rollick.errors import ConfigError
from rollick.train.critic import LocalCritic
from rollick.train.strategy import CriticStrategy, LossReport, OptimReport, ValueLossFn
from rollick.types import BoolArray, FloatArray
from rollick.workers.learner import TrainReport, minibatches, train_report
from rollick.workers.memory import Meter


@dataclass(frozen=True, slots=True)
class CriticReport:
    """What training on one batch did. `train` is None if no token of the batch had a return."""

    train: TrainReport | None
    explained_variance: float
    """Of the returns, by the values that the critic gave before it was trained on them."""

    @property
    def changed(self) -> bool:
        """False if every step of the optimizer was skipped."""
        return self.train is None or self.train.changed

    def metrics(self) -> dict[str, float]:
        """Under the names that observe/metrics.py documents."""
        if self.train is None:
            return {}
        return {
            "critic/loss": self.train.loss,
            "critic/explained_variance": self.explained_variance,
            "critic/grad_norm": self.train.grad_norm,
            "critic/lr": self.train.lr,
            "critic/tokens": float(self.train.tokens),
            "critic/skipped_steps": float(self.train.skipped_steps),
            **{f"critic/mean/{name}": value for name, value in self.train.means.items()},
        }


class CriticWorker:
    """The critic role of a host."""

    def __init__(
        self, strategy: CriticStrategy, recipe: Recipe, *, meter: Meter | None = None
    ) -> None:
        self.meter = meter or Meter()
        self.strategy = strategy
        self.recipe = recipe
        self._loss = _bound_loss(recipe)
        self._with_values = [
            number for number, part in enumerate(recipe.algorithms) if "values" in part.needs
        ]

    def values(self, batch: Batch) -> TokenValues:
        return self.strategy.values(batch)

    def train(self, batch: Batch) -> CriticReport:
        """All epochs and mini-batches of one batch; those of the policy."""
        if batch.values_N is None or batch.returns_N is None:
            raise ConfigError(
                "a critic is trained on old values and returns, and the batch has none",
                fix="annotate the batch and assign its credit before it is trained on",
            )
        begun = time.perf_counter()
        mine_N = self._mine(batch)
        explained = explained_variance(batch.values_N[mine_N], batch.returns_N[mine_N])
        losses: list[LossReport] = []
        steps: list[OptimReport] = []
        for part in minibatches(weighed(batch, mine_N), self.recipe) if mine_N.any() else ():
            losses.append(self.strategy.forward_backward(part, self._loss))
            steps.append(self.strategy.step())
        seconds = time.perf_counter() - begun
        report = train_report(losses, steps, seconds=seconds) if steps else None
        return CriticReport(report, explained)

    def save(self, path: Path) -> None:
        self.strategy.save(path)

    def load(self, path: Path) -> None:
        self.strategy.load(path)

    def sleep(self) -> None:
        self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()

    def peak_memory(self) -> int:
        """Bytes that this process held at the most since the role began to be built."""
        return self.meter.peak()

    def _mine(self, batch: Batch) -> BoolArray:
        """Trained tokens of the algorithms that ask for values: only these have a return."""
        if batch.component_N is None:
            return batch.loss_mask_N
        return batch.loss_mask_N & np.isin(batch.component_N, self._with_values)


def weighed(batch: Batch, mine_N: BoolArray) -> Batch:
    """The samples with a token of `mine_N`, trained on these tokens as a mean over all of them.

    The denominator is that of the whole batch, before it is cut into mini-batches, and the
    critic's own: the policy's weights have corrections and coefficients in them, which say
    nothing of how well a value is known.
    """
    weights_N = np.where(mine_N, 1 / np.count_nonzero(mine_N), 0.0)
    narrowed = replace(batch, loss_mask_N=mine_N, weights_N=weights_N)
    return narrowed.take(np.flatnonzero(narrowed.trained_B).tolist())


def explained_variance(values_T: FloatArray, returns_T: FloatArray) -> float:
    """1 - Var(return - value) / Var(return); 0 where all returns are alike."""
    returns_T = np.asarray(returns_T, np.float64)
    if not len(returns_T) or returns_T.min() == returns_T.max():
        return 0.0
    return float(1 - np.var(returns_T - values_T) / np.var(returns_T))


def _bound_loss(recipe: Recipe) -> ValueLossFn:
    options = recipe.critic.loss
    function: Any = resolve("value_losses", options.name)

    def loss(inputs: ValueInputs) -> Loss:
        found = function(inputs, options)
        return Loss((inputs.weights_T * found.loss_T).sum(), found.sums)

    return loss


def create(context: HostContext, rank: int, recipe: Recipe) -> CriticWorker:
    """Build the critic on its host."""
    meter = Meter()
    torch.set_num_threads(context.threads)
    return CriticWorker(LocalCritic(recipe, device=context.device), recipe, meter=meter)
