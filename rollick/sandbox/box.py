"""One box: a process behind all the layers, started ahead, given one program, ended for good.

    Box.start()  --- bwrap starts, then the interpreter; this does not wait ---
    ready()      the interpreter waits for its program
    give()       the program goes in; what happens then is seen through the pipes (follow.py)
    end()        SIGKILL to the first process of the pid namespace, which is the interpreter: the
                 kernel ends all the others, and tells by the descriptor when the last one is gone

A box is used once, whatever happened in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType

from rollick.errors import SandboxError
from rollick.sandbox import wire
from rollick.sandbox.base import Isolation
from rollick.sandbox.filter import seccomp_program
from rollick.sandbox.host import BoxPipes, Host

START_SECONDS = 30.0
"""For bubblewrap and the interpreter, on a machine that is busy with other things."""
END_SECONDS = 10.0
"""For the kernel to take a killed box down."""
STDERR_BYTES = 2000

INSIDE = {
    "rollick_wire": "rollick.sandbox.wire",
    "rollick_boot": "rollick.sandbox.inside.boot",
    "rollick_program": "rollick.sandbox.inside.program",
    "rollick_candidate": "rollick.sandbox.inside.candidate",
    "rollick_tests": "rollick.sandbox.inside.tests",
    "rollick_shared": "rollick.sandbox.inside.shared",
}
"""Modules whose compiled code is sent into a box, by their name there."""

FIRST_LINE = """\
import os, marshal
d = b""
while len(d) < {size}:
    d += os.read({control}, {size} - len(d))
