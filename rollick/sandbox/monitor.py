"""Watches the boxes of one program until it ends or exceeds a limit.

stdout, stderr of each box --+
exit of the last box      ---+--> BoxMonitor.wait() -> Status, with output and outcomes
frames of the test box    ---+                         (local.py makes a Result)
wall clock, memory        ---+
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollick.sandbox.base import Limits, Status
from rollick.sandbox.box import Box
from rollick.sandbox.memory import count_files, measure_memory
from rollick.sandbox.outcomes import ReportEnd, TestReports

CHECK_INTERVAL_S = 0.1
"""Time between two checks of a box's memory."""
MAX_FILES = 20_000
"""Files of a box: an empty file takes kernel memory that no size limit counts."""


@dataclass(slots=True, eq=False)
class BoxMonitor:
    """Output and outcomes so far. `boxes[0]` runs the program or the candidate."""

    boxes: Sequence[Box]
    limits: Limits
    stdin: bytes = b""
    reports: TestReports | None = None
    """The reports of the last box, if it runs tests."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    _stopped: asyncio.Future[Status | None] | None = None

    async def wait(self) -> Status | None:
        """Wait for the first reason to stop: OK after the last outcome, None if the last box has
        exited. The caller ends the boxes."""
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        pipes, last_box = self._output_pipes(), self.boxes[-1]
        for pipe in pipes:
            loop.add_reader(pipe, self._on_output, pipe)
        if self.reports is None:
            end_fd = last_box.exit_fd
            loop.add_reader(end_fd, self._stop, None)
        else:
            end_fd = last_box.control.fileno()
            loop.add_reader(end_fd, self._on_report, self.reports)
        self._write_stdin()
        check = asyncio.create_task(self._check_memory(), name="memory of a box")
        try:
            async with asyncio.timeout(self.limits.wall_s):
                return await self._stopped
        except TimeoutError:
            return Status.TIMEOUT
        finally:
            check.cancel()
            for descriptor in (*pipes, end_fd):
                loop.remove_reader(descriptor)
            if self.boxes[0].stdin >= 0:
                loop.remove_writer(self.boxes[0].stdin)

    def drain(self) -> None:
        """Read the rest of the pipes, up to the limit. Call this after the boxes ended."""
        for pipe in self._output_pipes():
            while self._remaining_bytes > 0 and self._read(pipe):
                pass

    def decode_output(self) -> tuple[str, str]:
        """stdout and stderr so far."""
        return self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace")

    def _output_pipes(self) -> list[int]:
        return [pipe for box in self.boxes for pipe in (box.stdout, box.stderr)]

    @property
    def _remaining_bytes(self) -> int:
        return self.limits.output_bytes - len(self.stdout) - len(self.stderr)

    def _stop(self, status: Status | None) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(status)

    def _on_output(self, pipe: int) -> None:
        if not self._read(pipe):
            asyncio.get_running_loop().remove_reader(pipe)
        if self._remaining_bytes <= 0:
            self._stop(Status.OUTPUT_LIMIT)

    def _read(self, pipe: int) -> bool:
        """Read once; returns whether there was output. Output of the test box counts as stderr."""
        try:
            chunk = os.read(pipe, max(1, min(1 << 16, self._remaining_bytes)))
        except OSError:
            return False
        (self.stdout if pipe == self.boxes[0].stdout else self.stderr).extend(chunk)
        return bool(chunk)

    def _write_stdin(self) -> None:
        """Write the program's input as it reads it, then close the pipe."""
        box, loop = self.boxes[0], asyncio.get_running_loop()
        try:
            while self.stdin:
                self.stdin = self.stdin[os.write(box.stdin, self.stdin[: 1 << 16]) :]
        except BlockingIOError:
            loop.add_writer(box.stdin, self._write_stdin)
            return
        except OSError:
            self.stdin = b""
        loop.remove_writer(box.stdin)
        os.close(box.stdin)
        box.stdin = -1

    def _on_report(self, reports: TestReports) -> None:
        """Read reports of the test box; stop at the last one, or when it closes the socket."""
        try:
            chunk = self.boxes[-1].control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        try:
            reports.feed(chunk)
        except ValueError:
            # Not a report: only a candidate that shares the box with the tests writes this.
            self._stop(Status.KILLED)
        if reports.end is not None:
            is_invalid = reports.end is ReportEnd.INVALID
            self._stop(Status.INFRASTRUCTURE if is_invalid else Status.OK)
        elif not chunk:
            self._stop(None)

    async def _check_memory(self) -> None:
        """Stop if a box exceeds its total memory or number of files, which no rlimit bounds."""
        max_bytes = self.limits.memory_mb << 20
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self.out_of_memory:
                self._stop(Status.MEMORY)
            for pid in (box.init_pid for box in self.boxes if box.init_pid):
                if measure_memory(pid, max_bytes) > max_bytes or count_files(pid) > MAX_FILES:
                    self._stop(Status.MEMORY)

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process at the limit of its memory cgroup."""
        return any(box.group is not None and box.group.is_exhausted for box in self.boxes)
