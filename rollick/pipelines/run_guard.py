"""Ends a run that can no longer end itself: its event loop is blocked, or a stop takes too long.

    signal ──> RunGuard (a thread) ──> asyncio            normally: the run saves and stops
                  │ stop_grace_s after the signal          exit 75: the last checkpoint counts
                  │ Ray on this machine is stopped, or     exit 69: --resume continues
                  │ a call of Ray blocks the event loop
                  └─> kills all processes of the run, then this one

Nothing is saved at such an end. Checkpoints are atomic, so the newest one stays valid.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollick.children.process_tree import (
    ProcessId,
    find_descendants,
    find_stopped,
    kill_processes,
    read_name,
    send_kill,
)
from rollick.errors import EXIT_INTERRUPTED, EXIT_RETRY

LOG = logging.getLogger("rollick")

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
RAY_PROGRAMS = ("raylet", "gcs_server")
RAY_FOLDER = f"{os.sep}ray{os.sep}"
CHECK_EVERY_S = 1.0
"""How often the guard checks whether the run is stuck."""
STOPPED_S = 10.0
"""How long a process of Ray may be stopped before the run ends."""
KILL_TIMEOUT_S = 10.0
PREPARED_PROCESSES: set[ProcessId] = set()
"""Processes that were started ahead for the run (standby.py), and belong to it."""


@dataclass(slots=True)
class RunGuard:
    """Watches the event loop of the main thread, from a thread of its own."""

    has_checkpoint: Callable[[], bool]
    stop_grace_s: float
    blocked_limit_s: float
    """How long a call of Ray may block the event loop."""
    end: Callable[[int], None] = os._exit
    clock: Callable[[], float] = time.monotonic
    signalled_at: float | None = None
    loop_seen_at: float = 0.0
    stopped_since: float | None = None
    _earlier: set[ProcessId] = field(
        default_factory=lambda: find_descendants() - PREPARED_PROCESSES
    )
    """Processes that do not belong to the run."""

    def end_if_stuck(self) -> None:
        """End the run if it cannot end itself."""
        reason = self._find_reason()
        if reason is None:
            return
        was_stopped = self.signalled_at is not None and self.has_checkpoint()
        code = EXIT_INTERRUPTED if was_stopped else EXIT_RETRY
        LOG.error("ending the run at once: %s; --resume continues from its last checkpoint", reason)
        with suppress(OSError):  # Without a free descriptor, no process can be found.
            kill_processes(self._find_others, timeout_s=KILL_TIMEOUT_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        with suppress(OSError):
            for process in find_descendants() - self._earlier:
                send_kill(process)
        self.end(code)

    def _find_others(self) -> list[ProcessId]:
        """The processes of the run except Ray's own. Those are killed last: when they die, Ray ends
        this process with an exit code that says nothing."""
        run = find_descendants() - self._earlier
        return [process for process in run if read_name(process.pid) not in RAY_PROGRAMS]

    def _find_reason(self) -> str | None:
        now = self.clock()
        if self.signalled_at is not None and now - self.signalled_at > self.stop_grace_s:
            return f"it did not stop within run.stop_grace_s={self.stop_grace_s:g} s of a signal"
        stopped: list[ProcessId] = []
        with suppress(OSError):  # No free descriptor.
            stopped = [each for each in find_stopped(RAY_PROGRAMS) if each not in self._earlier]
        if not stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        elif now - self.stopped_since > STOPPED_S:
            pids = ", ".join(str(process.pid) for process in stopped)
            return f"processes of Ray have been stopped for {STOPPED_S:g} s ({pids})"
        blocked_s = now - self.loop_seen_at
        if blocked_s > self.blocked_limit_s and (call := _ray_call_of_main_thread()):
            return f"{call} has blocked the event loop for {blocked_s:.0f} s; Ray does not answer"
        return None


@contextmanager
def guard_run(
    has_checkpoint: Callable[[], bool], *, stop_grace_s: float, blocked_limit_s: float
) -> Generator[None]:
    """Guard the run in the block. The signal handlers of asyncio must be installed before. Does
    nothing outside the main thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    guard = RunGuard(has_checkpoint, stop_grace_s, blocked_limit_s)
    guard.loop_seen_at = guard.clock()
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    asyncio_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    ended = threading.Event()
    loop = asyncio.get_running_loop()
    arguments = (guard, reader, asyncio_fd, loop, ended)
    thread = threading.Thread(target=_watch, args=arguments, daemon=True, name="run guard")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        current = signal.set_wakeup_fd(-1)
        # Keep another descriptor that was set meanwhile, or -1 if the last handler was removed.
        restored = asyncio_fd if current == writer else current
        signal.set_wakeup_fd(restored, warn_on_full_buffer=False)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)


def _watch(
    guard: RunGuard,
    reader: int,
    asyncio_fd: int,
    loop: asyncio.AbstractEventLoop,
    ended: threading.Event,
) -> None:
    def record_loop_time() -> None:
        guard.loop_seen_at = guard.clock()

    poll = select.poll()  # Not select(), which cannot wait for descriptors above 1023.
    poll.register(reader, select.POLLIN)
    while not ended.is_set():
        if poll.poll(1000 * CHECK_EVERY_S):
            numbers = os.read(reader, 4096)  # Python writes each signal's number as a byte.
            if guard.signalled_at is None and any(number in STOP_SIGNALS for number in numbers):
                guard.signalled_at = guard.clock()
            if asyncio_fd >= 0 and not ended.is_set():
                with suppress(OSError):  # Full: the loop wakes up anyway.
                    os.write(asyncio_fd, numbers)
            continue
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(record_loop_time)
        guard.end_if_stuck()


def _ray_call_of_main_thread() -> str | None:
    """The call of rollick that is inside Ray on the main thread; None if it is not in Ray."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] (documented)
    frame = frames.get(threading.main_thread().ident or 0)
    is_in_ray = False
    while frame is not None:
        path = frame.f_code.co_filename
        if is_in_ray and f"{os.sep}rollick{os.sep}" in path:
            return f"{Path(path).name}:{frame.f_lineno}"
        is_in_ray = is_in_ray or RAY_FOLDER in path
        frame = frame.f_back
    return "Ray" if is_in_ray else None
