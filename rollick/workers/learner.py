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
from rollick.errors import ConfigError
from rollick.models.adapter import adapter_pairs
from rollick.models.fingerprint import fingerprint
from rollick.models.threads import release_helpers
from rollick.train.lora import Adapters
from rollick.train.parallel.mesh import Meeting, join, leave
from rollick.train.strategy import HasAdapters, LossFn, LossReport, OptimReport, TrainStrategy
from rollick.types import Fingerprint, FloatArray, PolicyVersion, stable_hash
from rollick.weights.channels.base import Outcome
from rollick.weights.here import place_here
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, Place, Route
from rollick.weights.send import WeightSender
from rollick.workers.memory import Meter


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
    optimizer_seconds: float = 0.0
    """Part of the seconds that does not depend on the number of tokens."""
    means: dict[str, float] = field(default_factory=dict[str, float])
    maxima: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def changed(self) -> bool:
        """Whether the weights are other ones than before: a skipped step publishes nothing."""
        return self.skipped_steps < self.optimizer_steps

    @property
    def effective_samples(self) -> float | None:
        """(sum of pi / mu)^2 / sum of (pi / mu)^2, as a share of the tokens: 1 on-policy."""
        square = self.means.get("ratio_squared")
        return self.means["ratio"] ** 2 / square if square else None

    def metrics(self) -> dict[str, float]:
        """Under the names that observe/metrics.py documents."""
        effective = self.effective_samples
        return {
            **({} if effective is None else {"train/effective_sample_size": effective}),
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

    def __init__(
        self,
        strategy: TrainStrategy,
        objective: LossFn,
        recipe: Recipe,
        *,
        rank: int = 0,
        meter: Meter | None = None,
        lends: bool = False,
    ) -> None:
        """Of a sharded strategy there is one on each rank, and all are called alike; what is sent
        out of the group is sent by rank 0. `lends`: whether an engine in this process uses the
        parameters, also while the learner sleeps."""
        self.rank = rank
        self.meter = meter or Meter()
        self.lends = lends
        self.strategy = strategy
        self.objective = objective
        self.recipe = recipe
        self.sender = WeightSender()
        self._base: Fingerprint | None = None
        """Of the model that adapters are added to; it never changes."""

    def train(self, batch: Batch) -> TrainReport:
        """All epochs and mini-batches of one batch."""
        if self.recipe.needs("old") and batch.old_logprobs_N is None:
            raise ConfigError(
                "the correction compares with the learner's old policy, and the batch has no "
                "log-probs of it",
                fix="annotate the batch before it is trained on",
            )
        begun, optimizer_s = time.perf_counter(), 0.0
        losses: list[LossReport] = []
        steps: list[OptimReport] = []
        for part in minibatches(batch, self.recipe):
            losses.append(self.strategy.forward_backward(part, self.objective))
            stepped = time.perf_counter()
            steps.append(self.strategy.step())
            optimizer_s += time.perf_counter() - stepped
        report = train_report(losses, steps, seconds=time.perf_counter() - begun)
        # An engine in this process decodes next.
        release_helpers()
        return replace(report, optimizer_seconds=optimizer_s)

    def logprobs(self, batch: Batch) -> FloatArray:
        logprobs_N = self.strategy.logprobs(batch)
        release_helpers()
        return logprobs_N

    def reference_logprobs(self, batch: Batch) -> FloatArray:
        """Of the model that the run began with, which adapters leave as it is."""
        if not isinstance(self.strategy, HasAdapters):
            raise ConfigError(
                f"strategy {self.recipe.train.strategy} has no adapters to switch off",
                fix="give devices.reference, so that the reference is a model of its own",
            )
        return self.strategy.reference_logprobs(batch)

    def place(self) -> Place:
        return place_here(adapters=self._adapters is not None)

    def offer_weights(self, version: PolicyVersion, route: Route) -> WeightManifest | None:
        """Begin a publish: the parameters may not change until `release_weights`."""
        if self.rank:
            # The others of a sharded learner give their parts of each parameter.
            for _ in self.strategy.weights():
                pass
            return None
        adapters = self._adapters
        if adapters is None or not route.adapters:
            return self.sender.offer(self.strategy.weights(), version, route=route)
        if self._base is None:
            self._base = fingerprint(list(adapters.base()))
        stream, scale = adapter_pairs(adapters.each()), adapters.scale
        return self.sender.offer(stream, version, route=route, partial_of=self._base, scale=scale)

    @property
    def _adapters(self) -> Adapters | None:
        return self.strategy.adapters if isinstance(self.strategy, HasAdapters) else None

    def send_weights(self, channel: Channel) -> None:
        self.sender.send(channel)

    def release_weights(self, outcome: Outcome) -> None:
        self.sender.release(outcome)

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.strategy.weights())

    def save(self, path: Path) -> None:
        self.strategy.save(path)

    def load(self, path: Path) -> None:
        self.strategy.load(path)

    def export(self, path: Path) -> None:
        self.strategy.export(path)

    def sleep(self) -> None:
        if self.lends:
            self.strategy.sleep(keep_parameters=True)
        else:
            self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()

    def peak_memory(self) -> int:
        """Bytes that this process held at the most since the role began to be built."""
        return self.meter.peak()

    def close(self) -> None:
        self.sender.close()
        leave()


def minibatches(batch: Batch, recipe: Recipe) -> Iterator[Batch]:
    """Each optimizer step's part, whole groups in a loss of pairs, else sample by sample.

    Weights are those of the whole batch, so a part of 1/M is scaled by M to be a mean of its
    own.
    """
    train = recipe.train
    _, group_B = np.unique(batch.group_B, return_inverse=True)
    number_B = group_B if recipe.compares_pairs else np.arange(batch.samples)
    parts = min(train.minibatches, int(number_B.max()) + 1)
    for _ in range(train.epochs):
        if parts == 1:
            yield batch
            continue
        for part in range(parts):
            chosen = np.flatnonzero(number_B % parts == part)
            yield batch.take(chosen.tolist()).scaled(parts)


def train_report(
    losses: list[LossReport], steps: list[OptimReport], *, seconds: float
) -> TrainReport:
    """The reports of all optimizer steps of a batch as one."""
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


def create(
    context: HostContext,
    rank: int,
    recipe: Recipe,
    base: Path | None,
    meeting: Meeting | None = None,
) -> LearnerWorker:
    """Build the learner on its host. It is seeded: its random state is part of a checkpoint.

    Ranks of a sharded learner wait for each other at the meeting.
    """
    meter = Meter()
    torch.set_num_threads(context.threads)
    if meeting is not None:
        join(meeting, rank, device=context.device)
    torch.manual_seed(stable_hash(recipe.run.seed, "learner", rank))
    strategy = resolve("train_strategies", recipe.train.strategy)(recipe, device=context.device)
    objective = build_objective(recipe.algorithms, base=base, one_step=recipe.is_one_step)
    lends = "generators" in context.spec.roles
    return LearnerWorker(strategy, objective, recipe, rank=rank, meter=meter, lends=lends)
