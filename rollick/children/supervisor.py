"""Starts, replaces and stops the children of a pool; all run one program with the same user code.

    ChildSupervisor.run() --LOAD--> child <-- READY or LOAD_FAILED
           +--> one task of the pool for each child; watchdog.py kills them if this process dies

Ensures that no process outlives the pool, and raises an error with the reason if a child cannot
load. The pool decides what the children do and when to replace one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import cloudpickle

from rollick.children import watchdog
from rollick.children.child_loop import ChildSetup
from rollick.children.process import EXIT_TIMEOUT_S, Child, ChildLost, FrameKind, pickle_callable
from rollick.errors import RollickError, WorkerLost, open_files_exhausted
from rollick.observe.faults import FaultKind, FaultLog

START_TIMEOUT_S = 120.0
"""Time for a child to load; user code may import large libraries."""
MAX_FAILED_STARTS = 3
"""Attempts to start a child before its error is raised."""


def pickle_definitions(
    noun: str, definitions: Mapping[str, Callable[..., Any] | str], error_type: type[RollickError]
) -> dict[str, str | bytes]:
    """Pickle functions and classes, but not `file.py:name` references. Raises `error_type`."""
    pickled: dict[str, str | bytes] = {}
    for name, value in definitions.items():
        try:
            pickled[name] = value if isinstance(value, str) else pickle_callable(value)
        except Exception as reason:
            message = f"the {noun} {name!r} cannot be sent to another process: {reason}"
            fix = "keep locks, files and models out of it, or name it as file.py:name"
            raise error_type(message, fix=fix) from reason
    return pickled


@dataclass(slots=True, eq=False)
class ChildSupervisor:
    """The children of a pool. `noun` (reward, environment) names their work in error messages."""

    program: str
    noun: str
    setup: ChildSetup
    error_type: type[RollickError]
    output: Path | None = None
    """File for the output of user code; default: the standard error of this process."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Additional environment variables of the children."""
    faults: FaultLog | None = None
    """Records each child that is replaced."""
    ready_body: bytes = b""
    """Body of the last READY frame."""
    _children: set[Child] = field(default_factory=set[Child])
    _log: IO[bytes] | None = None
    _watchdog: Process | None = None
    _env_marker: str = field(default_factory=lambda: f"{uuid.uuid4().hex}.")
    """Prefix of the environment marker of each child, by which the watchdog finds descendants."""
    _env_markers: dict[Child, str] = field(default_factory=dict[Child, str])
    _child_numbers: Iterator[int] = field(default_factory=itertools.count)

    @asynccontextmanager
    async def run(
        self,
        count: int,
        serve: Callable[[Child, int], Coroutine[Any, Any, None]],
        stop_pool: Callable[[RollickError], None],
    ) -> AsyncGenerator[None, None]:
        """Start `count` children and a task `serve(child, rank)` for each; on exit, stop all.
        `stop_pool` gets the error of a failed task; on exit, a 'pool is closed' error for pending
        calls."""
        tasks: list[asyncio.Task[None]] = []

        def on_task_end(task: asyncio.Task[None]) -> None:
            if task.cancelled() or (error := task.exception()) is None:
                return
            if not isinstance(error, RollickError):
                text = f"the task for the {self.noun} process failed: {error!r}"
                error = open_files_exhausted(error) or self.error_type(text)
            stop_pool(error)

        with contextlib.ExitStack() as files:
            if self.output is not None:
                self._log = files.enter_context(self.output.open("ab"))
            try:
                for rank, child in enumerate(await self._start_all(count)):
                    tasks.append(asyncio.create_task(serve(child, rank)))
                    tasks[-1].add_done_callback(on_task_end)
                yield
            finally:
                for child in self._children:
                    child.kill()
                for task in tasks:
                    task.cancel()
                fix = "use the pool only inside its `async with` block"
                stop_pool(self.error_type(f"the {self.noun} pool is closed", fix=fix))
                try:
                    await asyncio.gather(*tasks, return_exceptions=True)
                finally:
                    await self._close()

    async def _start_all(self, count: int) -> list[Child]:
        """Start the watchdog and the first children. Waits for all; raises the first error."""
        command = (sys.executable, "-I", "-S", watchdog.__file__, self._env_marker)
        self._watchdog = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=DEVNULL, start_new_session=True
        )
        # Retry a child that an external signal killed while it loaded.
        starts = [asyncio.create_task(self._start_with_retries(WorkerLost)) for _ in range(count)]
        await asyncio.gather(*starts, return_exceptions=True)
        return [start.result() for start in starts]

    async def _start(self) -> Child:
        """Start a child and wait until it has loaded the user code."""
        env_marker = f"{self._env_marker}{next(self._child_numbers)}."
        variables = {**self.secrets, watchdog.VARIABLE: env_marker}
        child = await Child.spawn(self.program, self._log, secrets=variables)
        self._children.add(child)
        self._env_markers[child] = env_marker
        self._notify_watchdog("+", child)
        try:
            await self._load(child)
        except RollickError:
            await self.kill_and_wait(child)
            raise
        return child

    async def replace(self, child: Child, *, rank: int, timed_out: bool, cause: str) -> Child:
        """Start a new child in place of one that hung or died; `rank` is its index in the pool."""
        kind: FaultKind = "hung" if timed_out or child.was_stopped else "killed"
        fault = self.faults and self.faults.begin(
            f"{self.noun}s", rank, kind=kind, cause=cause, failed_at=child.failed_at
        )
        await self.kill_and_wait(child)
        replacement = await self._start_with_retries(RollickError)
        if fault is not None:
            fault.mark_restarted()
            fault.mark_rejoined()
        return replacement

    async def _start_with_retries(self, retry_on: type[RollickError]) -> Child:
        """Start a child; tries MAX_FAILED_STARTS times if `retry_on` is raised."""
        for _ in range(MAX_FAILED_STARTS - 1):
            with contextlib.suppress(retry_on):
                return await self._start()
        return await self._start()

    async def kill_and_wait(self, child: Child) -> None:
        """Kill a child and all its descendants, and wait until they have exited."""
        child.kill()
        await child.wait()
        if env_marker := self._env_markers.pop(child, None):
            await asyncio.to_thread(watchdog.kill_marked, env_marker)
        self._notify_watchdog("-", child)
        self._children.discard(child)

    async def _close(self) -> None:
        """Kill all children and wait until they have exited, the watchdog last."""
        try:
            await asyncio.gather(*(self.kill_and_wait(child) for child in list(self._children)))
        finally:
            if self._watchdog is not None and self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EXIT_TIMEOUT_S):
                        await self._watchdog.wait()

    def _notify_watchdog(self, sign: str, child: Child) -> None:
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.write(f"{sign}{child.process.pid}\n".encode())

    async def _load(self, child: Child) -> None:
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        noun, names = self.noun, ", ".join(self.setup.definitions)
        try:
            await child.send(FrameKind.LOAD, cloudpickle.dumps(self.setup), deadline=deadline)
            [(kind, body)] = await child.receive(deadline=deadline)
        except TimeoutError:
            message = f"the {noun} process did not load {names} within {START_TIMEOUT_S:g} s"
            fix = f"look for slow imports or downloads at the top of the {noun}'s file"
            raise self.error_type(message, fix=fix) from None
        except (ChildLost, ConnectionError):
            await child.wait()
            message = f"the {noun} process died while loading {names} ({child.exit_text})"
            if child.was_killed_externally:
                raise WorkerLost(message, fix="find out what sends that signal") from None
            fix = f"import the {noun}'s file in a Python shell to see the error"
            raise self.error_type(message, fix=fix) from None
        if kind == FrameKind.LOAD_FAILED:
            problem = json.loads(body)
            raise self.error_type(f"cannot load {names}: {problem['message']}", fix=problem["fix"])
        self.ready_body = body
