"""LocalSandbox: runs programs on this machine, each in a box that was started in advance.

    run(program) -> take a warm box (two with tests), start another -> send -> monitor -> end

A box runs one program and is never reused. With tests there are two boxes: the candidate's box sees
only calls, the test box sees only returned data. The parent connects them with two pipes and closes
its own copies of the pipes' ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollick.errors import SandboxError
from rollick.sandbox.base import CallCase, Isolation, Limits, Program, Result, Status, Tests
from rollick.sandbox.box import Box, BoxStarter, BoxStartError, compile_extra_modules
from rollick.sandbox.host import SandboxHost
from rollick.sandbox.monitor import BoxMonitor
from rollick.sandbox.outcomes import ReportEnd, TestReports
from rollick.sandbox.pytest_files import find_star_names, shared_box_reason
from rollick.sandbox.tested_names import find_used_modules
from rollick.sandbox.wire import WireError

REFUSED_FIX = "set allow_unsafe to run programs without isolation, or use a remote sandbox"
NONCE_BYTES = 16
MIN_WALL_S = 0.01
SIGNAL_EXIT_CODE = 128
"""If a signal killed the program, bubblewrap exits with this plus the signal number."""
CPU_TIME_SIGNAL = 24  # SIGXCPU


@dataclass(slots=True, eq=False)
class LocalSandbox:
    """A context manager; on exit, all boxes have ended. Idle boxes are not bound to an event loop,
    so several loops can use one sandbox, one after the other."""

    warm: int = 2
    """Number of idle boxes, started in advance."""
    concurrency: int = 8
    """Maximum number of concurrent programs; further ones wait."""
    allow_unsafe: bool = False
    host: SandboxHost = field(default_factory=SandboxHost.detect)
    _starter: BoxStarter = field(default_factory=BoxStarter)
    _idle: deque[Box] = field(default_factory=deque[Box])
    _semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
    _has_started_box: bool = False

    def __enter__(self) -> LocalSandbox:
        if self._can_run:
            self._refill()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the idle boxes. All programs must have ended."""
        for box in self._idle:
            box.kill()
        try:
            self._drop_idle()
        finally:
            self._starter.close()
            self.host.close()

    def _drop_idle(self) -> None:
        with ExitStack() as cleanup:  # drop all boxes, even if one raises
            while self._idle:
                cleanup.callback(self._drop, self._idle.popleft())

    def _drop(self, box: Box) -> None:
        try:
            if box.process.returncode is None:
                box.end_now()
        finally:
            box.close()

    @property
    def _can_run(self) -> bool:
        return self.host.isolation is not Isolation.NONE or self.allow_unsafe

    async def run(self, program: Program) -> Result:
        """Run one program in an unused box. Never raises because of what the program does."""
        try:
            for _ in range(2):
                if not self._can_run:
                    break
                try:
                    if program.tests is None:
                        return await self._run_script(program)
                    return await self._run_tests(program, program.tests)
                except BoxStartError as error:
                    if self._has_started_box:
                        raise
                    self._disable_isolation(str(error))
        except (SandboxError, WireError, OSError) as error:
            return Result(Status.INFRASTRUCTURE, self.host.isolation, detail=str(error))
        detail = f"{self.host.problem}; {REFUSED_FIX}"
        return Result(Status.REFUSED, self.host.isolation, detail=detail)

    def _disable_isolation(self, problem: str) -> None:
        """Called if no box ever started: bwrap is installed, but the kernel forbids its use."""
        if self.host.isolation is Isolation.NONE:
            return  # a concurrent `run` has disabled it
        self._drop_idle()
        self.host.problem = f"{problem}; {self.host.problem}".rstrip("; ")
        self.host.isolation, self.host.memory = Isolation.NONE, None

    async def _run_script(self, program: Program) -> Result:
        async with self._boxes(1, program.limits) as boxes:
            [box] = boxes
            monitor = BoxMonitor(boxes, program.limits, program.stdin.encode("utf-8", "replace"))
            await box.send(make_role_message("program", program) | {"code": program.code})
            status, seconds = await _wait_and_end(monitor)
            code = box.process.returncode if status is None else None
        if code is not None and code < 0:  # without bubblewrap
            code = SIGNAL_EXIT_CODE - code
        status = status or classify_exit(code, bytes(monitor.stderr))
        if status is Status.KILLED and seconds >= program.limits.cpu_s:
            # RLIMIT_CPU can end a box with SIGKILL, which looks like any other kill.
            status = Status.TIMEOUT
        host = self.host
        result = Result(status, host.isolation, *monitor.decode_output(), code, seconds)
        return replace(result, memory_limit=host.memory_limit)

    async def _run_tests(self, program: Program, tests: Tests) -> Result:
        if not tests.module:
            return (await self._run_boxes(program, tests))[0]
        reason = "" if tests.shared else shared_box_reason(str(tests.cases[0]), tests.module)
        shared = replace(tests, shared=True)
        result, reports = await self._run_boxes(program, shared if reason else tests)
        if reports.end is ReportEnd.SHARE:
            reason = reports.message
            # Both runs together may take wall_s.
            left_s = max(program.limits.wall_s - result.seconds, MIN_WALL_S)
            limits = replace(program.limits, wall_s=left_s)
            result, reports = await self._run_boxes(replace(program, limits=limits), shared)
        if (reason or tests.shared) and reports.end is ReportEnd.ENDED and not reports.count:
            # Check without the candidate, which could forge it, whether the file is broken.
            check_result, check_reports = await self._run_boxes(program, tests, has_candidate=False)
            if check_reports.end is not ReportEnd.ENDED:
                return check_result
        if reason and not result.detail:
            result = replace(result, detail=f"candidate and tests share a box: {reason}")
        return result

    async def _run_boxes(
        self, program: Program, tests: Tests, *, has_candidate: bool = True
    ) -> tuple[Result, TestReports]:
        """Run candidate and tests in two boxes, or in one. Without a candidate, a pytest file is
        only checked, in one box."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        message = make_tests_message(program, tests, nonce)
        shared = tests.shared and has_candidate
        isolation = self.host.isolation
        if shared and isolation is not Isolation.NONE:
            isolation = Isolation.SHARED
        has_pytest_file = bool(tests.module)
        test_count = 0 if has_pytest_file else len(tests.cases)
        reports = TestReports(nonce, test_count, from_candidate=shared)
        box_count = 2 if has_candidate and not shared else 1
        async with self._boxes(box_count, program.limits, mount_packages=has_pytest_file) as boxes:
            monitor = BoxMonitor(boxes, program.limits, reports=reports)
            if box_count == 1:
                await boxes[0].send(message | ({"code": program.code} if shared else {}))
            else:
                await _send_messages(boxes, make_candidate_message(program, tests), message)
            status, seconds = await _wait_and_end(monitor)
        # A test box that closed its socket before the final frame was stopped by the candidate.
        status = status or Status.KILLED
        reason = "" if status is Status.OK else f"not reached: {status}"
        # A pytest file that has not announced its tests counts as one.
        outcomes = reports.complete(max(1, reports.count), reason or "not reached")
        result = Result(
            *(status, isolation, *monitor.decode_output()),
            seconds=seconds,
            outcomes=outcomes,
            detail=reports.message or reason,
            memory_limit=self.host.memory_limit,
        )
        return result, reports

    @asynccontextmanager
    async def _boxes(
        self, count: int, limits: Limits, *, mount_packages: bool = False
    ) -> AsyncGenerator[list[Box]]:
        """Yield unused boxes that are ready. They have ended when the block exits."""
        async with self._get_semaphore():
            boxes: list[Box] = []
            with ExitStack() as cleanup:  # drop all boxes, even if one raises
                while len(boxes) < count:
                    is_last = len(boxes) == count - 1
                    boxes.append(self._take_box(mount_packages=mount_packages and is_last))
                    cleanup.callback(self._drop, boxes[-1])
                for box in boxes:
                    await box.wait_ready()
                    if self.host.memory is not None:
                        box.limit_memory(self.host.memory, limits.memory_mb)
                self._has_started_box = True
                yield boxes

    def _take_box(self, *, mount_packages: bool) -> Box:
        if mount_packages and "packages" not in self.host.sources:
            raise SandboxError("pytest is not installed", fix="pip install pytest")
        if mount_packages:
            return self._starter.start(self.host, mount_packages=True)
        # An idle box may have been killed from outside, for example by the OOM killer.
        while self._idle and self._idle[0].process.poll() is not None:
            self._drop(self._idle.popleft())
        box = self._idle.popleft() if self._idle else self._starter.start(self.host)
        self._refill()
        return box

    def _refill(self) -> None:
        while len(self._idle) < self.warm:
            self._idle.append(self._starter.start(self.host))

    def _get_semaphore(self) -> asyncio.Semaphore:
        """A semaphore belongs to one event loop, so each loop gets its own."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = (loop, asyncio.Semaphore(self.concurrency))
        return self._semaphore[1]


