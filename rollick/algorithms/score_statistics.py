"""Mean and standard deviation of scores and advantages, for a list or for a whole run.

Shared, so that empty lists, single values and equal values give the same result everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt


def mean(values: Sequence[float]) -> float:
    """The mean; 0 for an empty list."""
    if not values:
        return 0.0
    # Rounding can make the mean of equal floats differ from them. Divided by an equally small std,
    # the difference would become an advantage.
    return values[0] if min(values) == max(values) else fsum(values) / len(values)


def sample_std(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1); exactly 0 if all values are equal, or fewer than 2."""
    if len(values) < 2:
        return 0.0
    return sqrt(fsum(value * value for value in subtract_mean(values)) / (len(values) - 1))


def subtract_mean(values: Sequence[float]) -> list[float]:
    """Each value minus the mean; equal values give exactly 0."""
    center = mean(values)
    return [value - center for value in values]


def whiten(values: Sequence[float], epsilon: float) -> list[float]:
    """(x - mean) / (std + epsilon); equal values give exactly 0."""
    scale = sample_std(values) + epsilon
    return [value / scale for value in subtract_mean(values)]


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Running mean and standard deviation of all scores of a run, saved in checkpoints."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1); 0 for fewer than two scores."""
        return sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0

    def updated(self, values: Iterable[float]) -> RunningStatistics:
        """A copy that includes these scores, by Welford's method (numerically stable)."""
        count, mean, squares = self.count, self.mean, self.squares
        for value in values:
            count += 1
            step = value - mean
            mean += step / count
            squares += step * (value - mean)
        return RunningStatistics(count, mean, squares)

    def to_state(self) -> dict[str, float]:
        """JSON-serialisable state."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> RunningStatistics:
        """The inverse of to_state; a missing key raises KeyError."""
        return cls(int(state["count"]), float(state["mean"]), float(state["squares"]))
