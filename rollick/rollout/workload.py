"""What a simulation is fed with: how long samples are, how long things take. Pure.

Owns the drawn lengths and latencies and the model of an engine's step. Does not own a clock.

Every number is a function of (seed, what it is for, SampleId, turn) through a hash, never of the
schedule: whatever order a scheduler chooses, the work is the same, so two schedules can be
compared by their time alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollick.errors import ConfigError, DataError
from rollick.types import Request, SampleId, StepRecord, stable_hash

_NORMAL = NormalDist()
_TAIL_Z = _NORMAL.inv_cdf(0.999)

Floats = npt.NDArray[np.float64]


def uniform(*key: str | int) -> float:
    """A number strictly between 0 and 1 that follows from the key."""
    # 52 bits and a half fit a float exactly, so neither 0 nor 1 can come out by rounding.
    return ((stable_hash(*key) >> 11) + 0.5) / 2**52


class Distribution(Protocol):
    """Gives the value below which a share `u` of all values lies, 0 < u < 1."""

    def at(self, u: float, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value always."""

    value: float

    def at(self, u: float) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any value from `low` to `high`, all alike."""

    low: float
    high: float

    def at(self, u: float) -> float:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True, slots=True)
class LogNormal:
    """By its median and its tail: how many times the median the 99.9th percentile is."""

    median: float
    tail: float

    def __post_init__(self) -> None:
        if not (self.median > 0 and self.tail >= 1):
            raise ConfigError(
                f"a log-normal with median {self.median} and tail ratio {self.tail} does not exist",
                fix="use a median above 0 and a tail ratio of at least 1",
            )

    def at(self, u: float) -> float:
        return self.median * self.tail ** (_NORMAL.inv_cdf(u) / _TAIL_Z)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Values that were measured, each as likely as the others. Sorted, so that they have ranks."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise DataError("a recorded trace has no values", fix="record at least one")
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def at(self, u: float) -> float:
        return self.values[int(u * len(self.values))]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens a turn of a sample has: at least 1, at most `max_tokens`.

    `group_share` is how much of the spread the samples of a group have in common (0: a sample says
    nothing about its siblings; 1: all have one length). It leaves the distribution as it is.
    """

    seed: int
    distribution: Distribution
    max_tokens: int
    group_share: float = 0.0
    prompts: int = 0
    """Groups whose ids are alike modulo this have one prompt, and the common part with it."""

    @classmethod
    def log_normal(
        cls, seed: int, *, median: float, tail: float, max_tokens: int, group_share: float = 0.0
    ) -> Lengths:
        return cls(seed, LogNormal(median, tail), max_tokens, group_share)

    @classmethod
    def recorded(
        cls, seed: int, *, tokens: Sequence[int], max_tokens: int, group_share: float = 0.0
    ) -> Lengths:
        return cls(seed, Recorded(tuple(tokens)), max_tokens, group_share)

    def tokens(self, uid: SampleId, turn: int = 0) -> int:
        u = uniform(self.seed, "length", uid.group, uid.index, turn)
        if self.group_share > 0:
            group = uid.group % self.prompts if self.prompts else uid.group
            u = self._with_group(u, group, turn)
        return max(1, min(self.max_tokens, round(self.distribution.at(u))))

    def of_request(self, request: Request) -> int:
        """The length of a sample's only turn: what a SimulatedEngine asks where there is one."""
        return self.tokens(request.uid)

    def _with_group(self, u: float, group: int, turn: int) -> float:
        """A mix of two normal numbers whose weights' squares sum to 1 is a normal number."""
        common = _NORMAL.inv_cdf(uniform(self.seed, "group length", group, turn))
        own = _NORMAL.inv_cdf(u)
        mixed = math.sqrt(self.group_share) * common + math.sqrt(1 - self.group_share) * own
        return min(max(_NORMAL.cdf(mixed), 2**-53), 1 - 2**-53)


