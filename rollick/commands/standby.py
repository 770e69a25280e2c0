"""A standby of `rollick train --restarts N --standby`: a process that waits to resume the run.

    supervisor --start--> rollick train --resume --wait   imports, starts Ray and worker processes
               --take--> a line on its stdin              it resumes the run
               --discard, or end of file on its stdin-->  it ends

Each standby is used once. The next one is started when the resumed run has made a step, so that it
does not slow the restart down.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from subprocess import PIPE
from types import FrameType

from rollick.children.process_tree import (
    ProcessId,
    find_descendants,
    is_stopped,
    signal_on_parent_death,
)

LOG = logging.getLogger("rollick")


@dataclass(slots=True)
class Standby:
    """The supervisor's side. Holds one process, or none."""

    command: Callable[[], Sequence[str]]
    _process: subprocess.Popen[bytes] | None = None
    _has_failed: bool = False

    def start(self) -> None:
        """Start a process unless one is held. If one ended on its own, none is started again."""
        if self._process is not None and self._process.poll() is not None:
            LOG.warning("the standby process ended unexpectedly; a restart will take longer")
            self._process, self._has_failed = None, True
        if self._process is None and not self._has_failed:
            self._process = start_run(self.command(), stdin=PIPE)

    def take(self) -> subprocess.Popen[bytes] | None:
        """Tell the process to resume the run, and return it; None if there is no working one."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.poll() is not None:
            return None
        if is_stopped(process.pid):
            _kill(process)
            return None
        try:
            process.stdin.write(b"start\n")
            process.stdin.close()
        except BrokenPipeError:
            return None
        return process

    def processes(self) -> set[ProcessId]:
        if self._process is None:
            return set()
        pid = self._process.pid
        standby = {process for process in find_descendants() if process.pid == pid}
        return standby | find_descendants(pid)

    def discard(self) -> None:
        """Kill the process. The supervisor kills its children."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def start_run(command: Sequence[str], *, stdin: int | None = None) -> subprocess.Popen[bytes]:
    # In a separate process group: the supervisor passes a signal of the terminal on once.
    # The run saves if its supervisor dies.
    prepare = partial(signal_on_parent_death, signal.SIGTERM)
    return subprocess.Popen(command, process_group=0, preexec_fn=prepare, stdin=stdin)


def wait_for_start() -> bool:
    """Wait in the standby for the supervisor: True if it asks to resume the run, False if it has
    ended."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)  # Ends Ray too.

    previous = signal.signal(signal.SIGTERM, end)
    try:
        return bool(sys.stdin.buffer.readline())
    finally:
        signal.signal(signal.SIGTERM, previous)
