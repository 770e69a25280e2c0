"""The first code in a box: waits for its program, sets the limits and starts the box's role.

    control socket:  parent --code of these modules--> box --"R"--> parent
                     parent --message (role, code, limits) and pipes--> box --"T"--> parent

This package never runs outside a box and imports nothing of rollick by name: its compiled code
arrives through the control socket, as modules named `rollick_` + file name. Those that only pytest
files need arrive with the message.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys
from _socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

HIGHEST_FD = 1 << 16
SCRIPT = "program.py"
NO_CORE_DUMP = 1
"""The kernel ignores a limit of 0 if it pipes core dumps into a program; a limit of 1 stops it."""
READY, RECEIVED = b"R", b"T"
"""The box waits for its program; it has received the program and set the limits."""


def main(control: int, codes: dict[str, CodeType], read_code: Callable[[bytes], CodeType]) -> None:
    # Inherited descriptors of bubblewrap would lead out of the box.
    os.closerange(3, control)
    os.closerange(control + 1, HIGHEST_FD)
    os.write(control, READY)
    wire = load_module("rollick_wire", codes)
    body, pipes = receive(control)
    message = wire.decode(body)
    set_limits(message["limits"])
    os.write(control, RECEIVED)
    role = message["role"]
    if role in ("program", "candidate"):
        os.close(control)
    # The site module, which boxes do not load, defines these.
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore[reportAttributeAccessIssue]
    if role == "program":
        run_script(message["code"])
        return
    program = load_module(f"rollick_{role}", codes)
    for name, code in message["modules"].items():
        load_module(name, {name: read_code(code)})
    program.main(message, pipes, control)


def load_module(name: str, codes: dict[str, CodeType]) -> Any:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(codes[name], module.__dict__)
    return module


def receive(control: int) -> tuple[bytes, list[int]]:
    """The message and the descriptors sent with it."""
    connection = socket(fileno=control)
    first_chunk, ancillary, _, _ = connection.recvmsg(1 << 16, CMSG_SPACE(2 * 4))
    connection.detach()
    pipes: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (SOL_SOCKET, SCM_RIGHTS):
            size = len(content) - len(content) % 4
            pipes += memoryview(content[:size]).cast("i").tolist()
    body = bytearray(first_chunk)
    while len(body) < 8 or len(body) < 8 + int.from_bytes(body[:8], "little"):
        chunk = os.read(control, 1 << 20)
        if not chunk:
            os._exit(0)  # the sandbox was closed
        body += chunk
    return bytes(body[8:]), pipes


def set_limits(limits: dict[str, int]) -> None:
    """Set soft and hard limits, which no process of the box can raise."""
    memory = limits["memory_mb"] << 20
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, NO_CORE_DUMP),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def run_script(code: str) -> None:
    """Run the code as `__main__`, connected to the box's standard streams."""
    module = type(sys)("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [SCRIPT]
    try:
        exec(compile(code, SCRIPT, "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        try:
            print_traceback(error, code)
        except (MemoryError, SystemError):  # the memory is full: importing traceback fails too
            os.write(2, b"\nMemoryError\n")
        sys.exit(1)


def print_traceback(error: BaseException, code: str) -> None:
    """Print the traceback as `python script.py` would, without the frame of this file."""
    import linecache
    import traceback

    linecache.cache[SCRIPT] = (len(code), None, code.splitlines(keepends=True), SCRIPT)
    sys.stdout.flush()
    frames = error.__traceback__ and error.__traceback__.tb_next
    traceback.print_exception(type(error), error, frames)
