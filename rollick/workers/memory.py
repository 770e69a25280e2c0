"""How much memory this process has taken since a role of it began to be built.

On a GPU: the peak of what torch allocated. On the CPU: how far the process's resident memory has
grown at its peak, which counts everything that it holds, libraries imported later among it.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


class Meter:
    """Begins to count when it is made."""

    def __init__(self) -> None:
        with suppress(OSError):
            # Linux: the peak of the resident memory is that of now. Elsewhere an old peak may hide
            # a lower new one.
            Path("/proc/self/clear_refs").write_text("5", "ascii")
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        self.begun = resident_bytes()

    def peak(self) -> int:
        """Bytes at the most since it was made."""
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        return max(0, resident_bytes(peak=True) - self.begun)


def resident_bytes(*, peak: bool = False) -> int:
    """Of this process, now or at its peak."""
    name = "VmHWM:" if peak else "VmRSS:"
    with suppress(OSError):
        for line in STATUS.read_text("ascii").splitlines():
            if line.startswith(name):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
