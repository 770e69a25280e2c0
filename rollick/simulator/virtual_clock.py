"""asyncio on a virtual clock: simulates hours in seconds, deterministically.

The code that runs on it is ordinary asyncio, and `loop.time()` is the virtual clock. Nothing really
waits: when no callback is ready, the clock jumps to the next timer. There are no threads and no
I/O, so a loop with no ready callback and no timer can never continue: it raises StuckError.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn, TypeVar

from rollick.errors import StuckError

Result = TypeVar("Result")

MAX_NAMED_TASKS = 8
"""Maximum tasks that an error message lists by name."""

MAX_CANCELLED = 100
"""The heap keeps at most this many cancelled timers, or half of its size if that is more."""


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` on a new clock, which begins at 0. Raises StuckError if everything waits and no
    timer is set. Tasks that `main` leaves behind are cancelled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is ready to run. Timers fire exactly at
    their time, equal times in the order of `call_at` (asyncio guarantees neither)."""

    # The base class's queue of ready callbacks: private, so it must be declared here.
    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__(_ClockSelector(self))
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._num_cancelled = 0

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def advance(self, *, idle: bool) -> None:
        """Queue the callbacks of due timers. If the loop is idle, first jump to the next timer."""
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
        """asyncio's hook. Rebuilds the heap when too many timers in it are cancelled."""
        if handle.when() <= self._now:
            return
        self._num_cancelled += 1
        if self._num_cancelled > max(MAX_CANCELLED, len(self._timers) // 2):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapify(self._timers)
            self._num_cancelled = 0

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:
        raise StuckError(
            f"{getattr(func, '__qualname__', func)} needs a thread, and the virtual clock would "
            "not wait for it",
            fix="call it directly, or sleep for as long as it would take",
        )

    def _raise_stuck(self) -> NoReturn:
        tasks = asyncio.all_tasks(self)
        pairs = [(t.get_name(), getattr(t.get_coro(), "__qualname__", "")) for t in tasks]
        names = sorted(f"{task} ({coroutine})" if coroutine else task for task, coroutine in pairs)
        more = f" and {len(names) - MAX_NAMED_TASKS} more" if len(names) > MAX_NAMED_TASKS else ""
        raise StuckError(
            f"nothing is scheduled at virtual time {self._now:g} s, and these tasks still wait: "
            f"{', '.join(names[:MAX_NAMED_TASKS])}{more}",
            fix="look for a future that nobody completes, or give the wait a timeout",
        )


class _ClockSelector(selectors.SelectSelector):
    """A selector that advances the clock where the loop would block for I/O."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.advance(idle=timeout is None)
        return []