async def _send_messages(
    boxes: Sequence[Box], candidate: Mapping[str, object], tests: Mapping[str, object]
) -> None:
    """Connect the candidate's box and the test box with two pipes, and send both messages."""
    calls_r, calls_w = os.pipe()
    replies_r, replies_w = os.pipe()
    try:
        await boxes[0].send(candidate, (calls_r, replies_w))
        await boxes[1].send(tests, (replies_r, calls_w))
    finally:
        for end in (calls_r, calls_w, replies_r, replies_w):
            os.close(end)


async def _wait_and_end(monitor: BoxMonitor) -> tuple[Status | None, float]:
    """Wait until the program stops, then end its boxes. Returns the status and the seconds."""
    started = time.perf_counter()
    status = await monitor.wait()
    seconds = time.perf_counter() - started
    monitor.boxes[0].kill()
    for box in reversed(monitor.boxes):
        await box.end()
    monitor.drain()
    return Status.MEMORY if monitor.out_of_memory else status, seconds


def make_role_message(role: str, program: Program) -> dict[str, Any]:
    """The role of a box, and its rlimits. `wall_s` is left out: the parent enforces it."""
    limits = {name: int(value) for name, value in asdict(program.limits).items()}
    del limits["wall_s"]
    return {"role": role, "limits": limits}


