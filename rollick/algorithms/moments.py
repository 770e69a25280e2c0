"""Mean and spread of a few numbers, with a stated result where there are none.

Pure. What normalises scores (shaping.py) and advantages (advantages.py, returns.py) takes its
statistics from here, so that equal numbers, one number and no numbers mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt


def mean(values: Sequence[float]) -> float:
    """The mean; 0 of nothing."""
    if not values:
        return 0.0
    # The mean of equal floats can differ from them in the last bit; a division by an equally
    # small std would then make a signal of that bit.
    return values[0] if min(values) == max(values) else fsum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1); exactly 0 of equal numbers, of one and of none."""
    if len(values) < 2:
        return 0.0
    return sqrt(fsum(value * value for value in centred(values)) / (len(values) - 1))


def centred(values: Sequence[float]) -> list[float]:
    """Each value minus the mean; equal values give exactly 0."""
    middle = mean(values)
    return [value - middle for value in values]


def whitened(values: Sequence[float], epsilon: float) -> list[float]:
    """(x - mean) / (std + epsilon); equal values give exactly 0."""
    scale = spread(values) + epsilon
    return [value / scale for value in centred(values)]
