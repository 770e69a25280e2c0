"""What this machine can do with bfloat16, found by trying it where a crash does no harm.

On some CPUs a bfloat16 product ends the process with an illegal instruction, because the kernel
library picks instructions that the machine announces and does not run. No `except` catches
that, so the trial runs in a child process. Its result is kept in the cache folder until the
machine is booted again. Nothing here imports torch.

    probe_bf16() --child process--> True | False --> safe_environment() --> the worker's settings
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LIMITED_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""Keeps oneDNN off the matrix tile units (AMX), with the fastest kernels below them."""

PROBE_TIMEOUT_S = 120.0

_TRIAL = """
import torch
a = torch.ones(64, 64, dtype=torch.bfloat16)
layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
layer(a).sum().backward()
assert (a @ a)[0, 0].item() == 64.0
"""

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where rollick keeps what it can make again: $ROLLICK_CACHE or ~/.cache/rollick."""
    named = os.environ.get("ROLLICK_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "rollick"


def probe_bf16(*, trial: str = _TRIAL) -> bool:
    """Whether a child process survives a bfloat16 product; asked once per boot."""
    known = known_bf16()
    if known is not None:
        return known
    works = _survives(trial, {})
    _write_whole(_kept(), "works" if works else "crashes")
    return works


def known_bf16() -> bool | None:
    """What a probe found since the last boot; None if there was none."""
    kept = _kept()
    return kept.read_text() == "works" if kept.is_file() else None


def _kept() -> Path:
    return cache_folder() / f"bf16-{_boot_id()}.txt"


def safe_environment() -> dict[str, str]:
    """Environment under which bfloat16 works in a CPU process; empty where it works anyway.

    Give it to the process before its first bfloat16 product: the library reads it once.
    """
    if all(name in os.environ for name in LIMITED_ISA) or probe_bf16():
        return {}
    _log.warning(
        "bfloat16 products crash on this CPU; its workers run with %s (slower than its tile units)",
        " ".join(f"{name}={value}" for name, value in LIMITED_ISA.items()),
    )
    return dict(LIMITED_ISA)


def _survives(trial: str, environment: Mapping[str, str]) -> bool:
    try:
        child = subprocess.run(
            [sys.executable, "-c", trial],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return child.returncode == 0


def _boot_id() -> str:
    """Changes when the machine is booted, so that a moved or updated machine is asked again."""
    source = Path("/proc/sys/kernel/random/boot_id")
    return source.read_text().strip() if source.is_file() else "unknown"


def _write_whole(path: Path, text: str) -> None:
    """Write through a temporary file: another process sees the whole text or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)
