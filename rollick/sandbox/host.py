"""What this machine offers for boxes, and how a box's command line is made from it.

    Host.find() -> bubblewrap, interpreter, a mount namespace that an ordinary uid can read (root)
    Host.command(...) -> [nsenter as a throw-away uid,] bwrap with everything unshared, python

As root, bubblewrap itself runs under the throw-away uid: the kernel exempts root from the limit on
processes, and a box must own nothing of ours. Such a uid may not reach the interpreter (a home
folder is private), so root makes, once, a mount namespace in which the interpreter lies open, keeps
it by a descriptor, and starts the boxes from there. Nothing of it is visible outside.
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

from rollick.sandbox.base import Isolation

HELPER_SECONDS = 10.0
FIRST_UID = 1_000_000_000
UIDS_PER_PROCESS = 64
"""Boxes that one process of ours starts have different uids as long as so many are alive."""
INSIDE_UID = 1000
INTERPRETER = "/python"
"""Where the interpreter's folder lies in a box: programs do not learn where it is on the host."""
STAGE = "/tmp"
"""In the private mount namespace: covered by an empty file system, on which folders are mounted."""
NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")
DEVICES = ("null", "zero", "full", "random", "urandom")
STAGING = """
set -e
number=3
for place in "$@"; do
  eval "exec $number<\\"\\${place#*=}\\""
  number=$((number + 1))
done
mount -t tmpfs -o mode=755 tmpfs "$0"
number=3
for place in "$@"; do
  mkdir "$0/${place%%=*}"
  mount --no-canonicalize --bind "/proc/self/fd/$number" "$0/${place%%=*}"
  number=$((number + 1))
done
echo staged
read end
"""
"""The folders are held open first: one that lies below STAGE has no path any more once that is
covered."""


@dataclass(frozen=True, slots=True)
class BoxPipes:
    """Descriptors that bubblewrap is started with."""

    control: int
    info: int
    seccomp: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.control, self.info, self.seccomp)


