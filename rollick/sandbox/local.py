"""LocalSandbox: boxes on this machine, started ahead and used once.

    run(program) -> take a warm box (two with tests), start its successor -> give -> follow -> end

A box that has had a program is never given another one. With tests there are two boxes with
different uids: the candidate's, which sees calls and nothing else, and the tests', which sees data
and nothing else; the parent joins them with two pipes and keeps no end of them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollick.errors import SandboxError
from rollick.sandbox.base import (
    Call,
    Isolation,
    Limits,
    Program,
    Result,
    Status,
    TestOutcome,
    Tests,
)
from rollick.sandbox.box import Box, BoxEnded
from rollick.sandbox.entries import modules_used
from rollick.sandbox.follow import Ending, Following
from rollick.sandbox.host import Host
from rollick.sandbox.starter import Starter
from rollick.sandbox.wire import WireError

REFUSAL = "set allow_unsafe to run programs without isolation, or use a remote sandbox"
NONCE_BYTES = 16
SIGNALLED = 128
"""bubblewrap's exit code for a program that a signal ended is this and the signal's number."""
CPU_TIME_SIGNAL = 24
STATUS_OF = {
    Ending.TIMEOUT: Status.TIMEOUT,
    Ending.OUTPUT: Status.OUTPUT_LIMIT,
    Ending.MEMORY: Status.MEMORY,
    Ending.BROKEN: Status.INFRASTRUCTURE,
}


@dataclass(slots=True, eq=False)
class LocalSandbox:
    """Use it with `with`; when that ends, so has every box.

    The warm boxes belong to no event loop, so one sandbox can serve several, one after another.
    """

    warm: int = 2
    """Boxes that wait for a program."""
    at_once: int = 8
    """Programs that run at once; more of them wait."""
    disk_mb: int = 64
    """The writable /tmp of a box."""
    allow_unsafe: bool = False
    host: Host = field(default_factory=Host.find)
    _starter: Starter = field(default_factory=Starter)
    _waiting: deque[Box] = field(default_factory=deque[Box])
    _slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
    _closed: bool = False
    _proven: bool = False

    def __enter__(self) -> LocalSandbox:
        if self._may_run:
            self._refill()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the boxes that wait. Programs under way must have ended."""
        self._closed = True
        for box in self._waiting:
            box.kill()
        try:
            self._drop_waiting()
        finally:
            self._starter.close()
            self.host.close()

    def _drop_waiting(self) -> None:
        with ExitStack() as drops:  # all of them, even if one cannot be ended
            while self._waiting:
                drops.callback(self._drop, self._waiting.popleft())

    def _drop(self, box: Box) -> None:
        try:
            if box.process.returncode is None:
                box.end_now()
        finally:
            box.close()

    @property
    def _may_run(self) -> bool:
        return self.host.isolation is not Isolation.NONE or self.allow_unsafe

    async def run(self, program: Program) -> Result:
        """Run one program in a fresh box; never raises for what the program does."""
        try:
            for _ in range(2):
                if not self._may_run:
                    break
                try:
                    return await self._run(program)
                except BoxEnded as error:
                    if self._proven:
                        raise
                    self._give_up(str(error))
        except (SandboxError, WireError, OSError) as error:
            return Result(Status.INFRASTRUCTURE, self.host.isolation, detail=str(error))
        detail = f"{self.host.problem}; {REFUSAL}"
        return Result(Status.REFUSED, self.host.isolation, detail=detail)

    async def _run(self, program: Program) -> Result:
        tests = program.tests
        if tests is None:
            return await self._run_script(program)
        if tests.shared:
            return await self._run_shared(program, tests)
        return await self._run_pair(program, tests)

    def _give_up(self, problem: str) -> None:
        """No box has ever started: the tools are there, but the kernel forbids what they need."""
        if self.host.isolation is Isolation.NONE:
            return  # another program found out first
        self._drop_waiting()
        self.host.problem = f"{problem}; {self.host.problem}".rstrip("; ")
        self.host.isolation = Isolation.NONE

    async def _run_script(self, program: Program) -> Result:
        async with self._boxes(1) as (box,):
            message = {"role": "program", "code": program.code, "limits": whole(program.limits)}
            following = Following([box], program.limits, program.stdin.encode("utf-8", "replace"))
            await box.give(message)
            begun = time.perf_counter()
            ending = await following.wait()
            seconds = time.perf_counter() - begun
            await box.end()
            following.drain()
            code = box.process.returncode if ending is Ending.EXIT else None
        if code is not None and code < 0:  # without bubblewrap
            code = SIGNALLED - code
        status = STATUS_OF.get(ending) or exit_status(code, bytes(following.stderr))
        if status is Status.KILLED and seconds >= program.limits.cpu_s:
            # The first process of a box gets no other signal for its time than the last one.
            status = Status.TIMEOUT
        return describe(following, status, self.host.isolation, code, seconds)

    async def _run_pair(self, program: Program, tests: Tests) -> Result:
        nonce = secrets.token_bytes(NONCE_BYTES)
        async with self._boxes(2, packages=bool(tests.module)) as (candidate, judge):
            following = Following([candidate, judge], program.limits, nonce=nonce)
            calls_r, calls_w = os.pipe()
            answers_r, answers_w = os.pipe()
            try:
                limits = whole(program.limits)
                given = {"role": "candidate", "code": program.code, "limits": limits}
                await candidate.give(given, (calls_r, answers_w))
                await judge.give(test_message(program, tests, nonce), (answers_r, calls_w))
            finally:
                for end in (calls_r, calls_w, answers_r, answers_w):
                    os.close(end)
            begun = time.perf_counter()
            ending = await following.wait()
            seconds = time.perf_counter() - begun
            candidate.kill()
            await judge.end()
            await candidate.end()
            following.drain()
        return judged(following, ending, tests, self.host.isolation, seconds)

    async def _run_shared(self, program: Program, tests: Tests) -> Result:
        nonce = secrets.token_bytes(NONCE_BYTES)
        async with self._boxes(1) as (box,):
            following = Following([box], program.limits, nonce=nonce)
            message = test_message(program, tests, nonce) | {"role": "shared"}
            await box.give(message | {"code": program.code})
            begun = time.perf_counter()
            ending = await following.wait()
            seconds = time.perf_counter() - begun
            await box.end()
            following.drain()
        level = Isolation.NONE if self.host.isolation is Isolation.NONE else Isolation.SHARED
        return judged(following, ending, tests, level, seconds)

    @asynccontextmanager
    async def _boxes(self, count: int, *, packages: bool = False) -> AsyncGenerator[list[Box]]:
        """Fresh boxes that are ready; however the block ends, nothing of them is left."""
        async with self._slot():
            boxes: list[Box] = []
            with ExitStack() as endings:  # all of them, even if one cannot be ended
                for number in range(count):
                    last = number == count - 1
                    box = self._take(packages=packages and last)
                    endings.callback(self._drop, box)
                    boxes.append(box)
                for box in boxes:
                    await box.ready()
                self._proven = True
                yield boxes

    def _take(self, *, packages: bool) -> Box:
        if self._closed:
            raise SandboxError("the sandbox is closed", fix="run programs inside its `with`")
        if packages:
            if "packages" not in self.host.sources:
                raise SandboxError("pytest is not installed", fix="pip install pytest")
            return self._start(packages=True)
        # One that waited for long may have been ended from outside, for want of memory perhaps.
        while self._waiting and self._waiting[0].process.poll() is not None:
            self._drop(self._waiting.popleft())
        box = self._waiting.popleft() if self._waiting else self._start()
        self._refill()
        return box

    def _start(self, *, packages: bool = False) -> Box:
        return self._starter.start(self.host, disk_mb=self.disk_mb, packages=packages)

    def _refill(self) -> None:
        while len(self._waiting) < self.warm:
            self._waiting.append(self._start())

    def _slot(self) -> asyncio.Semaphore:
        """A semaphore belongs to one event loop; another loop gets another one."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.at_once))
        return self._slots[1]


def whole(limits: Limits) -> dict[str, int]:
    """The limits that a box sets itself."""
    return {name: int(value) for name, value in asdict(limits).items() if name != "wall_s"}


def test_message(program: Program, tests: Tests, nonce: bytes) -> dict[str, Any]:
    """What the test box is told: everything about the tests, nothing of the candidate's code."""
    texts = [tests.setup, *(case for case in tests.cases if isinstance(case, str))]
    cases = [
        [case.entry, list(case.args), dict(case.kwargs), case.expected]
        if isinstance(case, Call)
        else case
        for case in tests.cases
    ]
    called = [case.entry for case in tests.cases if isinstance(case, Call)]
    entries = dict.fromkeys([*tests.entries, *called])
    return {
        "role": "tests",
        "nonce": nonce,
        "setup": tests.setup,
        "cases": cases,
        "entries": list(entries),
        "imports": [] if tests.module else sorted(modules_used(texts) - entries.keys()),
        "module": tests.module,
        "paths": ["/packages"] if tests.module else [],
        "limits": whole(program.limits),
    }


