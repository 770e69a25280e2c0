"""Limits the memory of a box: by a memory cgroup if one can be created, otherwise by polling.

    MemoryGroups.detect() -> create(limit) -> MemoryGroup: add(pid), is_exhausted, close
    measure_memory(pid)   -> resident memory of all processes and size of their socket buffers

A cgroup counts all memory of a box, including kernel memory, and the kernel enforces its limit.
Ordinary users and most containers cannot create one. There the filter denies what no measurement
sees (shared anonymous mappings, large socket buffers), and monitor.py measures the rest.

Where a cpu cgroup can be created too, each box has one with the same weight, so that a box with
many processes gets no larger share of a CPU than another.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

NAME_PREFIX = "rollick-box"
HELPER_TIMEOUT_S = 10.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DEFAULT_SOCKET_BYTES = 212_992
CPU_WEIGHT = {"cgroup": ("cpu.shares", "1024"), "cgroup2": ("cpu.weight", "100")}
"""(file of the weight, weight of each box) of a cpu cgroup."""


class GroupFiles(NamedTuple):
    """The files of one version of cgroups."""

    limit: str
    swap: str
    no_swap: str
    """Content of the file `swap`; LIMIT is replaced by the limit."""
    events: str
    """Has a line "oom_kill N"."""


VERSIONS = {
    "cgroup": GroupFiles(
        *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "LIMIT", "memory.oom_control")
    ),
    "cgroup2": GroupFiles("memory.max", "memory.swap.max", "0", "memory.events"),
}


@dataclass(slots=True, eq=False)
class MemoryGroup:
    """The cgroup of one box."""

    folder: Path
    files: GroupFiles
    cpu: Path | None = None
    """Its cpu cgroup, if that is a separate folder."""

    def add(self, pid: int) -> None:
        """Put a process into the group; its later children are in it too."""
        for folder in filter(None, (self.folder, self.cpu)):
            (folder / "cgroup.procs").write_text(str(pid))

    @property
    def is_exhausted(self) -> bool:
        """Whether the kernel has killed a process of the group at its limit."""
        with suppress(OSError):
            lines = (self.folder / self.files.events).read_text().splitlines()
            return any(line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in lines)
        return False

    def close(self) -> None:
        """Remove the group. If it is still in use, a later sandbox removes it."""
        for folder in filter(None, (self.folder, self.cpu)):
            with suppress(OSError):
                folder.rmdir()


@dataclass(slots=True, eq=False)
class MemoryGroups:
    """Creates memory cgroups in a folder of the cgroup file system."""

    folder: Path
    files: GroupFiles
    cpu: tuple[Path, str] | None = None
    """Folder for cpu cgroups and its file system type; None without cpu cgroups."""
    _group_numbers: count[int] = field(default_factory=count)

    @classmethod
    def detect(cls) -> MemoryGroups | None:
        """Finds a folder where this process may create memory cgroups; None if there is none."""
        for folder, version in find_group_folders("memory"):
            for cpu in (*find_group_folders("cpu"), None):
                if cpu is not None and cpu[1] == version == "cgroup2" and cpu[0] != folder:
                    continue  # in version 2 a process has one group for both controllers
                groups = cls(folder, VERSIONS[version], cpu)
                with suppress(OSError, subprocess.SubprocessError):
                    groups._remove_stale()
                    groups._check_permission()
                    return groups
        return None

    def create(self, max_bytes: int) -> MemoryGroup:
        """A group with this limit; OSError if it cannot be created."""
        name = f"{NAME_PREFIX}-{os.getpid()}-{next(self._group_numbers)}"
        folder = self.folder / name
        folder.mkdir()
        group = MemoryGroup(folder, self.files)
        try:
            if self.cpu is not None:
                parent, version = self.cpu
                if parent != self.folder:  # version 1
                    (parent / name).mkdir()
                    group.cpu = parent / name
                file, weight = CPU_WEIGHT[version]
                (parent / name / file).write_text(weight)
            (folder / self.files.limit).write_text(str(max_bytes))
            with suppress(OSError):  # a machine without swap may lack the file
                no_swap = self.files.no_swap.replace("LIMIT", str(max_bytes))
                (folder / self.files.swap).write_text(no_swap)
        except OSError:
            group.close()
            raise
        return group

    def _check_permission(self) -> None:
        """Put a process into a group; OSError if this is not permitted."""
        group = self.create(64 << 20)
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            group.add(process.pid)
        finally:
            process.communicate(timeout=HELPER_TIMEOUT_S)
            group.close()

    def _remove_stale(self) -> None:
        """Remove the empty groups of processes that were killed."""
        for parent in (self.folder, *(() if self.cpu is None else self.cpu[:1])):
            for folder in parent.glob(f"{NAME_PREFIX}-*"):
                owner = folder.name.removeprefix(f"{NAME_PREFIX}-").partition("-")[0]
                if not Path(f"/proc/{owner}").exists():
                    MemoryGroup(folder, self.files).close()


def find_group_folders(controller: str) -> Iterator[tuple[Path, str]]:
    """(folder, file system type) of each possible parent of new cgroups of a controller."""
    with suppress(OSError):
        paths = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        mounts = Path("/proc/self/mountinfo").read_text()
        for _, controllers, path in paths:
            if controller in controllers.split(","):
                yield from find_mounts(mounts, "cgroup", path, {controller})
            elif not controllers:
                for folder, version in find_mounts(mounts, "cgroup2", path, set()):
                    # A group with processes cannot have groups with controllers below it, so a
                    # sibling is usually the only option.
                    for parent in (folder, folder.parent):
                        enabled = parent / "cgroup.subtree_control"
                        if enabled.exists() and controller in enabled.read_text().split():
                            yield parent, version


def find_mounts(
    mounts: str, version: str, path: str, controllers: set[str]
) -> Iterator[tuple[Path, str]]:
    """(folder, file system type) of each mount of a cgroup; `mounts` is the text of mountinfo."""
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        root, point = mount.split()[3:5]
        fs_type, _, options = kind.split(" ")[:3]  # the source, in between, may be empty
        if fs_type == version and controllers <= set(options.split(",")):
            with suppress(ValueError):
                yield Path(point) / Path(path).relative_to(root), version


def measure_memory(pid: int, max_bytes: int) -> int:
    """Resident memory of a process and its descendants, plus the buffers of all sockets in their
    network namespace; stops counting beyond `max_bytes`."""
    total, pids = count_sockets(pid) * read_socket_bytes(), [pid]
    while pids and total <= max_bytes:
        resident = 0
        for task in list_task_folders(pids.pop()):
            with suppress(OSError, ValueError, IndexError):
                # Threads share their memory, but one that has exited reads as 0.
                resident = max(resident, int(Path(task, "statm").read_text().split()[1]))
                pids += map(int, Path(task, "children").read_text().split())
        total += resident * PAGE_BYTES
    return total


def list_task_folders(pid: int) -> list[str]:
    """The folder in /proc of each thread of a process."""
    with suppress(OSError):
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    return []


def count_sockets(pid: int) -> int:
    """Number of sockets in the network namespace of a box: it can have unix sockets only."""
    for task in list_task_folders(pid):
        with suppress(OSError):  # a thread that has exited has no namespace
            return Path(task, "net/unix").read_bytes().count(b"\n") - 1
    return 0


def count_files(pid: int) -> int:
    """Number of files on the disk of a box; 0 if the kernel does not allow counting them."""
    for task in list_task_folders(pid):
        with suppress(OSError):  # a thread that has exited has no file system
            disk = os.statvfs(f"{task}/root/tmp")
            return disk.f_files - disk.f_ffree
    return 0


@cache
def read_socket_bytes() -> int:
    """Bytes that a peer can write into a socket before they are read. The seccomp filter prevents
    programs from changing it."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    return DEFAULT_SOCKET_BYTES
