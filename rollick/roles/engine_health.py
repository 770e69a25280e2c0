"""Whether an engine answers and makes progress, seen from the polls of its results.

    poll -> EngineLoad -> EngineHealth.check_progress: WorkerHung if tokens stand still too long

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
    _calls: int = 0
    """Calls in flight that may stop the decoding, such as those of a publish."""
    _progress: tuple[int, float, int] | None = None
    _progressed_at: float = 0.0

    @contextmanager
    def expect_no_progress(self) -> Generator[None]:
        """The engine may stand still during the block: a call with its own deadline runs."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._progress = None

    def poll_limit_s(self, load: EngineLoad) -> float:
        """The deadline of the next poll, with the time that it waits on the host."""
        if not load.generated_tokens:
            return POLL_TIMEOUT_S + self.deadlines.ceiling_s
        return POLL_TIMEOUT_S + self.deadlines.limit(self.role, "poll_results")

    def check_progress(self, load: EngineLoad, seconds: float, *, has_requests: bool) -> None:
        """A poll returned after so many seconds. Raises WorkerHung if the engine has requests, and
        its tokens stand still for too long."""
        self.deadlines.observe(self.role, "poll_results", max(0.0, seconds - POLL_TIMEOUT_S))
        progress = (load.generated_tokens, load.busy_seconds, load.kv_tokens)
        now, stood_still_s = self.now(), self.now() - self._progressed_at
        may_stand_still = self.is_paused or self._calls or not has_requests
        if may_stand_still or progress != self._progress:
            if not may_stand_still and self._progress is not None:
                self.deadlines.observe(self.role, "progress", stood_still_s)
            self._progress, self._progressed_at = progress, now
            return
        limit_s = self.deadlines.ceiling_s
        if load.generated_tokens:
            limit_s = self.deadlines.limit(self.role, "progress")
        if stood_still_s > limit_s:
            requests = f"{load.running} running and {load.waiting} waiting requests"
            who = f"{self.role} {self.rank}"
            text = f"{who} generated no token for {stood_still_s:.0f} s with {requests}"
            failed_at = time.time() - stood_still_s
            raise WorkerHung(text, fix="see the worker's log", failed_at=failed_at)
