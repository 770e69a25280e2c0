"""A simulated reward and a simulated trainer: they take time on the event loop's clock only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollick.simulator.workload import Latencies, uniform
from rollick.types import Group, Sample, Score

TRAINING_PARTS = 20
"""Parts of a training step, each with the slowdown at its begin."""


@dataclass(frozen=True, slots=True)
class SimulatedReward:
    """Scores a sample after its latency, by ids and the seed. In a share `flat` of the groups all
    scores are equal (0 or 1); in the others they are uniform. A share `failed` has no score."""

    latencies: Latencies
    seed: int = 0
    flat: float = 0.0
    failed: float = 0.0

    async def score(self, sample: Sample) -> Score:
        seconds, seed = self.latencies.seconds(sample.uid), self.seed
        await asyncio.sleep(seconds)
        group, index = sample.uid
        if uniform(seed, "failed", group, index) < self.failed:
            return Score.failed("simulated failure")
        if uniform(seed, "flat", group) < self.flat:
            return Score(float(uniform(seed, "score", group) < 0.5), seconds=seconds)
        return Score(uniform(seed, "score", group, index), seconds=seconds)


@dataclass(slots=True)
class SimulatedTrainer:
    """Trains on a batch in base_s + seconds_per_token * tokens, those of prompts included.
    `slowdown` returns how many times longer it takes at the moment."""

    seconds_per_token: float
    base_s: float = 0.0
    slowdown: Callable[[], float] | None = None
    busy_s: float = 0.0

    async def train(self, groups: Sequence[Group]) -> None:
        tokens = sum(sample.length for group in groups for sample in group.samples)
        seconds = self.base_s + self.seconds_per_token * tokens
        parts = 1 if self.slowdown is None else TRAINING_PARTS
        busy_s = 0.0
        for _ in range(parts):
            slowed = seconds / parts * (self.slowdown() if self.slowdown else 1.0)
            busy_s += slowed
            await asyncio.sleep(slowed)
        self.busy_s += busy_s