@dataclass(frozen=True, slots=True)
class Latencies:
    """How many seconds something takes for a turn of a sample. `purpose` tells two kinds of wait
    (a reward, an environment) apart that have one seed."""

    seed: int
    distribution: Distribution
    purpose: str = "latency"

    @classmethod
    def constant(cls, seconds: float) -> Latencies:
        return cls(0, Constant(seconds))

    @classmethod
    def log_normal(
        cls, seed: int, *, median_s: float, tail: float, purpose: str = "latency"
    ) -> Latencies:
        return cls(seed, LogNormal(median_s, tail), purpose)

    @classmethod
    def uniform(
        cls, seed: int, *, low_s: float, high_s: float, purpose: str = "latency"
    ) -> Latencies:
        return cls(seed, Uniform(low_s, high_s), purpose)

    def seconds(self, uid: SampleId, turn: int = 0) -> float:
        if isinstance(self.distribution, Constant):
            return self.distribution.value
        return self.distribution.at(uniform(self.seed, self.purpose, uid.group, uid.index, turn))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one engine step, linear in what the step has to do.

    base_s + per_sequence_s * batch + per_kv_token_s * kv_tokens
    + prefill_base_s + per_prefill_token_s * prefill            if there is something to prefill
    """

    base_s: float
    per_sequence_s: float = 0.0
    per_kv_token_s: float = 0.0
    per_prefill_token_s: float = 0.0
    prefill_base_s: float = 0.0
    padded: bool = False
    """Every sequence counts with as many tokens in the cache as the longest has."""

    def __post_init__(self) -> None:
        parts = (self.base_s, self.per_sequence_s, self.per_kv_token_s)
        if min(*parts, self.per_prefill_token_s, self.prefill_base_s) < 0 or sum(parts) <= 0:
            raise ConfigError(
                f"a step of {self} would take no time, or less",
                fix="use no negative part, and a positive one besides those of a prefill",
            )

    def seconds(self, batch: int, kv_tokens: int, prefill_tokens: int = 0) -> float:
        return (
            self.base_s
            + self.per_sequence_s * batch
            + self.per_kv_token_s * kv_tokens
            + self.prefill_seconds(prefill_tokens)
        )

    def of(self, record: StepRecord) -> float:
        """What a recorded step should have taken."""
        cached = record.batch * record.longest if self.padded else record.kv_tokens
        return self.seconds(record.batch, cached, record.prefill_tokens)

    def prefill_seconds(self, tokens: int) -> float:
        """What a prefill adds to its step."""
        return self.prefill_base_s + self.per_prefill_token_s * tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A step time from records. Errors are relative: |fitted - measured| / measured."""

    step_time: StepTime
    worst_error: float
    mean_error: float
    records: int


def fit_step_time(records: Sequence[StepRecord], *, keep_total: bool = False) -> Fit:
    """Least squares of the relative error, with no negative part.

    With five columns all 31 choices of the parts above zero are tried: the best of those without a
    negative part is the exact optimum. `keep_total` scales it so that all steps together
    take as long as measured: a step that is disturbed takes longer, never shorter, and the closest
    fit lets most of that go. Where the longest sequences are known, the fit may be a padded one.
    """
    if not records or min(record.seconds for record in records) <= 0:
        raise DataError(
            f"{len(records)} step records cannot be fitted",
            fix="give at least one, and only such as took some time",
        )
    kinds = (False, True) if all(record.longest for record in records) else (False,)
    fits = [_fit_steps(records, padded=padded, keep_total=keep_total) for padded in kinds]
    return min(fits, key=lambda fit: fit.mean_error)


