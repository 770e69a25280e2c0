"""A program that kills child processes when the process that started them dies.

    parent --"+PGID" / "-PGID" lines--> watchdog      end of input: kill every group still listed,
                                                      and every process with the pool's marker

A child cannot always exit by itself: user code can hang with the GIL held (a regular expression
that backtracks) and can start processes, also in other groups and sessions. These inherit a marker
in their environment. The kernel closes the watchdog's input when the parent dies. Started by path;
uses only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

VARIABLE = "ROLLICK_CHILD"
"""Environment variable of children and their descendants."""
KILL_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05


def kill_marked(marker: str) -> None:
    """Kill the processes whose variable begins with `marker`, until there is none or for
    KILL_TIMEOUT_S. Finds nothing where /proc does not exist."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while pids := _find_marked(marker):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_INTERVAL_S)


def _find_marked(marker: str) -> list[int]:
    entry, pids = b"\0" + f"{VARIABLE}={marker}".encode(), list[int]()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and entry in b"\0" + _read(f"/proc/{name}/environ"):
                    pids.append(int(name))
    return pids


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main(lines: Iterable[str], marker: str) -> None:
    groups: set[int] = set()
    for line in lines:
        sign, group = line[0], int(line[1:])
        if sign == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    kill_marked(marker)


if __name__ == "__main__":
    main(sys.stdin, sys.argv[1])
