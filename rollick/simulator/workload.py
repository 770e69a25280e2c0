"""The work of simulated samples: how long they are, how long things take, and their scores.

Every number is a hash of (seed, purpose, SampleId, turn), independent of the schedule. So two
schedules of the same work differ only in time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

from rollick.simulator.scenario import LatencyConfig, WorkConfig
from rollick.simulator.step_time import StepTime
from rollick.types import Sample, SampleId, Score, stable_hash

NORMAL = NormalDist()
_TAIL_Z = NORMAL.inv_cdf(0.999)


def uniform(*key: str | int) -> float:
    """A number strictly between 0 and 1, determined by the key."""
    # 52 bits plus 0.5 fit a float exactly, so rounding gives neither 0 nor 1.
    return ((stable_hash(*key) >> 11) + 0.5) / 2**52


Quantile = Callable[[float], float]
"""The inverse of a distribution function: a share `u` of all values is below its result."""


def constant(value: float) -> Quantile:
    return lambda u: value


def log_normal(median: float, tail: float, max_value: float = math.inf) -> Quantile:
    """`tail`: the 99.9th percentile as a multiple of the median. No value is above `max_value`."""
    return lambda u: min(max_value, median * tail ** (NORMAL.inv_cdf(u) / _TAIL_Z))


def recorded(values: Iterable[float]) -> Quantile:
    """Measured values, each with the same probability."""
    ordered = sorted(values)
    return lambda u: ordered[int(u * len(ordered))]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a turn, at most `max_tokens`. `prompt_share` is the share of the variance that the
    samples of a prompt have in common; it does not change the distribution."""

    seed: int
    distribution: Quantile
    max_tokens: int
    prompt_share: float = 0.0
    prompts: int = 0
    """Group n has prompt n modulo this, and the common part of its length; 0: a new one each."""

    def tokens(self, uid: SampleId, turn: int = 0) -> int:
        u = uniform(self.seed, "length", uid.group, uid.index, turn)
        if self.prompt_share > 0:
            prompt = uid.group % self.prompts if self.prompts else uid.group
            u = self._correlate(u, prompt, turn)
        return max(1, min(self.max_tokens, round(self.distribution(u))))

    def _correlate(self, u: float, prompt: int, turn: int) -> float:
        """Mix in the prompt's number. Weights whose squares sum to 1 keep the distribution."""
        common = NORMAL.inv_cdf(uniform(self.seed, "group length", prompt, turn))
        sample = NORMAL.inv_cdf(u)
        mixed = math.sqrt(self.prompt_share) * common + math.sqrt(1 - self.prompt_share) * sample
        return min(max(NORMAL.cdf(mixed), 2**-53), 1 - 2**-53)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of a reward or an environment for a turn of a sample. Latencies with the same seed
    and different `purpose` are independent."""

    seed: int
    distribution: Quantile
    purpose: str = "latency"

    def seconds(self, uid: SampleId, turn: int = 0) -> float:
        return self.distribution(uniform(self.seed, self.purpose, uid.group, uid.index, turn))


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


class SampleWork:
    """The work of each sample, as a function of its id and the seed."""

    def __init__(self, config: WorkConfig, seed: int) -> None:
        lengths = config.lengths
        self.config = config
        self.seed = seed
        self.lengths = Lengths(
            seed,
            recorded(lengths.trace) if lengths.trace else log_normal(lengths.median, lengths.tail),
            lengths.max_tokens,
            lengths.prompt_share,
            prompts=config.prompts,
        )
        self.environment = Latencies(seed, latency_distribution(config.environment), "environment")
        self.reward = Latencies(seed, latency_distribution(config.reward), "reward")

    def turns(self, uid: SampleId) -> int:
        num_choices = max(0, self.config.most_turns - self.config.turns) + 1
        extra = int(uniform(self.seed, "turns", *uid) * num_choices) if num_choices > 1 else 0
        return self.config.turns + extra

    def tokens(self, uid: SampleId) -> list[int]:
        return [self.lengths.tokens(uid, turn) for turn in range(self.turns(uid))]

    def prompt_uid(self, group: int) -> str:
        return f"prompt/{group % self.config.prompts if self.config.prompts else group}"

    def generation_s(self, uid: SampleId, step_time: StepTime, *, slots: int) -> float:
        """Device-seconds of a sample on an engine whose slots are all in use, without its part of
        the group's prompt: a lower bound for every schedule."""
        token_s = step_time.base_s / slots + step_time.per_sequence_s
        context, seconds = self.config.prompt_tokens, 0.0
        for turn, tokens in enumerate(self.tokens(uid)):
            if turn:
                seconds += step_time.per_prefill_token_s * self.config.observation_tokens
                context += self.config.observation_tokens
            kv_tokens = tokens * context + tokens * (tokens - 1) / 2
            seconds += tokens * token_s + step_time.per_kv_token_s * kv_tokens
            context += tokens
        return seconds


def latency_distribution(config: LatencyConfig) -> Quantile:
    if config.trace:
        return recorded(config.trace)
    if config.median_s == 0 or config.tail == 1:
        return constant(config.median_s)
    return log_normal(config.median_s, config.tail, config.max_s or math.inf)
