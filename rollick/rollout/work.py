"""The work of a simulated sample: tokens, latencies, device-seconds, by its id and the seed. Pure.

Owns what follows from a scenario's work alone, whatever the schedule. The words of a scenario are
in config/scenario.py, the distributions in workload.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rollick.config.scenario import LatencyConfig, StepTimeConfig, WorkConfig
from rollick.rollout.workload import (
    Constant,
    Distribution,
    Latencies,
    Lengths,
    LogNormal,
    Recorded,
    StepTime,
    uniform,
)
from rollick.types import SampleId


@dataclass(frozen=True, slots=True)
class Clipped:
    """A distribution with nothing above `most`."""

    inner: Distribution
    most: float

    def at(self, u: float) -> float:
        return min(self.most, self.inner.at(u))


class Work:
    """The work of each sample, as a function of its id and the seed: never of the schedule."""

    def __init__(self, config: WorkConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.lengths = Lengths(
            seed,
            Recorded(config.lengths.trace) if config.lengths.trace else self._log_normal(),
            config.lengths.max_tokens,
            config.lengths.prompt_share,
            prompts=config.prompts,
        )
        self.environment = Latencies(seed, latency_of(config.environment), "environment")
        self.reward = Latencies(seed, latency_of(config.reward), "reward")

    def _log_normal(self) -> LogNormal:
        return LogNormal(self.config.lengths.median, self.config.lengths.tail)

    @cached_property
    def _choices(self) -> int:
        return max(0, self.config.most_turns - self.config.turns) + 1

    def turns(self, uid: SampleId) -> int:
        if self._choices == 1:
            return self.config.turns
        u = uniform(self.seed, "turns", uid.group, uid.index)
        return self.config.turns + int(u * self._choices)

    def tokens(self, uid: SampleId) -> list[int]:
        """Of each turn."""
        return [self.lengths.tokens(uid, turn) for turn in range(self.turns(uid))]

    def prompt_of(self, group: int) -> str:
        return f"prompt/{group % self.config.prompts if self.config.prompts else group}"

    def generation_s(self, uid: SampleId, step_time: StepTime, *, slots: int) -> float:
        """Device-seconds of a sample on an engine whose slots are all in use, its part of the
        group's prompt not counted: what no schedule can do with less."""
        each = step_time.base_s / slots + step_time.per_sequence_s
        context, seconds = self.config.prompt_tokens, 0.0
        for turn, tokens in enumerate(self.tokens(uid)):
            if turn:
                seconds += step_time.per_prefill_token_s * self.config.observation_tokens
                context += self.config.observation_tokens
            read = tokens * context + tokens * (tokens - 1) / 2
            seconds += tokens * each + step_time.per_kv_token_s * read
            context += tokens
        return seconds


def latency_of(config: LatencyConfig) -> Distribution:
    if config.trace:
        return Recorded(config.trace)
    if config.median_s == 0 or config.tail == 1:
        return Constant(config.median_s)
    drawn = LogNormal(config.median_s, config.tail)
    return Clipped(drawn, config.max_s) if config.max_s else drawn


def step_time_of(config: StepTimeConfig) -> StepTime:
    return StepTime(**config.model_dump())