@dataclass(slots=True, eq=False)
class Host:
    """The means of this machine. `isolation` NONE: there are none; `problem` says why."""

    isolation: Isolation
    problem: str = ""
    bwrap: str = ""
    sources: dict[str, str] = field(default_factory=dict[str, str])
    """Where bubblewrap finds the folders that may be out of reach: prefix, packages."""
    mounts: int | None = None
    """Descriptor of root's mount namespace."""
    _numbers: count[int] = field(default_factory=count)

    @classmethod
    def find(cls) -> Host:
        """Looks for the tools and prepares root's mount namespace; starts no box."""
        bwrap = shutil.which("bwrap")
        if sys.platform != "linux":
            return cls(Isolation.NONE, f"boxes need Linux, and this is {sys.platform}")
        if bwrap is None:
            return cls(Isolation.NONE, "bwrap is not installed (Debian's package bubblewrap)")
        wanted = {"prefix": sys.base_prefix} | packages_folder()
        if os.geteuid() != 0:
            return cls(Isolation.USER, bwrap=bwrap, sources=wanted)
        host = cls(Isolation.FULL, bwrap=bwrap)
        try:
            host.mounts = stage(wanted)
        except (OSError, subprocess.SubprocessError) as error:
            # The folders may be open to everybody; if not, no box starts, and says so.
            host.sources = wanted
            host.problem = f"no private mount namespace: {error}"
        else:
            host.sources = {name: f"{STAGE}/{name}" for name in wanted}
        return host

    def close(self) -> None:
        if self.mounts is not None:
            os.close(self.mounts)
            self.mounts = None

    def next_uid(self) -> int | None:
        """A uid for the next box; None for an ordinary user, who has no other than his own."""
        if self.isolation is not Isolation.FULL:
            return None
        number = os.getpid() * UIDS_PER_PROCESS + next(self._numbers) % UIDS_PER_PROCESS
        first, size = own_uids()
        return first + number % size

    def inherited(self) -> tuple[int, ...]:
        return () if self.mounts is None else (self.mounts,)

    def command(
        self,
        pipes: BoxPipes,
        python: Sequence[str],
        *,
        uid: int | None,
        disk_mb: int,
        packages: bool,
    ) -> list[str]:
        """What starts a box that runs `python` (arguments of the interpreter)."""
        system = sys.base_prefix == "/usr"
        prefix = "/usr" if system else INTERPRETER
        own = [] if system else ["--ro-bind", self.sources["prefix"], prefix]
        extra = ["--ro-bind", self.sources["packages"], "/packages"] if packages else []
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
        # An arena of the C library reserves 64 MB of address space for each thread.
        environment["MALLOC_ARENA_MAX"] = "1"
        if not system:
            environment["LD_LIBRARY_PATH"] = f"{prefix}/lib"
        return [
            *self._as_uid(uid),
            self.bwrap,
            *(f"--unshare-{name}" for name in NAMESPACES),
            *("--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--hostname", "box"),
            # The interpreter is the first process: when it ends, the kernel ends all others, and
            # bubblewrap reaps it, so that not even a zombie is left.
            *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
            *(word for item in environment.items() for word in ("--setenv", *item)),
            *("--ro-bind", "/usr", "/usr", *system_links(), *own, *extra),
            *("--size", str(1 << 20), "--tmpfs", "/dev"),
            *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            *("--symlink", "/tmp", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", str(disk_mb << 20), "--tmpfs", "/tmp", "--remount-ro", "/"),
            *("--chdir", "/tmp", "--info-fd", str(pipes.info), "--seccomp", str(pipes.seccomp)),
            *("--", f"{prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}", *python),
        ]

    def _as_uid(self, uid: int | None) -> list[str]:
        if uid is None:
            return []
        if self.mounts is not None:
            there = f"--mount=/proc/self/fd/{self.mounts}"
            return [path_of("nsenter"), there, "--setuid", str(uid), "--setgid", str(uid), "--"]
        return [
            path_of("setpriv"),
            "--reuid",
            str(uid),
            "--regid",
            str(uid),
            "--clear-groups",
            "--",
        ]


def packages_folder() -> dict[str, str]:
    """Where pytest is installed, for boxes that run pytest files."""
    spec = importlib.util.find_spec("pytest")
    if spec is None or spec.origin is None:
        return {}
    return {"packages": str(Path(spec.origin).parents[1])}


def stage(folders: dict[str, str]) -> int:
    """A mount namespace in which each folder lies at STAGE/name; OSError where root may not."""
    places = [f"{name}={path}" for name, path in folders.items()]
    helper = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", STAGING, STAGE, *places],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert helper.stdout is not None
        if helper.stdout.readline() != b"staged\n":
            _, said = helper.communicate(timeout=HELPER_SECONDS)
            raise OSError(said.decode(errors="replace").strip() or "unshare failed")
        return os.open(f"/proc/{helper.pid}/ns/mnt", os.O_RDONLY)
    finally:
        helper.communicate(timeout=HELPER_SECONDS)


@cache
def path_of(tool: str) -> str:
    """Where the tool lies: the kernel need not try each folder of PATH for every box."""
    return shutil.which(tool) or tool


@cache
def system_links() -> tuple[str, ...]:
    """/bin, /lib and their like: links into /usr where they are links, else the folders."""
    words: list[str] = []
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if path.is_symlink():
            words += ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            words += ("--ro-bind", str(path), str(path))
    return tuple(words)


@cache
def own_uids() -> tuple[int, int]:
    """The uids for boxes in the user namespace of this process."""
    return uid_range(Path("/proc/self/uid_map").read_text())


def uid_range(uid_map: str) -> tuple[int, int]:
    """The first of the uids for boxes, and how many there are.

    In the user namespace of a container only some uids exist: then the highest ones, of which
    few others make use.
    """
    wanted = (1 << 22) * UIDS_PER_PROCESS  # the kernel's highest number of processes
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    if any(first <= FIRST_UID and FIRST_UID + wanted <= first + size for first, _, size in ranges):
        return FIRST_UID, wanted
    first, _, size = max(ranges)
    share = max(1, min(size // 2, wanted))
    return first + size - share, share
