"""Detects the active isolation layers by running a probe inside a box."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from rollick.sandbox.base import Isolation, Limits, MemoryLimit, Program, Status
from rollick.sandbox.host import NAMESPACES
from rollick.sandbox.local import LocalSandbox

PROBE = """
import os, resource, _socket

def refused(call, *arguments):
    return fails(call, *arguments, error=PermissionError)

def fails(call, *arguments, error=OSError):
    try:
        call(*arguments)
    except OSError as raised:
        return isinstance(raised, error)
    return False

processes, memory = (
    resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NPROC, resource.RLIMIT_AS)
)
print("pid namespace", os.getpid() == 1)
print("seccomp", refused(os.memfd_create, "x") and refused(_socket.socket, 2, 1, 0))
print("limits", processes == 32 and memory == 512 << 20)
print("read-only system", fails(os.mkdir, "/usr/x") and fails(os.mkdir, "/x"))
print("own disk", not fails(os.mkdir, "/tmp/x") and len(os.listdir("/tmp")) == 1)
print("no /proc", not os.path.exists("/proc/self"))
known = {"PATH", "HOME", "LANG", "PWD", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX"}
print("cleared environment", {*os.environ} <= known)
"""


@dataclass(frozen=True, slots=True)
class IsolationLayers:
    """The isolation level on this machine, and each probed layer."""

    isolation: Isolation
    active: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem: str = ""

    @property
    def text(self) -> str:
        """One line for display."""
        if self.isolation is Isolation.NONE:
            return f"none: {self.problem}"
        return f"{self.isolation}: {', '.join(self.active)}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


async def probe_layers() -> IsolationLayers:
    """Run the probe in one box. If it fails or a layer has no effect, the level is NONE."""
    with LocalSandbox(warm=0) as sandbox:
        layers = IsolationLayers(sandbox.host.isolation, problem=sandbox.host.problem)
        if layers.isolation is Isolation.NONE:
            return replace(layers, missing=("bubblewrap",))
        result = await sandbox.run(Program(PROBE, limits=Limits(wall_s=20.0)))
        groups = sandbox.host.memory
        has_cpu_group = groups is not None and groups.cpu is not None
    if result.status is not Status.OK:
        problem = result.detail or result.stderr.strip() or str(result.status)
        return IsolationLayers(Isolation.NONE, missing=("bubblewrap",), problem=problem)
    probed = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    failed = [name for name, is_active in probed.items() if is_active != "True"]
    # bubblewrap does not start unless it can create each requested namespace.
    active = ["bubblewrap", f"namespaces ({', '.join(NAMESPACES)}, mount)"]
    active += [name for name in probed if name not in failed]
    optional = {
        "throw-away uid": layers.isolation is Isolation.FULL,
        "memory cgroup": result.memory_limit is MemoryLimit.CGROUP,
        "cpu cgroup": has_cpu_group,
    }
    active += [name for name, is_active in optional.items() if is_active]
    missing = failed + [name for name, is_active in optional.items() if not is_active]
    level = Isolation.NONE if failed else layers.isolation
    problem = f"these layers have no effect: {', '.join(failed)}" if failed else ""
    return IsolationLayers(level, tuple(active), tuple(missing), problem)
