"""One box: an isolated process that is started in advance, runs one program and is destroyed.

Box.start()  starts bwrap, which starts the interpreter; does not wait
wait_ready() waits until the interpreter waits for its program
send()       sends the program; its output is read from the pipes (monitor.py)
end()        SIGKILL to the init process of the pid namespace, which is the interpreter: the
             kernel kills all others, and a pidfd becomes readable when the last one has exited

If this process dies, the kernel (parent-death signals) and guard.py end the box.
"""

from __future__ import annotations

import asyncio
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from types import CodeType

from rollick.errors import SandboxError
from rollick.sandbox import wire
from rollick.sandbox.base import Isolation
from rollick.sandbox.guard import BoxGuard
from rollick.sandbox.host import DISK_MB, BoxPipes, SandboxHost
from rollick.sandbox.memory import MemoryGroup, MemoryGroups
from rollick.sandbox.seccomp import seccomp_program

START_TIMEOUT_S = 30.0
"""Time for bubblewrap and the interpreter to start on a busy machine."""
END_TIMEOUT_S = 10.0
"""Time for the kernel to remove a killed box."""
MAX_STDERR_BYTES = 2000
KERNEL_MB = 32
"""Memory of a box's cgroup for the kernel's data about its processes."""

BOX_MODULES = {
    "rollick_wire": "rollick.sandbox.wire",
    "rollick_boot": "rollick.sandbox.inside.boot",
    "rollick_candidate": "rollick.sandbox.inside.candidate",
    "rollick_tests": "rollick.sandbox.inside.tests",
}
"""Modules whose compiled code is sent into a box, by their name in the box."""

BOOT_CODE = """\
import os, marshal
d = b""
while len(d) < {size}:
    d += os.read({control}, {size} - len(d)) or os._exit(0)
c = marshal.loads(d)
g = {{"__name__": "rollick_boot"}}
exec(c["rollick_boot"], g)
g["main"]({control}, c, marshal.loads)
"""
"""The interpreter's first code. It reads the modules as compiled code: compiling them in every box
would take longer than starting the interpreter."""


class BoxStartError(SandboxError):
    """A box ended before its program started: bubblewrap or the interpreter failed."""


@cache
def compile_box_modules() -> bytes:
    """The code that runs in boxes, compiled for this interpreter."""
    return marshal.dumps({name: _compile(name, module) for name, module in BOX_MODULES.items()})


@cache
def compile_extra_modules(*names: str) -> dict[str, bytes]:
    """Further modules for the message to a box, in the order in which it loads them."""
    modules = {f"rollick_{name}": f"rollick.sandbox.inside.{name}" for name in names}
    return {name: marshal.dumps(_compile(name, module)) for name, module in modules.items()}


def _compile(name: str, module: str) -> CodeType:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    code: CodeType = spec.loader.get_code(module)  # pyright: ignore
    return rename_code(code, f"<{name}>")


def rename_code(code: CodeType, name: str) -> CodeType:
    """The code with another file name: a program can read it, and paths of the host are private."""
    constants = (rename_code(c, name) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(constants))


