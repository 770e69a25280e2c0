"""The first code in a box: waits for its program, lowers the limits, and becomes what it is told.

    control socket:  parent --code of these modules--> box --"R"--> parent
                     parent --message (role, code, limits) and pipes--> box --"T"--> parent

This file and its neighbours never run outside a box. They import nothing of rollick by name: their
code comes through the control socket, compiled, as modules named `rollick_` and the
file's name.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys
from _socket import CMSG_SPACE, SCM_RIGHTS, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

HIGHEST_FD = 1 << 16
READY, TAKEN = b"R", b"T"
"""It waits for its program; it has it, and the limits are set: the rest is the program's doing."""


def main(control: int, codes: dict[str, CodeType]) -> None:
    # Descriptors that bubblewrap was started with lead out of the box.
    os.closerange(3, control)
    os.closerange(control + 1, HIGHEST_FD)
    os.write(control, READY)
    wire = load_module("rollick_wire", codes)
    body, pipes = receive(control)
    message = wire.decode(body)
    set_limits(message["limits"])
    os.write(control, TAKEN)
    role = message["role"]
    if role in ("program", "candidate"):
        os.close(control)
    # The site module, which boxes do without, would have made these.
    builtins.exit = builtins.quit = sys.exit  # pyright: ignore[reportAttributeAccessIssue]
    if role == "shared":
        load_module("rollick_tests", codes)
    harness = load_module(f"rollick_{role}", codes)
    harness.main(message, pipes, control)


def load_module(name: str, codes: dict[str, CodeType]) -> Any:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(codes[name], module.__dict__)
    return module


def receive(control: int) -> tuple[bytes, list[int]]:
    """The message and the descriptors that came with it."""
    link = socket(fileno=control)
    first, ancillary, _, _ = link.recvmsg(1 << 16, CMSG_SPACE(2 * 4))
    link.detach()
    pipes: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (SOL_SOCKET, SCM_RIGHTS):
            pipes += [
                int.from_bytes(content[at : at + 4], sys.byteorder)
                for at in range(0, len(content) - 3, 4)
            ]
    body = bytearray(first)
    while len(body) < 8 or len(body) < 8 + int.from_bytes(body[:8], "little"):
        chunk = os.read(control, 1 << 20)
        if not chunk:
            os._exit(0)  # the sandbox is closed: this box is not needed
        body += chunk
    return bytes(body[8:]), pipes


def set_limits(limits: dict[str, int]) -> None:
    """Soft and hard: no process of the box can raise them again."""
    memory = limits["memory_mb"] << 20
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (wanted, wanted))