c = marshal.loads(d)
g = {{"__name__": "rollick_boot"}}
exec(c["rollick_boot"], g)
g["main"]({control}, c)
"""
"""What the interpreter is started with. It reads the code of our own modules, which this process
compiled: compiling it in every box would cost more than starting the interpreter."""


class BoxEnded(SandboxError):
    """A box ended before it began: bubblewrap or the interpreter could not do their part."""


@cache
def inside_code() -> bytes:
    """The code that runs in boxes, compiled for this interpreter."""
    codes: dict[str, CodeType] = {}
    for name, module in INSIDE.items():
        spec = importlib.util.find_spec(module)
        assert spec is not None
        codes[name] = spec.loader.get_code(module)  # pyright: ignore
    return marshal.dumps(codes)


@dataclass(slots=True, eq=False)
class Box:
    """A started box, as the parent sees it."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    stdin: int
    stdout: int
    stderr: int
    info: int
    uid: int | None
    isolation: Isolation
    exited: int
    """Descriptor of the outer process; readable when it has ended."""
    first: int | None = None
    """Descriptor of the first process inside; readable when nothing is left in the box."""
    first_pid: int = 0

    @classmethod
    def start(cls, host: Host, *, disk_mb: int, packages: bool = False) -> Box:
        """Starts the processes and returns at once. SandboxError if not even that is possible."""
        # What the box was given is closed here in any case, what is kept only if it does not start.
        with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
            try:
                box = cls._start(host, given, kept, disk_mb=disk_mb, packages=packages)
            except OSError as error:
                fix = "allow more open files (ulimit -n)" if error.errno == errno.EMFILE else ""
                raise SandboxError(f"a box cannot be started: {error}", fix=fix) from error
            kept.pop_all()
        return box

    @classmethod
    def _start(
        cls,
        host: Host,
        given: contextlib.ExitStack,
        kept: contextlib.ExitStack,
        *,
        disk_mb: int,
        packages: bool,
    ) -> Box:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        kept.callback(ours.close)
        given.callback(theirs.close)
        in_r, in_w = _pipe(given, kept)
        out_r, out_w = _pipe(kept, given)
        err_r, err_w = _pipe(kept, given)
        info_r, info_w = _pipe(kept, given)
        rules_r, rules_w = _pipe(given, given)
        os.write(rules_w, seccomp_program())
        code = inside_code()
        ours.setblocking(False)
        ours.send(code)
        pipes = BoxPipes(theirs.fileno(), info_w, rules_r)
        line = FIRST_LINE.format(size=len(code), control=pipes.control)
        python = ["-I", "-S", "-B", "-X", "utf8", "-c", line]
        uid = host.next_uid()
        if host.isolation is Isolation.NONE:
            command, inherited = [sys.executable, *python], (pipes.control,)
        else:
            command = host.command(pipes, python, uid=uid, disk_mb=disk_mb, packages=packages)
            inherited = (*pipes.numbers, *host.inherited())
        process = subprocess.Popen(
            command,
            stdin=in_r,
            stdout=out_w,
            stderr=err_w,
            pass_fds=inherited,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
            start_new_session=True,
        )
        kept.callback(process.wait)
        kept.callback(process.kill)
        exited = os.pidfd_open(process.pid)
        for end in (in_w, out_r, err_r, info_r):
            os.set_blocking(end, False)
        return cls(process, ours, in_w, out_r, err_r, info_r, uid, host.isolation, exited)

    async def ready(self) -> None:
        """Waits until the interpreter waits for its program; SandboxError if it never does."""
        await self._hear("start")
        self.find_first()
        if self.first is None and self.isolation is not Isolation.NONE:
            # A program in it could not be killed. Not BoxEnded: the box is sound, and giving
            # isolation up for want of a descriptor would be wrong.
            message = "the first process of a box cannot be held by a descriptor"
            raise SandboxError(message, fix="allow more open files (ulimit -n)")

    async def _hear(self, what: str) -> None:
        """Waits for one byte of the box; SandboxError with what it printed if none comes."""
        said = b""
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await asyncio.get_running_loop().sock_recv(self.control, 1)
        except TimeoutError:
            raise SandboxError(f"a box did not {what} within {START_SECONDS:g} s") from None
        except OSError:
            pass
        if not said:
            await wait_readable(self.exited, END_SECONDS)
            with contextlib.suppress(OSError):
                said = os.read(self.stderr, STDERR_BYTES)
            text = said.decode(errors="replace").strip()
            raise BoxEnded(f"a box did not {what}: {text or 'it ended'}")

    def find_first(self) -> None:
        """Take hold of the first process in the box: bubblewrap has told its number by now."""
        if self.first is not None or self.isolation is Isolation.NONE:
            return
        with contextlib.suppress(OSError, ValueError, KeyError):
            self.first_pid = json.loads(os.read(self.info, 1 << 12))["child-pid"]
            self.first = os.pidfd_open(self.first_pid)

    async def give(self, message: Mapping[str, object], pipes: tuple[int, ...] = ()) -> None:
        """Send the program, with the descriptors that it is to have; returns as it begins."""
        body = wire.encode(dict(message))
        content = len(body).to_bytes(8, "little") + body
        loop = asyncio.get_running_loop()
        sent = socket.send_fds(self.control, [content[: 1 << 15]], list(pipes))
        if sent < len(content):
            await loop.sock_sendall(self.control, content[sent:])
        await self._hear("take its program")

    def kill(self) -> None:
        """Ends everything in the box; does not wait."""
        self.find_first()
        if self.first is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)
        elif self.isolation is Isolation.NONE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            # It holds no program, since `ready` refuses such a box. bubblewrap killed as it starts
            # would leave a child that waits for it for ever; an interpreter that finds nobody at
            # the socket ends.
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """Kill, and wait until nothing is left. The pipes stay open until `close`."""
        self.kill()
        try:
            for descriptor, seconds in self._last_signs():
                await wait_readable(descriptor, seconds)
        except asyncio.CancelledError:
            self.end_now()
            raise
        self._reap()

    def end_now(self) -> None:
        """The same, where no event loop runs or nobody may wait: blocks for some milliseconds."""
        self.kill()
        for descriptor, seconds in self._last_signs():
            watch = select.poll()
            watch.register(descriptor, select.POLLIN)
            watch.poll(seconds * 1000)
        self._reap()

    def _last_signs(self) -> list[tuple[int, float]]:
        """Descriptors that are readable once all has ended, and how long each may take."""
        if self.first is None:
            return [(self.exited, START_SECONDS)]
        return [(self.first, END_SECONDS), (self.exited, END_SECONDS)]

    def _reap(self) -> None:
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
            raise SandboxError(f"a box did not end within {END_SECONDS:g} s of its kill") from None

    def close(self) -> None:
        """Give all descriptors back."""
        self.control.close()
        for name in ("stdin", "stdout", "stderr", "info", "exited", "first"):
            descriptor = getattr(self, name)
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
            setattr(self, name, None if name == "first" else -1)


def _pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe, of which each end is closed by its stack."""
    ends = os.pipe()
    for stack, end in zip((reads, writes), ends, strict=True):
        stack.callback(os.close, end)
    return ends


async def wait_readable(descriptor: int, seconds: float) -> bool:
    """Whether the descriptor became readable in time."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: done.done() or done.set_result(None))
    try:
        async with asyncio.timeout(seconds):
            await done
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True
