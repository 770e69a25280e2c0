"""The helper threads of a thread that computed in parallel on the CPU, given back.

Every thread that computes in parallel has helpers of its own, for as long as it lives. Once a
process has more of them than cores (a learner's and an engine's), none waits for work awake any
more, and each small kernel first wakes a sleeping one: counted, 2,400 times in 600 products of 64
rows instead of 20. A thread that has computed and will not for a while gives its helpers back; new
ones are made when it computes again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SOFT = 1
"""OpenMP's omp_pause_soft: end the helpers, keep all settings."""


def release_helpers() -> bool:
    """End the helpers of the calling thread; False where the OpenMP library has no way to."""
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0


@cache
def _pause() -> Callable[[int], int] | None:
    """The function of the OpenMP library that torch has loaded into this process."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().splitlines() if maps.is_file() else []
    for path in sorted({line.split()[-1] for line in loaded if "libgomp" in line}):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            return pause
    return None
