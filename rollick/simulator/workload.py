"""The work of simulated samples: how long they are and how long things take. Pure.

Every number is a hash of (seed, what it is for, SampleId, turn), independent of the schedule: so
two schedules of the same work can be compared by their time alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from rollick.errors import ConfigError, DataError
from rollick.simulator.scenario import LatencyConfig, WorkConfig
from rollick.simulator.step_time import StepTime
from rollick.types import SampleId, stable_hash

NORMAL = NormalDist()
_TAIL_Z = NORMAL.inv_cdf(0.999)


def uniform(*key: str | int) -> float:
    """A number strictly between 0 and 1, determined by the key."""
    # 52 bits and a half fit a float exactly, so rounding gives neither 0 nor 1.
    return ((stable_hash(*key) >> 11) + 0.5) / 2**52


class Distribution(Protocol):
    def quantile(self, u: float, /) -> float:
        """The value below which a share `u` of all values is, 0 < u < 1."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def quantile(self, u: float) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`tail`: the 99.9th percentile as a multiple of the median. No value is above `max_value`."""

    median: float
    tail: float
    max_value: float = math.inf

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.tail >= 1):
            message = f"no log-normal has median {self.median} and tail ratio {self.tail}"
            raise ConfigError(message, fix="use a median above 0 and a tail ratio of at least 1")

    def quantile(self, u: float) -> float:
        return min(self.max_value, self.median * self.tail ** (NORMAL.inv_cdf(u) / _TAIL_Z))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Measured values, each with the same probability. Kept sorted."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise DataError("a recorded trace has no values", fix="record at least one")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, u: float) -> float:
        return self.values[int(u * len(self.values))]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a turn, at most `max_tokens`. `group_share` is the share of the variance that the
    samples of a group have in common; it does not change the distribution."""

    seed: int
    distribution: Distribution
    max_tokens: int
    group_share: float = 0.0
    prompts: int = 0
    """Group n has prompt n modulo this, and the common part of its length; 0: a new one each."""

    def tokens(self, uid: SampleId, turn: int = 0) -> int:
        u = uniform(self.seed, "length", uid.group, uid.index, turn)
        if self.group_share > 0:
            group = uid.group % self.prompts if self.prompts else uid.group
            u = self._correlate(u, group, turn)
        return max(1, min(self.max_tokens, round(self.distribution.quantile(u))))

    def _correlate(self, u: float, group: int, turn: int) -> float:
        """Mix in the group's number. Weights whose squares sum to 1 keep the distribution."""
        common = NORMAL.inv_cdf(uniform(self.seed, "group length", group, turn))
        own = NORMAL.inv_cdf(u)
        mixed = math.sqrt(self.group_share) * common + math.sqrt(1 - self.group_share) * own
        return min(max(NORMAL.cdf(mixed), 2**-53), 1 - 2**-53)


@dataclass(frozen=True, slots=True)
class Latencies:
    """How many seconds something takes for a turn of a sample. `purpose` keeps two kinds of wait
    (a reward, an environment) with one seed independent."""

    seed: int
    distribution: Distribution
    purpose: str = "latency"

    def seconds(self, uid: SampleId, turn: int = 0) -> float:
        if isinstance(self.distribution, Constant):
            return self.distribution.value
        u = uniform(self.seed, self.purpose, uid.group, uid.index, turn)
        return self.distribution.quantile(u)


class SampleWork:
    """The work of each sample, as a function of its id and the seed."""

    def __init__(self, config: WorkConfig, seed: int) -> None:
        lengths = config.lengths
        self.config = config
        self.seed = seed
        self.lengths = Lengths(
            seed,
            Recorded(lengths.trace) if lengths.trace else LogNormal(lengths.median, lengths.tail),
            lengths.max_tokens,
            lengths.prompt_share,
            prompts=config.prompts,
        )
        self.environment = Latencies(seed, latency_distribution(config.environment), "environment")
        self.reward = Latencies(seed, latency_distribution(config.reward), "reward")

    def turns(self, uid: SampleId) -> int:
        choices = max(0, self.config.most_turns - self.config.turns) + 1
        extra = int(uniform(self.seed, "turns", *uid) * choices) if choices > 1 else 0
        return self.config.turns + extra

    def tokens(self, uid: SampleId) -> list[int]:
        return [self.lengths.tokens(uid, turn) for turn in range(self.turns(uid))]

    def prompt_uid(self, group: int) -> str:
        return f"prompt/{group % self.config.prompts if self.config.prompts else group}"

    def generation_s(self, uid: SampleId, step_time: StepTime, *, slots: int) -> float:
        """Device-seconds of a sample on an engine whose slots are all in use, without its part of
        the group's prompt: a lower bound for every schedule."""
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


def latency_distribution(config: LatencyConfig) -> Distribution:
    if config.trace:
        return Recorded(config.trace)
    if config.median_s == 0 or config.tail == 1:
        return Constant(config.median_s)
    return LogNormal(config.median_s, config.tail, config.max_s or math.inf)
