"""Deadlines of calls to workers, from the times that earlier calls took.

    limit = MULTIPLE x the slowest of the last RECENT calls of the same kind,
            at least a floor, at most the ceiling (cluster.call_timeout_s)

A deadline that is too early kills a working process, whose work is then repeated. A late one is
better, so every choice here errs on the late side.

- A kind of call (role and method) has the ceiling until one has succeeded, and again after a host
  of the role was built: the first call compiles kernels, warms caches and reads files.
- MULTIPLE is 10: a machine that other jobs begin to share can become that much slower.
- Work on a batch is measured per token, so that a larger batch has a later deadline.
- The floors cover delays that earlier calls do not show. An engine's answer to `poll_results` or
  `describe` needs only its event loop: after 5 s its process does not run. Page faults or the start
  of another process may delay a computation: 30 s. A long prefill is one step; most calls of an
  engine, and the learner that sends it weights, wait for its end: 300 s. (Polls find an engine that
  hangs in such a call.) Network disks stall for minutes: 300 s too. On a GPU, every new shape costs
  kernel compilation and graph capture: four times as long.
- In one process (backend inline) nothing could be killed, and a computation blocks all calls: the
  ceiling.
"""

from __future__ import annotations

from collections import deque

MULTIPLE = 10.0
RECENT = 32
FLOOR_S = 30.0
_WAIT_FOR_STEP = (
    "submit",
    "pause",
    "resume",
    "sleep",
    "wake",
    "receive",
    "commit",
    "commit_shared",
)
_WAIT_FOR_OTHERS = ("send_weights", "save", "load")
FLOORS_S = {
    "poll_results": 5.0,
    "describe": 5.0,
    "progress": 120.0,
    **dict.fromkeys((*_WAIT_FOR_STEP, *_WAIT_FOR_OTHERS), 300.0),
}
"""By method. `progress` is not a method: it is how long an engine that has requests may go without
a new token."""
GPU_FACTOR = 4.0
GRACE_S = 1.0
"""Extra time after a deadline to read replies that arrived while the event loop was blocked."""


class Deadlines:
    """Measured times by role and method. `measured=False`: every limit is the ceiling."""

    def __init__(self, ceiling_s: float, *, measured: bool = True, on_gpu: bool = False) -> None:
        self.ceiling_s = ceiling_s
        self.floors_s = dict(FLOORS_S)
        """By method; FLOOR_S for all others."""
        self._measured = measured
        self._factor = GPU_FACTOR if on_gpu else 1.0
        self._seconds: dict[tuple[str, str], deque[float]] = {}
        """Durations of the last calls; per token for work on a batch."""

    def limit(self, role: str, method: str, *, size: int = 1) -> float:
        """Seconds that the next call may take. `size`: tokens of its batch, 1 if it has none."""
        seconds = self._seconds.get((role, method))
        if not seconds or not self._measured:
            return self.ceiling_s
        floor_s = self._factor * self.floors_s.get(method, FLOOR_S)
        return min(self.ceiling_s, max(floor_s, MULTIPLE * max(seconds) * size))

    def observe(self, role: str, method: str, seconds: float, *, size: int = 1) -> None:
        """A call succeeded after so many seconds."""
        recent = self._seconds.setdefault((role, method), deque(maxlen=RECENT))
        recent.append(seconds / max(1, size))

    def forget(self, role: str) -> None:
        """Limit the role's next calls by the ceiling, because its process is new."""
        others = {kind: recent for kind, recent in self._seconds.items() if kind[0] != role}
        self._seconds = others
