"""The learner: trains on batches, computes log-probs, and sends weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rollick.algorithms.objective import build_objective
from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import Recipe
from rollick.data.batch import Batch, BatchShare
from rollick.errors import ConfigError
from rollick.models.cpu_threads import release_openmp_threads
from rollick.models.loading.adapter import adapter_pairs
from rollick.models.loading.fingerprint import fingerprint
from rollick.roles.protocols import PolicyRole
from rollick.roles.reports import TrainReport
from rollick.trainer.lora import Adapters
from rollick.trainer.parallel.mesh import Rendezvous, join_process_group
from rollick.trainer.strategy import (
    IsSharded,
    LossFn,
    LossReport,
    OptimReport,
    ShardedWeights,
    SupportsAdapters,
    TrainStrategy,
)
from rollick.types import Fingerprint, FloatArray, PolicyVersion, stable_hash
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.shards import ShardSource
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, ProcessLocation, Route, process_location
from rollick.weights.sender import WeightSender
from rollick.workers.model_worker import TrainedWorker, builds_worker


class LearnerWorker(TrainedWorker[TrainStrategy], PolicyRole):
    def __init__(
        self,
        strategy: TrainStrategy,
        objective: LossFn,
        recipe: Recipe,
        *,
        rank: int = 0,
        lends: bool = False,
    ) -> None:
        """A sharded strategy has one learner per rank. All get the same calls; only rank 0 sends
        data out of the group. `lends`: whether an engine in this process uses the parameters,
        also while the learner sleeps."""
        super().__init__(strategy)
        self.rank = rank
        self.lends = lends
        self.objective = objective
        self.recipe = recipe
        self.sender = WeightSender()
        self._base: Fingerprint | None = None
        """Fingerprint of the base model, which never changes."""

    def train(self, share: BatchShare) -> TrainReport:
        has_old = all(part.old_logprobs_N is not None for part in share.minibatches)
        if self.recipe.needs("old") and not has_old:
            message = "the correction needs log-probs of the old policy, but the batch has none"
            raise ConfigError(message, fix="annotate the batch before training")
        parts = share.minibatches * self.recipe.train.epochs
        report = train_on(parts, self.forward_backward, self.optimizer_step)
        # An engine in this process decodes next.
        release_openmp_threads()
        return report

    def forward_backward(self, batch: Batch) -> LossReport:
        return self.strategy.forward_backward(batch, self.objective)

    def optimizer_step(self) -> OptimReport:
        return self.strategy.step()

    def logprobs(self, batch: Batch) -> FloatArray:
        logprobs_N = self.strategy.logprobs(batch)
        release_openmp_threads()
        return logprobs_N

    def reference_logprobs(self, batch: Batch) -> FloatArray:
        if not isinstance(self.strategy, SupportsAdapters):
            message = f"strategy {self.recipe.train.strategy} has no adapters to disable"
            raise ConfigError(message, fix="set devices.reference to load a reference model")
        return self.strategy.reference_logprobs(batch)

    def time_fixed_work(self) -> float:
        return self.strategy.time_fixed_work() if isinstance(self.strategy, IsSharded) else 0.0

    def process_location(self) -> ProcessLocation:
        return process_location(trains_adapters=self._adapters is not None)

    def offer_weights(self, version: PolicyVersion, route: Route) -> WeightManifest | None:
        weights = self.strategy.weights()
        if isinstance(weights, ShardedWeights) and weights.shards and route.allows_shards:
            return self.sender.offer_shards(weights, version, route=route)
        if self.rank:
            # The other ranks of a sharded learner contribute their shards of each parameter.
            for _ in weights:
                pass
            return None
        adapters = self._adapters
        if adapters is None or not route.adapters_only:
            return self.sender.offer(weights, version, route=route)
        if self._base is None:
            self._base = fingerprint(list(adapters.base()))
        stream, scale = adapter_pairs(adapters.live_adapters()), adapters.scale
        return self.sender.offer(stream, version, route=route, partial_of=self._base, scale=scale)

    @property
    def _adapters(self) -> Adapters | None:
        return self.strategy.adapters if isinstance(self.strategy, SupportsAdapters) else None

    def send_weights(self, channel: Channel, shards: ShardSource | None = None) -> None:
        self.sender.send(channel, shards)

    def release_weights(self, outcome: PublishOutcome) -> None:
        self.sender.release(outcome)

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.strategy.weights())

    def sleep(self) -> None:
        self.strategy.sleep(keep_parameters=self.lends)

    def close(self) -> None:
        super().close()
        self.sender.close()


def train_on(
    parts: Sequence[Batch],
    forward_backward: Callable[[Batch], LossReport],
    step: Callable[[], OptimReport],
) -> TrainReport:
    """Take an optimizer step for each part of a batch. Returns the merged report."""
    started_at, optimizer_s = time.perf_counter(), 0.0
    losses: list[LossReport] = []
    steps: list[OptimReport] = []
    for part in parts:
        losses.append(forward_backward(part))
        step_began = time.perf_counter()
        steps.append(step())
        optimizer_s += time.perf_counter() - step_began
    seconds = time.perf_counter() - started_at
    total = LossReport.of(losses)
    return TrainReport(
        loss=total.loss / len(losses),
        grad_norm=max(step.grad_norm for step in steps),
        lr=steps[-1].lr,
        tokens=total.tokens,
        seconds=seconds,
        optimizer_steps=len(steps),
        skipped_steps=sum(step.skipped for step in steps),
        optimizer_seconds=optimizer_s,
        means={name: value / max(total.tokens, 1) for name, value in total.sums.items()},
        maxima=dict(total.maxima),
    )


@builds_worker
def create(
    context: HostContext,
    rank: int,
    recipe: Recipe,
    base: Path | None,
    rendezvous: Rendezvous | None = None,
) -> LearnerWorker:
    """Build the learner on its host. Seeds torch, because checkpoints hold its RNG state. Ranks of
    a sharded learner wait for each other at the rendezvous."""
    if rendezvous is not None:
        join_process_group(rendezvous, rank, device=context.device)
    torch.manual_seed(stable_hash(recipe.run.seed, "learner", rank))
    strategy = resolve("train_strategies", recipe.train.strategy)(recipe, device=context.device)
    one_step = recipe.train.steps_per_batch == 1
    objective = build_objective(recipe.algorithms, base=base, one_step=one_step)
    lends = "generators" in context.spec.roles
    return LearnerWorker(strategy, objective, recipe, rank=rank, lends=lends)
