"""Releases the OpenMP threads of a thread that computed in parallel on the CPU.

Every thread that computes in parallel has its own OpenMP threads. If a process has more of them
than cores (a learner's and an engine's), they sleep instead of spinning, and each small kernel must
wake them (measured: 2,400 wake-ups in 600 matmuls of 64 rows, not 20). So a thread that will not
compute for a while releases its OpenMP threads; OpenMP creates new ones for its next computation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SOFT = 1
"""OpenMP's omp_pause_soft: end the threads, keep all settings."""


def release_openmp_threads() -> bool:
    """End the OpenMP threads of the calling thread; False if the library has no function for it."""
    pause = _find_pause()
    return pause is not None and pause(_SOFT) == 0


@cache
def _find_pause() -> Callable[[int], int] | None:
    """omp_pause_resource_all of the OpenMP library that torch has loaded."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text().splitlines() if maps.is_file() else []
    # A line has six columns, and the last one, the path, may contain spaces.
    for path in sorted({line.split(maxsplit=5)[5] for line in loaded if "libgomp" in line}):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            return pause
    return None