def exit_status(code: int | None, stderr: bytes) -> Status:
    """What the end of a program says."""
    if code == 0:
        return Status.OK
    if code == SIGNALLED + CPU_TIME_SIGNAL:
        return Status.TIMEOUT
    last = stderr.rstrip().rpartition(b"\n")[2]
    if last.startswith(b"MemoryError"):
        return Status.MEMORY
    return Status.KILLED if code is None or code > SIGNALLED else Status.FAILED


def judged(
    following: Following, ending: Ending, tests: Tests, isolation: Isolation, seconds: float
) -> Result:
    """The outcome of every test; what was not reached has failed."""
    status = STATUS_OF.get(ending)
    if ending is Ending.EXIT:
        # The test box ended without a last word; only the candidate can have brought it there.
        status = Status.KILLED
    count = max([len(tests.cases), *(number + 1 for number in following.outcomes)])
    if tests.module and following.outcomes:
        count = max(following.outcomes) + 1
    reason = "" if status is None else f"not reached: {status}"
    missing = TestOutcome(False, following.message or reason or "not reached")
    outcomes = tuple(following.outcomes.get(number, missing) for number in range(count))
    result = describe(following, status or Status.OK, isolation, None, seconds)
    return replace(result, outcomes=outcomes, detail=following.message or reason)


def describe(
    following: Following, status: Status, isolation: Isolation, code: int | None, seconds: float
) -> Result:
    return Result(
        status=status,
        isolation=isolation,
        stdout=following.stdout.decode(errors="replace"),
        stderr=following.stderr.decode(errors="replace"),
        exit_code=code,
        seconds=seconds,
    )
