"""Detects what this machine offers for boxes, and builds the command line of a box.

    SandboxHost.detect() -> bubblewrap, interpreter, a mount namespace readable by any uid (root)
    SandboxHost.command(...) -> [nsenter with a temporary uid,] bwrap, python
    SandboxHost.options(...) -> what bwrap does: all namespaces, mounts, environment

As root, bubblewrap itself runs under a temporary uid: the kernel exempts root from the limit on
processes, and a box must not own files of root. Such a uid may have no access to the interpreter (a
home folder is private). So root once creates a mount namespace with the interpreter mounted at a
readable path, keeps it open by a descriptor, and starts the boxes in it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

from rollick.sandbox.base import Isolation, MemoryLimit
from rollick.sandbox.memory import MemoryGroups

HELPER_TIMEOUT_S = 10.0
FIRST_UID = 1_000_000_000
UIDS_PER_PROCESS = 64
"""Consecutive boxes of one process with different uids."""
INSIDE_UID = 1000
DISK_MB = 64
"""Size of the writable /tmp of a box."""
INTERPRETER = "/python"
"""The interpreter's folder in a box; it hides the path on the host."""
STAGE = "/tmp"
"""In the private mount namespace: an empty file system on which the folders are mounted."""
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
DEVICES = ("null", "zero", "full", "random", "urandom")
STAGING_SCRIPT = """
set -e
number=3
for folder in "$@"; do
  eval "exec $number<\\"\\${folder#*=}\\""
  number=$((number + 1))
done
mount -t tmpfs -o mode=755 tmpfs "$0"
number=3
for folder in "$@"; do
  mkdir "$0/${folder%%=*}"
  mount --no-canonicalize --bind "/proc/self/fd/$number" "$0/${folder%%=*}"
  number=$((number + 1))
done
echo staged
read end
"""
"""Shell script for the mounts. It opens the folders first: a mount at STAGE hides the folders below
it."""


class BoxPipes(NamedTuple):
    """Descriptors that bubblewrap inherits."""

    control: int
    info: int
    seccomp: int
    options: int
    """bubblewrap waits for its options, so that no box starts before the guard knows of it."""


