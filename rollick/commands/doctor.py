"""Back end of `rollick doctor`: diagnoses a run from its folder, or reports facts about a machine.

Reads waits.json, run.lock, checkpoints, metrics, goodput and faults of a run, which may have died.
Changes nothing. The controller of the run writes these files (pipelines/status.py).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rollick.children.process_tree import process_start
from rollick.errors import ConfigError
from rollick.models.bf16_probe import known_bf16, probe_bf16
from rollick.observe.diagnosis import Diagnosis, RunSnapshot, diagnose, read_run_snapshot
from rollick.observe.goodput_report import Reliability
from rollick.observe.learning_advice import find_advice
from rollick.observe.metrics import read_metrics
from rollick.pipelines.status import inspect_folder
from rollick.sandbox.layers import probe_layers

GPU_TIMEOUT_S = 5.0


def diagnose_folder(run: Path) -> Diagnosis:
    if not (run / "recipe.yaml").is_file():
        fix = "give a folder with recipe.yaml, such as runs/NAME"
        raise ConfigError(f"{run} is not a run's folder", fix=fix)
    snapshot = read_run_snapshot(run)
    evidence = inspect_folder(run, alive=_is_alive(run, snapshot))
    diagnosis = diagnose(snapshot, evidence, now=time.time())
    return replace(
        diagnosis,
        environment=environment_facts(),
        learning=_read_advice(run),
        reliability=Reliability.read(run).lines(),
    )


def _read_advice(run: Path) -> dict[str, str]:
    with suppress(OSError):
        return find_advice(read_metrics(run / "metrics.jsonl"))
    return {}


def _is_alive(run: Path, snapshot: RunSnapshot | None) -> bool | None:
    """Whether the run's process is alive; None if it runs on another machine."""
    pid, host, start = None, "", 0
    with suppress(OSError, ValueError):
        # The lock names its holder: process PID on HOST. A run that ends empties the file.
        _, pid_text, _, host = (run / "run.lock").read_text("utf-8").split()
        pid = int(pid_text)
    if snapshot is not None and (pid is None or not snapshot.outcome):
        pid, host, start = snapshot.pid, snapshot.host, snapshot.process_start
    if pid is None:
        return False
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # A zombie has ended; a reused process id has another start.
    actual = process_start(pid)
    return bool(actual) and start in (0, actual) if Path("/proc/self/stat").exists() else True


def environment_facts(*, probe: bool = False) -> dict[str, str]:
    """Facts about this machine, without importing heavy packages.

    `probe` tests bfloat16 in a child process (seconds) if no earlier result is stored, and starts a
    sandbox to see which of its layers work.
    """
    facts = {"python": platform.python_version()}
    for package in ("rollick", "torch", "ray", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["cpus"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    facts["gpus"] = _describe_gpus()
    works = probe_bf16() if probe else known_bf16()
    states = {None: "not tested since boot", True: "works", False: "crashes: worked around"}
    facts["bfloat16 on the CPU"] = states[works]
    if probe:
        facts["sandbox"] = asyncio.run(probe_layers()).text
    return facts


def _describe_gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none found (no nvidia-smi)"
    try:
        process = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi does not answer"
    return "; ".join(line.split(" (UUID")[0] for line in process.stdout.splitlines()) or "none"
