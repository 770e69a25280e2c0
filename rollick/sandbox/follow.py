"""Follow one or two boxes until something ends them: their own end, a verdict, a limit.

    stdout, stderr of each box --+
    exit of the watched box   ---+--> Following.wait() -> Ending (why), with output and outcomes
    frames of the test box    ---+
    wall clock, memory        ---+

Decides nothing about what a program deserves: local.py makes a Result of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rollick.sandbox import wire
from rollick.sandbox.base import Limits, TestOutcome
from rollick.sandbox.box import Box

LOOK_SECONDS = 0.1
"""Between two looks at the memory of a box."""
MAX_FILES = 20_000
"""In a box: an empty file takes memory of the kernel that no size limit counts."""
MAX_FRAME = 1 << 16
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Ending(StrEnum):
    """What ended the following."""

    EXIT = "exit"
    VERDICT = "verdict"
    BROKEN = "broken"
    """The tests said that they cannot run, whatever the candidate does."""
    TIMEOUT = "timeout"
    OUTPUT = "output"
    MEMORY = "memory"


@dataclass(slots=True, eq=False)
class Following:
    """What has been seen of the boxes. `boxes[0]` runs the program or candidate."""

    boxes: Sequence[Box]
    limits: Limits
    stdin: bytes = b""
    nonce: bytes = b""
    """Not empty: the last box sends the tests' outcomes, framed with it."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    outcomes: dict[int, TestOutcome] = field(default_factory=dict[int, TestOutcome])
    message: str = ""
    _frames: bytearray = field(default_factory=bytearray)
    _over: asyncio.Future[Ending] | None = None

    async def wait(self) -> Ending:
        """Until the first reason to end. The boxes still have to be ended."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        readers = [end for box in self.boxes for end in (box.stdout, box.stderr)]
        last = self.boxes[-1]
        for end in readers:
            loop.add_reader(end, self._take_output, end)
        watched = last.control.fileno() if self.nonce else last.exited
        loop.add_reader(watched, self._take_frames if self.nonce else self._finish, Ending.EXIT)
        self._feed()
        look = asyncio.create_task(self._look(), name="memory of a box")
        try:
            async with asyncio.timeout(self.limits.wall_s):
                return await self._over
        except TimeoutError:
            return Ending.TIMEOUT
        finally:
            look.cancel()
            for end in (*readers, watched):
                loop.remove_reader(end)
            if self.boxes[0].stdin >= 0:
                loop.remove_writer(self.boxes[0].stdin)

    def drain(self) -> None:
        """After the end of the boxes: what still was in the pipes, up to the limit."""
        for box in self.boxes:
            for end in (box.stdout, box.stderr):
                while self._room > 0 and self._read(end):
                    pass

    @property
    def _room(self) -> int:
        return self.limits.output_bytes - len(self.stdout) - len(self.stderr)

    def _finish(self, ending: Ending) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(ending)

    def _take_output(self, end: int) -> None:
        if not self._read(end):
            asyncio.get_running_loop().remove_reader(end)
        if self._room <= 0:
            self._finish(Ending.OUTPUT)

    def _read(self, end: int) -> bool:
        """Whether something came; what the test box prints is shown as errors."""
        try:
            chunk = os.read(end, max(1, min(1 << 16, self._room)))
        except OSError:
            return False
        (self.stdout if end == self.boxes[0].stdout else self.stderr).extend(chunk)
        return bool(chunk)

    def _feed(self) -> None:
        """Write the input as the program takes it, then its end."""
        box, loop = self.boxes[0], asyncio.get_running_loop()
        try:
            while self.stdin:
                self.stdin = self.stdin[os.write(box.stdin, self.stdin[: 1 << 16]) :]
        except BlockingIOError:
            loop.add_writer(box.stdin, self._feed)
            return
        except OSError:
            self.stdin = b""
        loop.remove_writer(box.stdin)
        os.close(box.stdin)
        box.stdin = -1

    def _take_frames(self, ending: Ending) -> None:
        """Outcomes of the test box; its end is the end, verdict or not."""
        try:
            chunk = self.boxes[-1].control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self._frames += chunk
        while len(self._frames) >= 4:
            size = int.from_bytes(self._frames[:4], "little")
            if size > MAX_FRAME or len(self._frames) < 4 + size:
                break
            self._note(bytes(self._frames[4 : 4 + size]))
            del self._frames[: 4 + size]
        if not chunk:
            self._finish(ending)

    def _note(self, frame: bytes) -> None:
        with contextlib.suppress(wire.WireError, ValueError, TypeError):
            nonce, kind, number, passed, message = wire.decode(frame)
            if nonce != self.nonce:
                return
            if kind == "outcome":
                self.outcomes[int(number)] = TestOutcome(passed is True, str(message))
            elif kind in ("ended", "broken"):
                self.message = str(message)
                self._finish(Ending.VERDICT if kind == "ended" else Ending.BROKEN)

    async def _look(self) -> None:
        """Memory of all processes of a box together, which no limit of a process bounds."""
        most = self.limits.memory_mb << 20
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for box in self.boxes:
                if box.first_pid and (
                    resident_bytes(box.first_pid, most) > most or files_in(box) > MAX_FILES
                ):
                    self._finish(Ending.MEMORY)


def resident_bytes(pid: int, enough: int) -> int:
    """Resident memory of a process and all its descendants; stops counting beyond `enough`."""
    total, waiting = 0, [pid]
    while waiting and total <= enough:
        number = waiting.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{number}/statm").read_text().split()[1]) * PAGE_BYTES
            for task in os.listdir(f"/proc/{number}/task"):
                children = Path(f"/proc/{number}/task/{task}/children").read_text()
                waiting += map(int, children.split())
    return total


def files_in(box: Box) -> int:
    """Files on the disk of a box; 0 where the kernel does not let us look."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(f"/proc/{box.first_pid}/root/tmp")
        return disk.f_files - disk.f_ffree
    return 0