def make_candidate_message(program: Program, tests: Tests) -> dict[str, Any]:
    """The message to the candidate's box, with the modules that serve a pytest file."""
    return make_role_message("candidate", program) | {
        "code": program.code,
        "module": tests.module,
        "modules": compile_extra_modules("values", "candidate_server") if tests.module else {},
    }


def make_tests_message(program: Program, tests: Tests, nonce: bytes) -> dict[str, Any]:
    """The message to the test box: the tests, without the candidate's code."""
    sources = [tests.setup, *(case for case in tests.cases if isinstance(case, str))]
    cases = [
        [case.entry, list(case.args), dict(case.kwargs), case.expected]
        if isinstance(case, CallCase)
        else case
        for case in tests.cases
    ]
    called_names = (case.entry for case in tests.cases if isinstance(case, CallCase))
    entries = dict.fromkeys([*tests.entries, *called_names])
    message = make_role_message("tests", program) | {
        "nonce": nonce,
        "setup": tests.setup,
        "cases": cases,
        "entries": list(entries),
        "imports": [] if tests.module else sorted(find_used_modules(sources) - entries.keys()),
        "module": tests.module,
        "modules": {},
    }
    if tests.module:
        message |= {
            "modules": compile_extra_modules("values", "objects", "candidate_proxy", "pytest_file"),
            "paths": ["/packages"],
            "star": asdict(find_star_names(sources[-1], tests.module)),
        }
    return message


def classify_exit(code: int | None, stderr: bytes) -> Status:
    if code == 0:
        return Status.OK
    if code == SIGNAL_EXIT_CODE + CPU_TIME_SIGNAL:
        return Status.TIMEOUT
    last_line = stderr.rstrip().rpartition(b"\n")[2]
    if last_line.startswith(b"MemoryError"):
        return Status.MEMORY
    return Status.KILLED if code is None or code > SIGNAL_EXIT_CODE else Status.FAILED
