"""Keeps the controller's event loop responsive: measures its lag, avoids long garbage collections.

The controller schedules every sample, so blocking its event loop delays all of them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

LOG = logging.getLogger("rollick")

MEASURE_EVERY_S = 0.1
MAX_LAG_S = 0.05
"""Warn if the event loop lags by more than this."""

GC_THRESHOLDS = (50_000, 50, 200)
"""See gc.set_threshold: new objects before a collection of the youngest generation, and how many
collections of one generation come before one of the next."""
GC_OBJECTS_PER_SAMPLE = 32
"""New objects for each sample in flight before a collection: more than twice what a sample has, so
that samples that come and go at the same rate cause none."""


class LagMeter:
    """Measures event-loop lag: how late a sleeping task wakes up. Created by `open`."""

    def __init__(self, phase: Callable[[], str], *, warn: bool) -> None:
        self._phase = phase
        self._should_warn = warn
        self._clock = asyncio.get_running_loop().time
        self._longest_s = 0.0
        self._due = self._clock() + MEASURE_EVERY_S

    @classmethod
    @asynccontextmanager
    async def open(cls, phase: Callable[[], str], *, warn: bool = True) -> AsyncGenerator[LagMeter]:
        """`phase()` returns the run's current phase. Warns about the first long lag, unless models
        run in this process (`warn` false) and block it by design."""
        meter = cls(phase, warn=warn)
        task = asyncio.create_task(meter._measure(), name="lag meter")
        try:
            yield meter
        finally:
            task.cancel()
            await asyncio.wait({task})

    def take_ms(self) -> float:
        """The longest lag since the last call, in milliseconds."""
        longest = max(self._longest_s, self._clock() - self._due)
        self._longest_s = 0.0
        return longest * 1000

    async def _measure(self) -> None:
        while True:
            phase = self._phase()
            self._due = self._clock() + MEASURE_EVERY_S
            await asyncio.sleep(MEASURE_EVERY_S)
            lag = self._clock() - self._due
            self._longest_s = max(self._longest_s, lag)
            if lag > MAX_LAG_S and self._should_warn:
                self._should_warn = False
                text = (
                    "the controller's event loop was blocked for %.0f ms in the phase %s, which "
                    "delays all samples; controller/event_loop_lag_ms is the longest lag of a step"
                )
                LOG.warning(text, lag * 1000, phase)


@contextmanager
def rare_garbage_collection(samples: int) -> Generator[None]:
    """Raise Python's gc thresholds for a run with `samples` samples in flight. Samples form no
    cycles, but a full collection visits each of them: with a million samples it blocks the event
    loop for seconds."""
    before = gc.get_threshold()
    rare = (max(GC_THRESHOLDS[0], GC_OBJECTS_PER_SAMPLE * samples), *GC_THRESHOLDS[1:])
    gc.set_threshold(*(max(pair) for pair in zip(before, rare, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
