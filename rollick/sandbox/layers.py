"""Which layers of isolation are active here: found by starting a box and trying from inside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollick.sandbox.base import Isolation, Limits, Program, Status
from rollick.sandbox.host import NAMESPACES
from rollick.sandbox.local import LocalSandbox

PROBE = """
import os, resource, _socket

def refused(call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        return True
    except OSError:
        return False
    return False

def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False

def limited():
    return resource.getrlimit(resource.RLIMIT_NPROC)[1] == 32

print("pid namespace", os.getpid() == 1)
print("seccomp", refused(os.memfd_create, "x") and refused(_socket.socket, 2, 1, 0))
print("limits", limited() and resource.getrlimit(resource.RLIMIT_AS)[1] == 512 << 20)
print("read-only system", fails(os.mkdir, "/usr/x") and fails(os.mkdir, "/x"))
print("own disk", not fails(os.mkdir, "/tmp/x") and len(os.listdir("/tmp")) == 1)
print("no /proc", not os.path.exists("/proc/self"))
known = {"PATH", "HOME", "LANG", "PWD", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX"}
print("cleared environment", {*os.environ} <= known)
"""


@dataclass(frozen=True, slots=True)
class Layers:
    """The isolation that programs get here, and each layer that was tried."""

    isolation: Isolation
    active: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""

    @property
    def text(self) -> str:
        """One line for people."""
        if self.isolation is Isolation.NONE:
            return f"none: {self.problem}"
        return f"{self.isolation}: {', '.join(self.active)}"

    def to_json(self) -> dict[str, object]:
        return {
            "isolation": str(self.isolation),
            "active": list(self.active),
            "missing": list(self.missing),
            "problem": self.problem,
        }


async def find_layers() -> Layers:
    """Starts one box. If it cannot be started, or a layer does not hold, the level is NONE."""
    with LocalSandbox(warm=0) as sandbox:
        uid = "throw-away uid"
        found = Layers(sandbox.host.isolation, problem=sandbox.host.problem)
        if found.isolation is Isolation.NONE:
            return replace(found, missing=("bubblewrap",))
        result = await sandbox.run(Program(PROBE, limits=Limits(wall_s=20.0)))
    if result.status is not Status.OK:
        problem = result.detail or result.stderr.strip() or str(result.status)
        return Layers(Isolation.NONE, missing=("bubblewrap",), problem=problem)
    answers = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    missing = tuple(name for name, answer in answers.items() if answer != "True")
    # bubblewrap does not start without each of the namespaces that it was asked for.
    active = ["bubblewrap", f"namespaces ({', '.join(NAMESPACES)}, mount)"]
    active += [name for name, answer in answers.items() if answer == "True"]
    if found.isolation is Isolation.FULL:
        active.append(uid)
    else:
        missing = (*missing, uid)
    broken = [name for name in missing if name != uid]
    if broken:
        problem = f"these layers do not hold: {', '.join(broken)}"
        return Layers(Isolation.NONE, tuple(active), missing, problem)
    return replace(found, active=tuple(active), missing=missing, problem="")
