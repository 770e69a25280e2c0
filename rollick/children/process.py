"""The parent's side of a child process that runs user code: pipes, frames and signals.

    parent --frames--> child (child_loop.py)
       ^--- frames ------+

A frame is a kind, a length and a body. The pools (rewards/pool.py, envs/pool.py) decide what to
send, how long to wait and which call failed; supervisor.py starts and replaces the children.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import json
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import IO, Any

import cloudpickle

from rollick.children.process_tree import count_memory_kills, describe_signal, is_stopped

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from importlib import import_module; import_module(sys.argv.pop()).main()"
)
"""Passes sys.path as an argument: the descendants of the child would inherit PYTHONPATH."""

HEADER = struct.Struct("<BI")
EXIT_TIMEOUT_S = 5.0
"""Time for a killed process to exit."""
STOP_CHECK_SECONDS = 1.0
"""Interval of the checks whether a silent child is stopped (SIGSTOP)."""
EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A child that one of these killed did not crash by itself, so its work may be retried."""
GRACE_SECONDS = 0.05
"""Extra time after a deadline to read frames that arrived while the event loop was blocked."""
MAX_ERROR_TEXT = 500
"""Characters of an exception's text that are kept; user code may put a full completion there."""


class FrameKind(IntEnum):
    LOAD = 1
    WORK = 2
    READY = 3
    LOAD_FAILED = 4
    STARTED = 5
    DONE = 6


def encode_frame(kind: FrameKind, body: bytes) -> bytes:
    return HEADER.pack(kind, len(body)) + body


class ChildLost(Exception):
    """The child closed its pipe: it has exited or is exiting."""


@dataclass(slots=True, eq=False)
class Child:
    """A child process and its pipes; the leader of its own session and process group."""

    process: Process
    buffer: bytearray = field(default_factory=bytearray)
    memory_kills_before: int = field(default_factory=count_memory_kills)
    was_stopped: bool = False
    """Whether it was killed because it had been stopped (SIGSTOP)."""
    failed_at: float | None = None
    """Time when it ended, hung or was stopped, in seconds since the epoch."""

    @classmethod
    async def spawn(
        cls, program: str, output: IO[bytes] | None, *, secrets: Mapping[str, str]
    ) -> Child:
        """Start `program`, a module with a `main()`. Its printed output goes to `output`; `secrets`
        are added to its environment variables."""
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        command, env = (sys.executable, "-c", BOOT, program, paths), {**os.environ, **secrets}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=output, start_new_session=True, env=env
        )
        return cls(process)

    async def send(self, kind: FrameKind, body: bytes, *, deadline: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode_frame(kind, body))
        async with asyncio.timeout_at(deadline):
            await self.process.stdin.drain()

    async def receive(self, *, deadline: float) -> list[tuple[int, bytes]]:
        """Wait for at least one frame. Raises TimeoutError or ChildLost. Kills a child that is
        stopped, which would not reply before the deadline."""
        while not (frames := self._pop_frames()):
            chunk = await self._read(deadline)
            if not chunk:
                self.failed_at = time.time()
                raise ChildLost
            self.buffer += chunk
        return frames

    async def _read(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        now = asyncio.get_running_loop().time
        last_ran_at = time.time()
        while True:
            try:
                async with asyncio.timeout_at(min(deadline, now() + STOP_CHECK_SECONDS)):
                    return await self.process.stdout.read(1 << 16)
            except TimeoutError:
                if is_stopped(self.process.pid):
                    self.was_stopped, self.failed_at = True, last_ran_at
                    self.kill()
                    raise ChildLost from None
                last_ran_at = time.time()
                if now() >= deadline:
                    break
        async with asyncio.timeout(GRACE_SECONDS):
            return await self.process.stdout.read(1 << 16)

    def _pop_frames(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        offset = 0
        while len(self.buffer) - offset >= HEADER.size:
            kind, length = HEADER.unpack_from(self.buffer, offset)
            end = offset + HEADER.size + length
            if len(self.buffer) < end:
                break
            frames.append((kind, bytes(self.buffer[offset + HEADER.size : end])))
            offset = end
        del self.buffer[:offset]
        return frames

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait for its exit, at most EXIT_TIMEOUT_S."""
        with contextlib.suppress(TimeoutError):
            # Not wait_for, which can swallow a cancellation that comes with the exit (Python 3.11).
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                await self.process.wait()

    @property
    def was_killed_externally(self) -> bool:
        """Whether an external signal ended it, or stopped it so that it was killed."""
        return self.was_stopped or -(self.process.returncode or 0) in EXTERNAL_SIGNALS

    @property
    def exit_text(self) -> str:
        """How the process ended, for an error message."""
        if self.was_stopped:
            return "it was stopped, and killed for that"
        code = self.process.returncode
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        return describe_signal(-code, memory_kills_before=self.memory_kills_before)


def pickle_callable(value: Any) -> bytes:
    """Pickle a function or class for another process; pickling errors propagate. Importable ones
    are pickled by reference; those of `__main__`, of notebooks and of files loaded by path are
    pickled by value."""
    module = sys.modules.get(getattr(value, "__module__", None) or "__main__")
    pickles_by_value = module is not None and not _is_importable(module.__name__)
    if pickles_by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    finally:
        if pickles_by_value:
            cloudpickle.unregister_pickle_by_value(module)


def pickle_payload(value: Any) -> bytes:
    """Pickle with pickle (several times faster), or cloudpickle for classes of `__main__`."""
    with contextlib.suppress(Exception):
        payload = pickle.dumps(value, protocol=5)
        if b"__main__" not in payload:
            return payload
    return cloudpickle.dumps(value)


def describe_failure(error: BaseException) -> str:
    """The last line of the traceback, shortened, and the line of code that raised it."""
    last_line = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return shorten(last_line) + location


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_TEXT else text[: MAX_ERROR_TEXT - 3] + "..."


def _is_importable(module: str) -> bool:
    """Whether another process with the same sys.path can import the module."""
    top = module.partition(".")[0]
    # cloudpickle itself pickles __main__ by value.
    is_known = top == "__main__" or top in sys.builtin_module_names
    return is_known or importlib.machinery.PathFinder.find_spec(top) is not None
