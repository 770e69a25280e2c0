"""Detects whether a process was killed because memory ran out.

The kernel does not report the reason of a kill, but counts such kills in /proc/vmstat.
"""

from __future__ import annotations

import signal
from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def count_memory_kills() -> int:
    """Processes of this machine that the kernel has killed for lack of memory; 0 if unknown."""
    try:
        for line in VMSTAT.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def describe_signal(number: int, *, memory_kills_before: int) -> str:
    """How a signal ended a process that was started when the count was `memory_kills_before`."""
    try:
        text = f"killed by {signal.Signals(number).name}"
    except ValueError:  # A real-time signal has no name.
        text = f"killed by signal {number}"
    if number == signal.SIGKILL and count_memory_kills() > memory_kills_before:
        text += ", probably out of memory: the kernel has killed processes for that meanwhile"
    return text
