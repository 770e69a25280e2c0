"""asyncio on a virtual clock: hours of schedule in seconds, the same events every time.

Owns the event loop of a simulation. The code that runs on it is ordinary asyncio: `sleep`,
`timeout`, `call_at` and `TaskGroup` work unchanged, and `loop.time()` is the virtual clock. Nothing
really waits: when no callback is ready, the clock jumps to the next timer.

    ready callbacks -> run them all -> none left -> clock = next timer -> ready callbacks -> ...

There are no threads and no IO, so nothing outside can wake the loop. With neither a callback nor a
timer left the program is stuck for good, and that is an error with the names of who waits.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn, TypeVar

from rollick.errors import StuckError

Result = TypeVar("Result")

NAMED = 8
"""How many of the waiting tasks an error names; the rest are counted."""

KEPT_CANCELLED = 100
"""Cancelled timers that are not worth a tidy-up."""


def run_virtual(main: Coroutine[Any, Any, Result], *, start: float = 0.0) -> Result:
    """Run `main` to its end on a clock of its own that begins at `start` seconds.

    Raises StuckError if everything waits and no timer is set. Tasks that `main` leaves behind
    are cancelled. Not to be called from a running event loop.
    """
    if not math.isfinite(start):
        main.close()
        raise ValueError(f"a clock cannot start at {start}")
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(start)) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is ready to run.

    It keeps the timers itself: at one time they fire in the order in which they were set (asyncio
    promises none), and exactly at that time, neither early nor late.
    """

    # The queue of callbacks of asyncio's base class, which it does not declare in public.
    _ready: deque[asyncio.Handle]

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(_Jump(self))
        self._now = start
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = 0
        self._timers_cancelled = 0

    def time(self) -> float:
        return self._now

    @property
    def timers(self) -> int:
        """Timers that are kept, cancelled ones among them."""
        return len(self._timers)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_set += 1
        heappush(self._timers, (when, self._timers_set, handle))
        return handle

    def move_on(self, *, idle: bool) -> None:
        """Make the timers that are due ready; if the loop is idle, at the time of the next one."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if idle:
            if not timers or timers[0][0] == math.inf:
                self._raise_stuck()
            self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heappop(timers)[2])

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio's hook. Timers that are due go by themselves; of the others, which may be due
        in hours, no more than half are dead."""
        if handle.when() <= self._now:
            return
        self._timers_cancelled += 1
        if self._timers_cancelled > max(KEPT_CANCELLED, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapify(self._timers)
            self._timers_cancelled = 0

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        raise StuckError(
            f"{getattr(func, '__qualname__', func)} wants a thread, and the virtual clock would "
            "not wait for it",
            fix="call it directly, or sleep for as long as it would take",
        )

    def _raise_stuck(self) -> NoReturn:
        names = sorted(_named(task) for task in asyncio.all_tasks(self))
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        raise StuckError(
            f"nothing is scheduled at virtual time {self._now:g} s, and these tasks still wait: "
            f"{', '.join(names[:NAMED])}{more}",
            fix="look for a future that nobody completes, or give the wait a timeout",
        )


class _Jump(selectors.SelectSelector):
    """Stands where the loop would block for IO: instead of waiting, it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.move_on(idle=timeout is None)
        return []


def _named(task: asyncio.Task[Any]) -> str:
    function = getattr(task.get_coro(), "__qualname__", "")
    return f"{task.get_name()} ({function})" if function else task.get_name()
