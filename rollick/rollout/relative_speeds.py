"""The speed of each engine, or of each rank of the learner, relative to the median: which are slow.

    work ends -> observe(worker, tokens, seconds)      a step ends -> end_step() -> newly slow

The speed of an engine is that of its requests: tokens per second of decoding, without queue and
prefill, over the last steps. Unlike the throughput of an engine, it does not fall when the engine
has few requests. With throughput, an engine that got less work would look slow and get even less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median_high

WINDOW_STEPS = 5
MIN_TOKENS = 32
"""A worker with fewer tokens in the window is not compared."""
SLOW_BELOW = 0.55
"""A worker with a lower relative speed is slow: a half, with a margin of error."""
RECOVERED_ABOVE = 0.7
SLOW_STEPS = 3
"""Consecutive steps after which a worker counts as slow, or as recovered."""
FULL_WORK_ABOVE = 0.8
"""A worker with a higher relative speed gets full work: such differences are noise."""
MIN_WEIGHT = 0.1


@dataclass(slots=True, eq=False)
class _Speed:
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    tokens: int = 0
    seconds: float = 0.0
    relative_speed: float = 1.0
    is_slow: bool = False
    steps_since_change: int = 0
    """Consecutive steps whose measurement contradicts `is_slow`."""

    def end_step(self) -> float | None:
        """Tokens per second over the window; None if there are too few."""
        self.steps.append((self.tokens, self.seconds))
        self.tokens, self.seconds = 0, 0.0
        tokens, seconds = (sum(column) for column in zip(*self.steps, strict=True))
        return tokens / seconds if tokens >= MIN_TOKENS and seconds > 0 else None

    def update(self, relative_speed: float) -> bool:
        """Update the speed. Returns whether the worker just became slow."""
        self.relative_speed = relative_speed
        looks_slow = relative_speed < (RECOVERED_ABOVE if self.is_slow else SLOW_BELOW)
        self.steps_since_change = self.steps_since_change + 1 if looks_slow != self.is_slow else 0
        if self.steps_since_change < SLOW_STEPS:
            return False
        self.is_slow, self.steps_since_change = looks_slow, 0
        return looks_slow


class RelativeSpeeds:
    """The speeds of workers, by number."""

    def __init__(self) -> None:
        self._speeds: dict[int, _Speed] = {}

    def add(self, worker: int) -> None:
        self._speeds[worker] = _Speed()

    def remove(self, worker: int) -> None:
        self._speeds.pop(worker, None)

    def observe(self, worker: int, *, tokens: int, seconds: float) -> None:
        """The worker computed so many tokens in so many seconds."""
        speed = self._speeds.get(worker)
        if speed is not None and tokens > 0 and seconds > 0:
            speed.tokens += tokens
            speed.seconds += seconds

    def end_step(self) -> list[int]:
        """Compare the workers. Returns those that just became slow."""
        measured = {worker: speed.end_step() for worker, speed in self._speeds.items()}
        rates = {worker: rate for worker, rate in measured.items() if rate is not None}
        if len(rates) < 2:
            return []
        median = median_high(rates.values())
        return [w for w, rate in rates.items() if self._speeds[w].update(rate / median)]

    def relative_speed(self, worker: int) -> float:
        """The worker's speed relative to the median, as of the last step; 1 if unknown."""
        speed = self._speeds.get(worker)
        return 1.0 if speed is None else speed.relative_speed

    def weight(self, worker: int) -> float:
        """How much work the worker gets, compared with one of median speed."""
        relative_speed = self.relative_speed(worker)
        return 1.0 if relative_speed > FULL_WORK_ABOVE else max(MIN_WEIGHT, relative_speed)

    @property
    def slow_workers(self) -> list[int]:
        return [worker for worker, speed in self._speeds.items() if speed.is_slow]
