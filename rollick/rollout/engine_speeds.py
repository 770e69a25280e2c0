"""How fast each engine decodes compared with the others: which one is slow. Pure.

    request ends -> observe(engine, tokens, seconds)      a step ends -> end_step() -> newly slow

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
"""An engine with fewer tokens in the window is not compared."""
SLOW = 0.55
"""Below this share of the others' speed an engine is slow: a half, with a margin of error."""
RECOVERED = 0.7
SLOW_STEPS = 3
"""Steps in a row after which an engine is called slow, or recovered."""
NOTICED = 0.8
"""Above this share, an engine gets full work: such differences are noise."""
MIN_WEIGHT = 0.1


@dataclass(slots=True, eq=False)
class _Speed:
    steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    tokens: int = 0
    seconds: float = 0.0
    share: float = 1.0
    """Its speed as a share of the others'."""
    is_slow: bool = False
    changed_for: int = 0
    """Steps in a row in which it looked slow although it is not called so, or the reverse."""

    def end_step(self) -> float | None:
        """Tokens per second over the window; None if there are too few."""
        self.steps.append((self.tokens, self.seconds))
        self.tokens, self.seconds = 0, 0.0
        tokens, seconds = (sum(column) for column in zip(*self.steps, strict=True))
        return tokens / seconds if tokens >= MIN_TOKENS and seconds > 0 else None

    def compare(self, share: float) -> bool:
        """Set its share; returns whether it is called slow from now on."""
        self.share = share
        looks_slow = share < (RECOVERED if self.is_slow else SLOW)
        self.changed_for = self.changed_for + 1 if looks_slow != self.is_slow else 0
        if self.changed_for < SLOW_STEPS:
            return False
        self.is_slow, self.changed_for = looks_slow, 0
        return looks_slow


class EngineSpeeds:
    """The speeds of the engines of a fleet, by number."""

    def __init__(self) -> None:
        self._speeds: dict[int, _Speed] = {}

    def add(self, engine: int) -> None:
        self._speeds[engine] = _Speed()

    def remove(self, engine: int) -> None:
        self._speeds.pop(engine, None)

    def observe(self, engine: int, *, tokens: int, seconds: float) -> None:
        """A request decoded so many tokens in so many seconds."""
        speed = self._speeds.get(engine)
        if speed is not None and tokens > 0 and seconds > 0:
            speed.tokens += tokens
            speed.seconds += seconds

    def end_step(self) -> list[int]:
        """Compare the engines; returns those that are called slow since this step."""
        measured = {engine: speed.end_step() for engine, speed in self._speeds.items()}
        known = {engine: rate for engine, rate in measured.items() if rate is not None}
        if len(known) < 2:
            return []
        usual = median_high(known.values())
        return [e for e, rate in known.items() if self._speeds[e].compare(rate / usual)]

    def share(self, engine: int) -> float:
        """The engine's speed as a share of the others', as of the last step; 1 if unknown."""
        speed = self._speeds.get(engine)
        return 1.0 if speed is None else speed.share

    def weight(self, engine: int) -> float:
        """How much work it gets, compared with an engine of usual speed."""
        share = self.share(engine)
        return 1.0 if share > NOTICED else max(MIN_WEIGHT, share)

    @property
    def slow(self) -> list[int]:
        return [engine for engine, speed in self._speeds.items() if speed.is_slow]
