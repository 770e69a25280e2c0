"""The scorer: a frozen model that gives log-probs (the reference policy)."""

from __future__ import annotations

from rollick.cluster.worker import HostContext
from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.train.local import LocalStrategy
from rollick.types import FloatArray


class ScorerWorker:
    """The reference role of a host. Its weights never change."""

    def __init__(self, strategy: LocalStrategy) -> None:
        self.strategy = strategy

    def logprobs(self, batch: Batch) -> FloatArray:
        return self.strategy.logprobs(batch)

    def sleep(self) -> None:
        self.strategy.sleep()

    def wake(self) -> None:
        self.strategy.wake()


def create(context: HostContext, rank: int, recipe: Recipe) -> ScorerWorker:
    """Build the scorer on its host."""
    return ScorerWorker(LocalStrategy(recipe, device=context.device, trainable=False))
