"""Reads /proc: finds the descendants of this process, also those whose parent has died, and whether
the kernel killed a process because memory ran out.

    adopt_orphans()    the kernel gives orphaned descendants to this process, not to init
    find_descendants() every process below one; find_stopped(): those that SIGSTOP holds
    kill_processes()   SIGKILL, repeated until none is left or the timeout has passed

On a system without /proc, no process is found. The kernel does not report the reason of a kill, but
counts kills for lack of memory in /proc/vmstat.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_INTERVAL_S = 0.05
VMSTAT = Path("/proc/vmstat")


class ProcessId(NamedTuple):
    """A process. The start time distinguishes it from a later process with the same pid."""

    pid: int
    started: int


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent dies. False where there is no prctl."""
    return _prctl(PR_SET_CHILD_SUBREAPER, 1)


def signal_on_parent_death(number: signal.Signals) -> bool:
    """Ask the kernel to send `number` to this process when its parent dies; kept across exec."""
    return _prctl(PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> bool:
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    return prctl is not None and prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def find_descendants(root: int | None = None) -> set[ProcessId]:
    """The processes below `root` (default: this process), without zombies and without `root`."""
    children: dict[int, list[tuple[ProcessId, bool]]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _read_stat(int(path.name)):
            process = ProcessId(int(path.name), int(fields[19]))
            children.setdefault(int(fields[1]), []).append((process, fields[0] in "ZX"))
    descendants: set[ProcessId] = set()
    pending = [os.getpid() if root is None else root]
    while pending:
        for process, has_ended in children.get(pending.pop(), []):
            pending.append(process.pid)
            if not has_ended:
                descendants.add(process)
    return descendants


def find_stopped(programs: Collection[str]) -> list[ProcessId]:
    """Descendants of this process that run one of the programs and are stopped (SIGSTOP)."""
    return [
        process
        for process in find_descendants()
        if read_name(process.pid) in programs and is_stopped(process.pid)
    ]


def kill_processes(
    find: Callable[[], Collection[ProcessId]], *, timeout_s: float
) -> list[ProcessId]:
    """Kill what `find` returns until it returns nothing; returns those left after the timeout.
    Repeated, because a process may fork while its siblings are killed."""
    deadline = time.monotonic() + timeout_s
    while processes := find():
        for process in processes:
            send_kill(process)
        if time.monotonic() > deadline:
            return sorted(processes)
        time.sleep(POLL_INTERVAL_S)
    return []


def send_kill(process: ProcessId) -> None:
    if is_running(process):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)


def reap_orphans(keep: int = 0) -> None:
    """Collect the exit codes of ended children, except that of `keep`."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == keep:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def is_running(process: ProcessId) -> bool:
    return 0 < process.started == process_start(process.pid)


def process_exists(pid: int) -> bool:
    """Whether a process has this pid; works without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # The process of another user, or no possible pid.
        pass
    return True


def process_start(pid: int) -> int:
    """Start time of a process in kernel ticks; 0 if it ended, is a zombie, or not on Linux."""
    fields = _read_stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process (SIGSTOP). A debugger that holds it does not
    count."""
    return _read_stat(pid)[:1] == ["T"]


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (state, parent, …); empty if it is gone."""
    # The name (in brackets) may contain any character.
    return _read(pid, "stat").rpartition(")")[2].split()


def read_name(pid: int) -> str:
    """The name of its program, at most 15 characters; empty if it is gone."""
    return _read(pid, "comm").rstrip("\n")


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text("utf-8", errors="replace")
    return ""


def count_memory_kills() -> int:
    """Processes of this machine that the kernel has killed for lack of memory; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in VMSTAT.read_text("ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def describe_signal(number: int, *, memory_kills_before: int) -> str:
    """How a signal ended a process. `memory_kills_before`: the count when it started."""
    try:
        text = f"killed by {signal.Signals(number).name}"
    except ValueError:  # A real-time signal has no name.
        text = f"killed by signal {number}"
    if number == signal.SIGKILL and count_memory_kills() > memory_kills_before:
        text += ", probably out of memory: the kernel has killed processes for that meanwhile"
    return text