@dataclass(slots=True, eq=False)
class Box:
    """A started box, as the parent sees it."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    stdin: int
    stdout: int
    stderr: int
    info: int
    """Pipe in which bubblewrap reports the pid of the init process."""
    uid: int | None
    isolation: Isolation
    exit_fd: int
    """pidfd of the outer process; readable when it has exited."""
    guard: BoxGuard | None = None
    """Kills the box if this process dies."""
    group: MemoryGroup | None = None
    init_fd: int | None = None
    """pidfd of the init process inside; readable when no process is left in the box."""
    init_pid: int = 0

    @classmethod
    def start(
        cls, host: SandboxHost, *, mount_packages: bool = False, guard: BoxGuard | None = None
    ) -> Box:
        """Start the processes and return immediately. SandboxError if they cannot be started."""
        # The box's ends are always closed here, the parent's only if the box does not start.
        with ExitStack() as box_cleanup, ExitStack() as parent_cleanup:
            try:
                box = cls._start(host, box_cleanup, parent_cleanup, mount_packages, guard)
            except OSError as error:
                fix = "allow more open files (ulimit -n)" if error.errno == errno.EMFILE else ""
                raise SandboxError(f"a box cannot be started: {error}", fix=fix) from error
            parent_cleanup.pop_all()
        return box

    @classmethod
    def _start(
        cls,
        host: SandboxHost,
        box_cleanup: ExitStack,
        parent_cleanup: ExitStack,
        mount_packages: bool,
        guard: BoxGuard | None,
    ) -> Box:
        our_socket, box_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        parent_cleanup.callback(our_socket.close)
        box_cleanup.callback(box_socket.close)
        in_r, in_w = _open_pipe(box_cleanup, parent_cleanup)
        out_r, out_w = _open_pipe(parent_cleanup, box_cleanup)
        err_r, err_w = _open_pipe(parent_cleanup, box_cleanup)
        info_r, info_w = _open_pipe(parent_cleanup, box_cleanup)
        filter_r, filter_w = _open_pipe(box_cleanup, box_cleanup)
        options_r, options_w = os.pipe()
        box_cleanup.callback(os.close, options_r)
        options = box_cleanup.enter_context(os.fdopen(options_w, "wb", buffering=0))
        os.write(filter_w, seccomp_program(shared_memory=host.memory is not None))
        our_socket.setblocking(False)
        our_socket.send(compile_box_modules())
        pipes = BoxPipes(box_socket.fileno(), info_w, filter_r, options_r)
        uid = host.next_uid()
        process = _spawn(host, pipes, (in_r, out_w, err_w), uid)
        parent_cleanup.callback(process.wait)
        # Ends the interpreter, and so bubblewrap; see `kill` for why bubblewrap is not killed.
        parent_cleanup.callback(our_socket.shutdown, socket.SHUT_RDWR)
        parent_cleanup.callback(options.close)
        exit_fd = os.pidfd_open(process.pid)
        if guard is not None:
            guard.add(process.pid)
        if host.isolation is not Isolation.NONE:
            options.write(host.options(pipes, mount_packages=mount_packages))
        for end in (in_w, out_r, err_r, info_r):
            os.set_blocking(end, False)
        return cls(
            *(process, our_socket, in_w, out_r, err_r, info_r, uid, host.isolation, exit_fd, guard)
        )

    async def wait_ready(self) -> None:
        """Wait until the interpreter waits for its program; SandboxError if it does not."""
        await self._wait_for_byte("start")
        self.open_init()
        if self.init_fd is None and self.isolation is not Isolation.NONE:
            # A program in this box could not be killed. Not a BoxStartError: isolation works, and
            # must not be disabled because a descriptor is missing.
            message = "no descriptor for the init process of a box"
            raise SandboxError(message, fix="allow more open files (ulimit -n)")
        if self.guard is not None and self.init_pid:
            self.guard.add(self.init_pid)

    def limit_memory(self, groups: MemoryGroups, memory_mb: int) -> None:
        """Put the box, which is ready, into a memory cgroup; OSError if that fails. The cgroup also
        counts its disk and the kernel memory that it causes."""
        self.group = groups.create((memory_mb + DISK_MB + KERNEL_MB) << 20)
        self.group.add(self.init_pid)

    async def _wait_for_byte(self, action: str) -> None:
        """Wait for one byte from the box; SandboxError with its error output if none comes."""
        received = b""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                received = await asyncio.get_running_loop().sock_recv(self.control, 1)
        except TimeoutError:
            raise SandboxError(f"a box did not {action} within {START_TIMEOUT_S:g} s") from None
        except OSError:
            pass
        if not received:
            await wait_readable(self.exit_fd, END_TIMEOUT_S)
            text = ""
            with suppress(OSError):
                text = os.read(self.stderr, MAX_STDERR_BYTES).decode(errors="replace").strip()
            raise BoxStartError(f"a box did not {action}: {text or 'it ended'}")

    def open_init(self) -> None:
        """Open a pidfd of the init process, whose pid bubblewrap has written to `info`."""
        if self.init_fd is not None or self.isolation is Isolation.NONE:
            return
        with suppress(OSError, ValueError, KeyError):
            self.init_pid = json.loads(os.read(self.info, 1 << 12))["child-pid"]
            self.init_fd = os.pidfd_open(self.init_pid)

    async def send(self, message: Mapping[str, object], pipes: tuple[int, ...] = ()) -> None:
        """Send the program and its descriptors; returns when it starts."""
        body = wire.encode(dict(message))
        content = len(body).to_bytes(8, "little") + body
        sent = socket.send_fds(self.control, [content[: 1 << 15]], list(pipes))
        if sent < len(content):
            await asyncio.get_running_loop().sock_sendall(self.control, content[sent:])
        await self._wait_for_byte("receive its program")

    def kill(self) -> None:
        """Kill all processes of the box; does not wait."""
        self.open_init()
        if self.init_fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)
        elif self.isolation is Isolation.NONE:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            # The box has no program: `wait_ready` rejects such a box. Killing bubblewrap while it
            # starts would leave a child that waits forever; an interpreter whose socket is closed
            # exits.
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """Kill the box and wait until no process is left. Pipes stay open until `close`."""
        self.kill()
        try:
            for descriptor, seconds in self._exit_descriptors():
                await wait_readable(descriptor, seconds)
        except asyncio.CancelledError:
            self.end_now()
            raise
        self._reap()

    def end_now(self) -> None:
        """`end` without an event loop; blocks for some milliseconds."""
        self.kill()
        for descriptor, seconds in self._exit_descriptors():
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(seconds * 1000)
        self._reap()

    def _exit_descriptors(self) -> list[tuple[int, float]]:
        """Descriptors that become readable at the end, and the time for each."""
        if self.init_fd is None:
            return [(self.exit_fd, START_TIMEOUT_S)]
        return [(self.init_fd, END_TIMEOUT_S), (self.exit_fd, END_TIMEOUT_S)]

    def _reap(self) -> None:
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S)
            raise SandboxError(f"a killed box did not end within {END_TIMEOUT_S:g} s") from None

    def close(self) -> None:
        if self.guard is not None:
            self.guard.remove(self.process.pid)
            self.guard.remove(self.init_pid)
        if self.group is not None:
            self.group.close()
        self.control.close()
        for name in ("stdin", "stdout", "stderr", "info", "exit_fd", "init_fd"):
            descriptor = getattr(self, name)
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
            setattr(self, name, None if name == "init_fd" else -1)


@dataclass(slots=True, eq=False)
class BoxStarter:
    """One thread that starts all boxes of a sandbox, and a guard that kills them if rollick dies.

    The kernel kills a box when the thread that started it ends (a parent-death signal is sent at
    the end of a thread, not of a process). Programs come from any thread, and a server's thread may
    end with its request, which would kill the box that waits for the next program. The thread
    starts with the first box; a forked process starts its own.
    """

    _lock: Lock = field(default_factory=Lock)
    _closed: bool = False
    _thread: ThreadPoolExecutor | None = None
    _guard: BoxGuard | None = None
    _pid: int = 0
    """The process of the thread and of the guard's parent."""

    def start(self, host: SandboxHost, *, mount_packages: bool = False) -> Box:
        """Wait about a millisecond for the start of bubblewrap; raises what Box.start raises."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed", fix="run programs inside its `with`")
            if self._thread is None or self._pid != os.getpid():
                self._thread = ThreadPoolExecutor(1, "starts boxes")
                self._guard, self._pid = None, os.getpid()
            box = self._thread.submit(
                lambda: Box.start(host, mount_packages=mount_packages, guard=self._open_guard())
            )
        return box.result()

    def _open_guard(self) -> BoxGuard:
        """The guard; a new one if it was killed."""
        if self._guard is not None and self._guard.is_alive:
            return self._guard
        if self._guard is not None:
            self._guard.close()
        try:
            self._guard = BoxGuard.start()
        except OSError as error:
            raise SandboxError(f"a guard for boxes cannot be started: {error}") from error
        return self._guard

    def close(self) -> None:
        """End the thread, and with it any remaining box."""
        with self._lock:
            self._closed = True
            if self._thread is not None and self._pid == os.getpid():
                self._thread.shutdown()
                if self._guard is not None:
                    self._guard.close()
            self._thread = self._guard = None


def _spawn(
    host: SandboxHost, pipes: BoxPipes, streams: tuple[int, int, int], uid: int | None
) -> subprocess.Popen[bytes]:
    """Start bubblewrap, or without isolation the interpreter, with these standard streams."""
    boot_code = BOOT_CODE.format(size=len(compile_box_modules()), control=pipes.control)
    python = ["-I", "-S", "-B", "-X", "utf8", "-c", boot_code]
    if host.isolation is Isolation.NONE:
        command, inherited = [sys.executable, *python], (pipes.control,)
    else:
        command = host.command(pipes, python, uid)
        inherited = (*pipes, *(() if host.mounts is None else (host.mounts,)))
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=inherited,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        cwd="/",
        start_new_session=True,
    )


def _open_pipe(reads: ExitStack, writes: ExitStack) -> tuple[int, int]:
    """A pipe; each stack closes one of its ends."""
    ends = os.pipe()
    for stack, end in zip((reads, writes), ends, strict=True):
        stack.callback(os.close, end)
    return ends


async def wait_readable(descriptor: int, seconds: float) -> None:
    """Wait until the descriptor is readable, at most `seconds`."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: readable.done() or readable.set_result(None))
    try:
        await asyncio.wait([readable], timeout=seconds)
    finally:
        loop.remove_reader(descriptor)
