"""A child process that runs user code, and its guard, as the parent sees them.

    parent --frames--> child (a module of ours, run with pipes)       guard.py: kills the children
       ^--- frames ------+                                            if the parent dies

Owns the details of the operating system: pipes, frames, signals, and how a function or a class gets
into the child. Decides nothing: the pools (rewards/pool.py, envs/pool.py) say what to send, how
long to wait and whom to blame. A frame is a kind (a number that only its two ends understand), a
length and a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import json
import os
import signal
import struct
import sys
import traceback
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import cloudpickle

from rollick.children import guard

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from importlib import import_module; import_module(sys.argv.pop()).main()"
)
"""The child gets the import path of its parent, but no environment that its own children see."""

HEADER = struct.Struct("<BI")
EXIT_SECONDS = 5.0
"""For a killed process to be gone."""
LATE_SECONDS = 0.05
"""After a deadline: to read what had arrived while this process was busy with something else."""


def encode_frame(kind: int, body: bytes) -> bytes:
    return HEADER.pack(kind, len(body)) + body


def read_frames(inbox: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """In the child: kind and body of each frame, until the input ends."""
    while header := inbox.read(HEADER.size):
        kind, length = HEADER.unpack(header)
        yield kind, inbox.read(length)


class ChildLost(Exception):
    """The child closed its pipe: it has died, or is about to."""


@dataclass(slots=True, eq=False)
class Child:
    """A child process and its pipes; the leader of its own session and process group."""

    process: Process
    buffer: bytearray = field(default_factory=bytearray)

    @classmethod
    async def spawn(
        cls, program: str, output: IO[bytes] | None, *, secrets: Mapping[str, str]
    ) -> Child:
        """Start `program`, a module with a `main()`; what it prints goes to `output`, and it sees
        `secrets` among its environment variables."""
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        command = (sys.executable, "-c", BOOT, program, paths)
        return cls(
            await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **secrets},
            )
        )

    async def send(self, kind: int, body: bytes, *, deadline: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode_frame(kind, body))
        async with asyncio.timeout_at(deadline):
            await self.process.stdin.drain()

    async def receive(self, *, deadline: float) -> list[tuple[int, bytes]]:
        """The frames that have come, at least one. Raises TimeoutError or ChildLost."""
        assert self.process.stdout is not None
        while not (frames := self._cut_frames()):
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = await self.process.stdout.read(1 << 16)
            except TimeoutError:
                # If the event loop was blocked, deadline and answer are seen in the same moment:
                # the child must not be blamed for it.
                async with asyncio.timeout(LATE_SECONDS):
                    chunk = await self.process.stdout.read(1 << 16)
            if not chunk:
                raise ChildLost
            self.buffer += chunk
        return frames

    def _cut_frames(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        begin = 0
        while len(self.buffer) - begin >= HEADER.size:
            kind, length = HEADER.unpack_from(self.buffer, begin)
            end = begin + HEADER.size + length
            if len(self.buffer) < end:
                break
            frames.append((kind, bytes(self.buffer[begin + HEADER.size : end])))
            begin = end
        del self.buffer[:begin]
        return frames

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> int | None:
        """The exit code; None if it is not gone in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                return await self.process.wait()
        return None

    @property
    def exit_text(self) -> str:
        """How the process ended, in words."""
        code = self.process.returncode
        if code is None:
            return "it closed its pipe"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal has no name
            return f"killed by signal {-code}"


@dataclass(slots=True, eq=False)
class Guard:
    """The process that kills the listed groups when this one is gone; see guard.py."""

    process: Process

    @classmethod
    async def spawn(cls) -> Guard:
        command = (sys.executable, "-I", "-S", str(Path(guard.__file__)))
        return cls(
            await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=DEVNULL, start_new_session=True
            )
        )

    def watch(self, child: Child) -> None:
        self._tell(f"+{child.process.pid}\n")

    def forget(self, child: Child) -> None:
        self._tell(f"-{child.process.pid}\n")

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode())

    async def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                await self.process.wait()


def pickled(thing: Any) -> bytes:
    """A function or class for another process; raises what pickling raises.

    Those of importable modules are pickled by reference, those of `__main__`, of notebooks and of
    files loaded by path by value.
    """
    module = sys.modules.get(getattr(thing, "__module__", None) or "__main__")
    by_value = module is not None and not _is_importable(module.__name__)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(thing)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def describe_failure(error: BaseException, *, longest: int = 500) -> str:
    """The last line of the traceback, and where it was raised; user code may raise whole texts."""
    last = traceback.format_exception_only(error)[-1].strip()
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (last if len(last) <= longest else last[: longest - 3] + "...") + where


def take_standard_streams() -> tuple[int, int]:
    """In a child, before user code is loaded: the true pipes, moved away from the standard streams.

    What user code prints then goes to the error stream, and reading standard input gives its end.
    """
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    return inbox, outbox


def _is_importable(module: str) -> bool:
    """Whether another process with the same import path finds it (cloudpickle knows __main__)."""
    top = module.partition(".")[0]
    known = top == "__main__" or top in sys.builtin_module_names
    return known or importlib.machinery.PathFinder.find_spec(top) is not None
