"""Tests in a child process, which may crash, whether bfloat16 works on this CPU.

On some CPUs a bfloat16 matmul ends the process with an illegal instruction, because the kernel
library uses instructions that the CPU reports but does not support. No `except` catches that. The
result is cached until the next boot. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMITED_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""The fastest oneDNN kernels that do not use the matrix tile units (AMX)."""

PROBE_TIMEOUT_S = 120.0

_TRIAL = """
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16)
layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
layer(a).sum().backward()
assert (a @ a)[0, 0].item() == 64.0
"""

_log = logging.getLogger("rollick")


def cache_folder() -> Path:
    """The folder for files that can be rebuilt: $ROLLICK_CACHE or ~/.cache/rollick."""
    configured = os.environ.get("ROLLICK_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "rollick"


def probe_bf16(*, trial: str = _TRIAL) -> bool:
    """Whether a child process survives a bfloat16 matmul; tested once per boot."""
    cached = known_bf16()
    if cached is not None:
        return cached
    works = _survives(trial)
    _write_atomically(_result_file(), "works" if works else "crashes")
    return works


def known_bf16() -> bool | None:
    """The result of a probe since the last boot; None if there was none."""
    file = _result_file()
    return file.read_text() == "works" if file.is_file() else None


def _result_file() -> Path:
    """A new file after each boot, so that a moved or updated machine is tested again."""
    source = Path("/proc/sys/kernel/random/boot_id")
    boot = source.read_text().strip() if source.is_file() else "unknown"
    return cache_folder() / f"bf16-{boot}.txt"


def safe_environment() -> dict[str, str]:
    """Environment variables that make bfloat16 work in a CPU process; empty if none are needed. Set
    them before the first bfloat16 matmul: the library reads them once."""
    if all(name in os.environ for name in LIMITED_ISA) or probe_bf16():
        return {}
    _log.warning(
        "bfloat16 products crash on this CPU; its workers run with %s (slower than its tile units)",
        " ".join(f"{name}={value}" for name, value in LIMITED_ISA.items()),
    )
    return dict(LIMITED_ISA)


def _survives(trial: str) -> bool:
    quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        child = subprocess.run([sys.executable, "-c", trial], timeout=PROBE_TIMEOUT_S, **quiet)
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0


def _write_atomically(path: Path, text: str) -> None:
    """Write through a temporary file: another process reads the complete text or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
