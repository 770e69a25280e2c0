"""The learner: takes batches, makes optimizer steps, gives log-probs and weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from rollick.algorithms.objective import build_objective
from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.models.load import fingerprint
from rollick.train.strategy import LossFn, LossReport, OptimReport, TrainStrategy
from rollick.types import Fingerprint, FloatArray, PolicyVersion, stable_hash
from rollick.weights.channels.host import WeightManifest, write_weights


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What training on one batch did: means over its trained tokens, the last optimizer step."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    optimizer_steps: int
    skipped_steps: int
    means: dict[str, float] = field(default_factory=dict[str, float])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def changed(self) -> bool:
        """Whether the weights are other ones than before: a skipped step publishes nothing."""
        return self.skipped_steps < self.optimizer_steps

    def metrics(self) -> dict[str, float]:
        """Under the names that observe/metrics.py documents."""
        return {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/lr": self.lr,
            "train/tokens": float(self.tokens),
            "train/skipped_steps": float(self.skipped_steps),
            **{f"train/mean/{name}": value for name, value in self.means.items()},
            **{f"train/max/{name}": value for name, value in self.maxima.items()},
        }


class LearnerWorker:
    """The policy role of a host."""

    def __init__(self, strategy: TrainStrategy, objective: LossFn, recipe: Recipe) -> None:
        self.strategy = strategy
        self.objective = objective
        self.recipe = recipe

    def train(self, batch: Batch) -> TrainReport:
        """All epochs and mini-batches of one batch."""
        begun = time.perf_counter()
        losses: list[LossReport] = []
        steps: list[OptimReport] = []
        for part in self._minibatches(batch):
            losses.append(self.strategy.forward_backward(part, self.objective))
            steps.append(self.strategy.step())
        return _report(losses, steps, seconds=time.perf_counter() - begun)

    def logprobs(self, batch: Batch) -> FloatArray:
        return self.strategy.logprobs(batch)

    def write_weights(self, version: PolicyVersion) -> WeightManifest:
        return write_weights(self.strategy.weights(), version)

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.strategy.weights())

    def save(self, path: Path) -> None:
        self.strategy.save(path)

    def load(self, path: Path) -> None:
        self.strategy.load(path)

    def export(self, path: Path) -> None:
        self.strategy.export(path)

    def sleep(self) -> None:
        self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        """Each optimizer step's part. Weights are those of the whole batch, so a part of 1/M
        is scaled by M to be a mean of its own."""
        train = self.recipe.train
        parts = min(train.minibatches, batch.samples)
        for _ in range(train.epochs):
            if parts == 1:
                yield batch
                continue
            for part in range(parts):
                chosen = batch.take(range(part, batch.samples, parts))
                yield replace(chosen, weights_N=chosen.weights_N * np.float32(parts))


def _report(losses: list[LossReport], steps: list[OptimReport], *, seconds: float) -> TrainReport:
    tokens = sum(report.tokens for report in losses)
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for report in losses:
        for name, value in report.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in report.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    return TrainReport(
        loss=sum(report.loss for report in losses) / len(losses),
        grad_norm=max(step.grad_norm for step in steps),
        lr=steps[-1].lr,
        tokens=tokens,
        seconds=seconds,
        optimizer_steps=len(steps),
        skipped_steps=sum(step.skipped for step in steps),
        means={name: value / max(tokens, 1) for name, value in sums.items()},
        maxima=maxima,
    )


def create(context: HostContext, rank: int, recipe: Recipe, base: Path | None) -> LearnerWorker:
    """Build the learner on its host. It is seeded: its random state is part of a checkpoint."""
    torch.set_num_threads(context.threads)
    torch.manual_seed(stable_hash(recipe.run.seed, "learner", rank))
    strategy = resolve("train_strategies", recipe.train.strategy)(recipe, device=context.device)
    return LearnerWorker(strategy, build_objective(recipe.objective, base=base), recipe)