@dataclass(slots=True, eq=False)
class SandboxHost:
    """What this machine offers. If `isolation` is NONE, `problem` is the reason."""

    isolation: Isolation
    problem: str = ""
    bwrap: str = ""
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """Paths of the interpreter (prefix) and of pytest (packages), as bubblewrap sees them."""
    mounts: int | None = None
    """Descriptor of root's mount namespace."""
    memory: MemoryGroups | None = None
    """None if no memory cgroup can be created."""
    _box_numbers: count[int] = field(default_factory=count)

    @classmethod
    def detect(cls) -> SandboxHost:
        """Find the tools and create root's mount namespace; starts no box."""
        bwrap = shutil.which("bwrap")
        if sys.platform != "linux":
            return cls(Isolation.NONE, f"boxes need Linux; this is {sys.platform}")
        if bwrap is None:
            return cls(Isolation.NONE, "bwrap is not installed: install the package bubblewrap")
        folders, memory = {"prefix": sys.base_prefix} | packages_folder(), MemoryGroups.detect()
        if os.geteuid() != 0:
            return cls(Isolation.USER, bwrap=bwrap, sources=folders, memory=memory)
        try:
            mounts = stage_folders(folders)
        except (OSError, subprocess.SubprocessError) as error:
            # The folders may be readable by any uid; if not, starting a box raises.
            problem = f"no private mount namespace: {error}"
            return cls(Isolation.FULL, problem, bwrap=bwrap, sources=folders, memory=memory)
        staged = {name: f"{STAGE}/{name}" for name in folders}
        return cls(Isolation.FULL, bwrap=bwrap, sources=staged, mounts=mounts, memory=memory)

    @property
    def memory_limit(self) -> MemoryLimit:
        if self.isolation is Isolation.NONE:
            return MemoryLimit.RLIMITS
        return MemoryLimit.POLLED if self.memory is None else MemoryLimit.CGROUP

    def close(self) -> None:
        if self.mounts is not None:
            os.close(self.mounts)
            self.mounts = None

    def next_uid(self) -> int | None:
        """A uid for the next box; None if boxes run under the current uid."""
        if self.isolation is not Isolation.FULL:
            return None
        number = os.getpid() * UIDS_PER_PROCESS + next(self._box_numbers) % UIDS_PER_PROCESS
        first, size = uid_range(Path("/proc/self/uid_map").read_text())
        return first + number % size

    def command(self, pipes: BoxPipes, python: Sequence[str], uid: int | None) -> list[str]:
        """The command of a box that runs `python` (arguments of the interpreter)."""
        bwrap = [self.bwrap, "--args", str(pipes.options), "--"]
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return [*self._uid_command(uid), *bwrap, f"{self.prefix}/bin/python{version}", *python]

    @property
    def prefix(self) -> str:
        """The interpreter's folder in a box."""
        return "/usr" if sys.base_prefix == "/usr" else INTERPRETER

    def options(self, pipes: BoxPipes, *, mount_packages: bool) -> bytes:
        """The options of bubblewrap, as it reads them from a pipe."""
        binds = ["--ro-bind", self.sources["packages"], "/packages"] if mount_packages else []
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
        # Each malloc arena of the C library reserves 64 MB of address space for a thread.
        environment["MALLOC_ARENA_MAX"] = "1"
        if self.prefix == INTERPRETER:
            environment["LD_LIBRARY_PATH"] = f"{INTERPRETER}/lib"
            binds += ["--ro-bind", self.sources["prefix"], INTERPRETER]
        options = [
            *(f"--unshare-{name}" for name in NAMESPACES),
            *("--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "box"),
            # The interpreter is the init process: when it ends, the kernel kills all others, and
            # bubblewrap reaps it. In a separate session it cannot signal bubblewrap's group.
            *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
            *(option for item in environment.items() for option in ("--setenv", *item)),
            *("--ro-bind", "/usr", "/usr", *system_link_options(), *binds),
            *("--size", str(1 << 20), "--tmpfs", "/dev"),
            *(
                option
                for name in DEVICES
                for option in ("--dev-bind", self._host_device(name), f"/dev/{name}")
            ),
            *("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", str(DISK_MB << 20), "--tmpfs", "/tmp", "--remount-ro", "/"),
            *("--chdir", "/tmp", "--info-fd", str(pipes.info), "--seccomp", str(pipes.seccomp)),
        ]
        return b"".join(os.fsencode(option) + b"\0" for option in options)

    def _host_device(self, name: str) -> str:
        """The host's device for a device of a box. A shared mapping of /dev/zero is anonymous
        memory, which only a cgroup counts; /dev/full reads as zeros too, and cannot be mapped."""
        return "/dev/full" if name == "zero" and self.memory is None else f"/dev/{name}"

    def _uid_command(self, uid: int | None) -> list[str]:
        if uid is None:
            return []
        if self.mounts is not None:
            mounts = f"--mount=/proc/self/fd/{self.mounts}"
            return ["nsenter", mounts, "--setuid", str(uid), "--setgid", str(uid), "--"]
        ids = ("--reuid", str(uid), "--regid", str(uid))
        return ["setpriv", *ids, "--clear-groups", "--"]


def packages_folder() -> dict[str, str]:
    """The folder of pytest, for boxes that run pytest files."""
    spec = importlib.util.find_spec("pytest")
    if spec is None or spec.origin is None:
        return {}
    return {"packages": str(Path(spec.origin).parents[1])}


def stage_folders(folders: dict[str, str]) -> int:
    """A mount namespace with each folder mounted at STAGE/name; OSError if not permitted."""
    arguments, pipe = [f"{name}={path}" for name, path in folders.items()], subprocess.PIPE
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", STAGING_SCRIPT, STAGE]
    helper = subprocess.Popen([*unshare, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        assert helper.stdout is not None
        if helper.stdout.readline() != b"staged\n":
            _, errors = helper.communicate(timeout=HELPER_TIMEOUT_S)
            raise OSError(errors.decode(errors="replace").strip() or "unshare failed")
        return os.open(f"/proc/{helper.pid}/ns/mnt", os.O_RDONLY)
    finally:
        helper.communicate(timeout=HELPER_TIMEOUT_S)


@cache
def system_link_options() -> tuple[str, ...]:
    """bwrap options for /bin, /lib and so on: symlinks as on the host, else bind mounts."""
    options: list[str] = []
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            options += ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            options += ("--ro-bind", str(path), str(path))
    return tuple(options)


def uid_range(uid_map: str) -> tuple[int, int]:
    """(first uid for boxes, number of uids). The user namespace of a container has only some uids;
    then the highest are chosen, which are rarely used."""
    needed = (1 << 22) * UIDS_PER_PROCESS  # the kernel's maximum pid
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    if any(first <= FIRST_UID and FIRST_UID + needed <= first + size for first, _, size in ranges):
        return FIRST_UID, needed
    first, _, size = max(ranges)
    num_uids = max(1, min(size // 2, needed))
    return first + size - num_uids, num_uids
