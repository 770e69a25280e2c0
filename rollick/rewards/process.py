"""A reward process and its guard, as the parent sees them: pipes, frames, signals.

Owns the details of the operating system; decides nothing. pool.py decides what to send, how long
to wait and whom to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.machinery
import json
import os
import pickle
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import cloudpickle

from rollick.errors import RewardError
from rollick.rewards import guard
from rollick.rewards.child import HEADER, Call, Kind, encode_frame
from rollick.types import RewardFn, Sample

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from rollick.rewards.child import main; main()"
)
"""The child gets the import path of its parent, but no environment that its own children see."""

EXIT_SECONDS = 5.0
"""For a killed process to be gone."""
LATE_SECONDS = 0.05
"""After a deadline: to read what had arrived while this process was busy with something else."""


class ChildLost(Exception):
    """The child closed its pipe: it has died, or is about to."""


@dataclass(slots=True, eq=False)
class Child:
    """A child process and its pipes; the leader of its own session and process group."""

    process: Process
    buffer: bytearray = field(default_factory=bytearray)

    @classmethod
    async def spawn(cls, output: IO[bytes] | None, *, secrets: Mapping[str, str]) -> Child:
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        command = (sys.executable, "-c", BOOT, paths)
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

    async def send(self, kind: Kind, body: bytes, *, deadline: float) -> None:
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


def define_reward(name: str, reward: RewardFn | str) -> str | bytes:
    """How a child gets the reward: a reference stays one; a function is pickled.

    Functions of importable modules are pickled by reference, those of `__main__`, of notebooks
    and of files loaded by path by value.
    """
    if isinstance(reward, str):
        return reward
    module = sys.modules.get(getattr(reward, "__module__", None) or "__main__")
    by_value = module is not None and not _is_importable(module.__name__)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(reward)
    except Exception as error:
        raise RewardError(
            f"the reward {name!r} cannot be sent to another process: {error}",
            fix="keep locks, files and models out of it, or name it as file.py:function",
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: str) -> bool:
    """Whether another process with the same import path finds it (cloudpickle knows __main__)."""
    top = module.partition(".")[0]
    known = top == "__main__" or top in sys.builtin_module_names
    return known or importlib.machinery.PathFinder.find_spec(top) is not None


def pack_job(sample: Sample, calls: Sequence[Call]) -> bytes:
    """Plain pickle is several times faster, but cannot carry classes of the user's script."""
    with contextlib.suppress(Exception):
        payload = pickle.dumps((sample, calls), protocol=5)
        if b"__main__" not in payload:
            return payload
    return cloudpickle.dumps((sample, calls))


async def all_of(starts: Iterable[Coroutine[Any, Any, Child]]) -> list[Child]:
    """Wait for all of them, then raise the first error: none is left running."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Child)]