def _fit_steps(records: Sequence[StepRecord], *, padded: bool, keep_total: bool) -> Fit:
    rows = [
        (
            1.0,
            r.batch,
            r.batch * r.longest if padded else r.kv_tokens,
            r.prefill_tokens,
            r.prefill_tokens > 0,
        )
        for r in records
    ]
    measured = np.array([record.seconds for record in records])
    columns = np.array(rows, np.float64) / measured[:, None]
    parts = _non_negative(columns)
    if keep_total:
        parts = parts * (measured.sum() / (columns @ parts @ measured))
    errors = np.abs(columns @ parts - 1)
    return Fit(
        StepTime(*(float(part) for part in parts), padded=padded),
        worst_error=float(errors.max()),
        mean_error=float(errors.mean()),
        records=len(records),
    )


def _non_negative(columns: Floats) -> Floats:
    """The parts >= 0 with which the columns come closest to 1 in each row."""
    # The columns' units differ by many powers of ten; of one size, they are well conditioned.
    scale = np.linalg.norm(columns, axis=0)
    used = [int(n) for n in np.flatnonzero(scale)]
    best = np.zeros(columns.shape[1])
    least = float(len(columns))
    # The fewest parts first: a further part must make the fit better to be there.
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            some = list(chosen)
            scaled = columns[:, some] / scale[some]
            solution = np.linalg.lstsq(scaled, np.ones(len(columns)), rcond=None)[0]
            # A step without prefill must take some time too, whatever the records are.
            if solution.min() < 0 or not any(solution[n] for n in range(count) if some[n] < 3):
                continue
            residual = float(((scaled @ solution - 1) ** 2).sum())
            if residual < least:
                least = residual
                best = np.zeros(columns.shape[1])
                best[some] = solution / scale[some]
    return best


@dataclass(frozen=True, slots=True)
class TrainRecord:
    """One measured training step: its tokens, its time, and what of it tokens do not change."""

    tokens: int
    seconds: float
    fixed_s: float


@dataclass(frozen=True, slots=True)
class TrainFit:
    """base_s + token_s * tokens. Errors are relative: |fitted - measured| / measured."""

    base_s: float
    token_s: float
    worst_error: float
    mean_error: float


def fit_train_time(records: Sequence[TrainRecord]) -> TrainFit:
    """The mean of what is fixed, and the rest by token.

    The steps of a run have about the same number of tokens, so a line through them would say
    little of a batch twice as large; what is fixed is therefore measured and not fitted.
    """
    tokens = sum(record.tokens for record in records)
    if not tokens or min(record.seconds for record in records) <= 0:
        raise DataError(
            f"{len(records)} training steps cannot be fitted",
            fix="give at least one with tokens, and only such as took some time",
        )
    base_s = sum(record.fixed_s for record in records) / len(records)
    token_s = sum(record.seconds - record.fixed_s for record in records) / tokens
    errors = [abs((base_s + token_s * r.tokens) / r.seconds - 1) for r in records]
    return TrainFit(base_s, token_s, max(errors), sum(errors) / len(errors))


def estimate_group_share(groups: Sequence[Sequence[int]]) -> float:
    """How much of the spread of lengths the samples of a group have in common; see Lengths.

    The intraclass correlation (one-way analysis of variance) of the lengths' normal scores; those
    of equal lengths have the mean of their ranks. 0 where nothing can be said.
    """
    sizes = np.array([len(group) for group in groups if group], np.float64)
    flat = np.array([length for group in groups for length in group], np.float64)
    if len(sizes) < 2 or len(flat) <= len(sizes) or flat.min() == flat.max():
        return 0.0
    _, place, counts = np.unique(flat, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[place] / len(flat)
    scores = np.array([_NORMAL.inv_cdf(float(rank)) for rank in ranks])
    number = np.repeat(np.arange(len(sizes)), sizes.astype(int))
    means = np.bincount(number, scores) / sizes
    between = float((sizes * (means - scores.mean()) ** 2).sum()) / (len(sizes) - 1)
    within = float(((scores - means[number]) ** 2).sum()) / (len(flat) - len(sizes))
    size = (len(flat) - float((sizes**2).sum()) / len(flat)) / (len(sizes) - 1)
    total = between + (size - 1) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0
