"""How late the controller is: the lag of its event loop.

The controller decides for every sample, so what blocks its loop delays all of them. A task that
sleeps and looks how late it wakes measures that; on a virtual clock there is nothing to measure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

LOG = logging.getLogger("rollick")

EVERY_S = 0.1
"""How often the lag is measured."""
TOO_LATE_S = 0.05
"""A lag above this is told."""


class LagMeter:
    """Measures while it is open. Made by `open`."""

    def __init__(self, phase: Callable[[], str], *, warn: bool) -> None:
        self._phase = phase
        self._warns = warn
        self._clock = asyncio.get_running_loop().time
        self._worst_s = 0.0
        self._due = self._clock() + EVERY_S

    @classmethod
    @asynccontextmanager
    async def open(cls, phase: Callable[[], str], *, warn: bool = True) -> AsyncGenerator[LagMeter]:
        """`phase` names what the run does now. The first lag that is too long is warned of; not
        where models run in this process (`warn` false), since they hold it up as they must."""
        meter = cls(phase, warn=warn)
        task = asyncio.create_task(meter._measure(), name="lag meter")
        try:
            yield meter
        finally:
            task.cancel()
            await asyncio.wait({task})

    def take_ms(self) -> float:
        """The longest lag since the last call, in milliseconds."""
        worst = max(self._worst_s, self._clock() - self._due)
        self._worst_s = 0.0
        return worst * 1000

    async def _measure(self) -> None:
        while True:
            phase = self._phase()
            self._due = self._clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            late = self._clock() - self._due
            self._worst_s = max(self._worst_s, late)
            if late > TOO_LATE_S and self._warns:
                self._warns = False
                LOG.warning(
                    "the controller was held up for %.0f ms in the phase %s: all samples wait "
                    "meanwhile. The longest time of each step is the metric controller/lag_ms",
                    late * 1000,
                    phase,
                )
