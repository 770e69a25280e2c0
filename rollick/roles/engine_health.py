"""Whether an engine answers and makes progress, seen from the polls of its results.

    poll -> EngineLoad -> EngineHealth.check_progress: WorkerHung without progress for too long

A poll that does not return in time means that the process does not run (SIGSTOP, swap, a lost
network). Polls that return, but always with the same tokens, mean that the computation hangs. Both
deadlines are measured (cluster/deadlines.py). Until an engine has generated, they are the ceiling:
its first step compiles kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from rollick.cluster.deadlines import Deadlines
from rollick.errors import WorkerHung
from rollick.roles.protocols import POLL_TIMEOUT_S
from rollick.types import EngineLoad, RoleName


@dataclass(slots=True)
class EngineHealth:
    role: RoleName
    rank: int
    deadlines: Deadlines
    now: Callable[[], float]
    is_paused: bool = False
    _stalling_calls: int = 0
    """Number of calls in flight that may stall decoding, such as those of a publish."""
    _progress: tuple[int, float, int] | None = None
    _last_progress_at: float = 0.0

    @contextmanager
    def expect_no_progress(self) -> Generator[None]:
        """The engine may stall during the block: a call with its own deadline runs."""
        self._stalling_calls += 1
        try:
            yield
        finally:
            self._stalling_calls -= 1
            self._progress = None

    def poll_limit_s(self, load: EngineLoad) -> float:
        """The deadline of the next poll, including the time that it waits on the host."""
        if not load.generated_tokens:
            return POLL_TIMEOUT_S + self.deadlines.ceiling_s
        return POLL_TIMEOUT_S + self.deadlines.limit(self.role, "poll_results")

    def check_progress(self, load: EngineLoad, seconds: float, *, has_requests: bool) -> None:
        """Process a poll that took `seconds`. Raises WorkerHung if the engine has requests, but has
        made no progress for too long."""
        self.deadlines.observe(self.role, "poll_results", max(0.0, seconds - POLL_TIMEOUT_S))
        progress = (load.generated_tokens, load.busy_seconds, load.kv_tokens)
        now, stalled_s = self.now(), self.now() - self._last_progress_at
        may_stall = self.is_paused or self._stalling_calls or not has_requests
        if may_stall or progress != self._progress:
            if not may_stall and self._progress is not None:
                self.deadlines.observe(self.role, "progress", stalled_s)
            self._progress, self._last_progress_at = progress, now
            return
        limit_s = self.deadlines.ceiling_s
        if load.generated_tokens:
            limit_s = self.deadlines.limit(self.role, "progress")
        if stalled_s > limit_s:
            requests = f"{load.running} running and {load.waiting} waiting requests"
            name = f"{self.role} {self.rank}"
            message = f"{name} generated no token for {stalled_s:.0f} s with {requests}"
            failed_at = time.time() - stalled_s
            raise WorkerHung(message, fix="see the worker's log", failed_at=failed_at)
