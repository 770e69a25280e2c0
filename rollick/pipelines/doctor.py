"""The run's doctor: the controller tells how it is, and anybody can ask, also after its death.

    Session --every 2 s--> RUN/waits.json --+--> examine(RUN) -> Diagnosis (observe/doctor.py)
    a hang -> RUN/stuck.txt (all stacks)    |
    run.lock, checkpoints, metrics.jsonl ---+

Owns the looking: at a session while it runs, at a folder from outside. Nothing of it can stop a
run: what cannot be written is told once and left.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.metadata
import logging
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rollick.checkpoint import MANIFEST, STEP_FOLDER
from rollick.errors import ConfigError, RollickError
from rollick.models.probe import known_bf16, probe_bf16
from rollick.observe.doctor import (
    REPORT_EVERY_S,
    Diagnosis,
    EngineView,
    Finding,
    RewardView,
    Situation,
    diagnose,
    read_situation,
    write_situation,
)
from rollick.observe.metrics import read_metrics
from rollick.rollout.waits import generating
from rollick.sandbox.layers import find_layers

if TYPE_CHECKING:
    from rollick.pipelines.base import Session
    from rollick.rollout.scheduler import Rollout

LOG = logging.getLogger("rollick")

STUCK = "stuck.txt"
SHOWN_TASKS = 200
"""Tasks whose stacks are written; thousands of samples wait in the same few places."""
ERROR_CHARACTERS = 2000
GPU_TIMEOUT_S = 5.0


@asynccontextmanager
async def reporting(session: Session) -> AsyncGenerator[None]:
    """While the block runs, the session's folder says who waits for whom; after it, how it ended.

    Owns one task, which ends with the block.
    """
    report = asyncio.create_task(_report(session), name="report of waits")
    outcome, error_text = "finished", ""
    try:
        yield
    except Exception as error:
        outcome, error_text = "failed", str(error) or type(error).__name__
        raise
    except BaseException:
        outcome = "interrupted"
        raise
    finally:
        report.cancel()
        await asyncio.wait({report})
        if not report.cancelled():
            LOG.warning("waits.json was not kept up to date: %r", report.exception())
        if outcome == "finished" and session.stop.is_set():
            outcome = "interrupted"
        with suppress(OSError):
            write_situation(session.folder.path, _describe(session, outcome, error_text))


async def _report(session: Session) -> None:
    """Writes at most once in REPORT_EVERY_S; ends by being cancelled, or if it cannot write."""
    while True:
        write_situation(session.folder.path, _describe(session))
        await asyncio.sleep(REPORT_EVERY_S)


def _describe(session: Session, outcome: str = "", error: str = "") -> Situation:
    now, loop_now = time.time(), asyncio.get_running_loop().time()
    rollout = session.rollouts[-1] if session.rollouts and not outcome else None
    recipe, trace = session.recipe, session.trace
    return Situation(
        name=recipe.run.name,
        pipeline=recipe.pipeline,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()),
        written_at=now,
        began_at=session.began_at,
        step=session.step,
        steps=recipe.run.steps,
        version=session.version,
        phase=session.phase_name,
        phase_since=session.phase_since,
        stuck_after_s=recipe.run.stuck_after_s,
        # Between two phases of a step no sample need move.
        quiet_s=min(loop_now - trace.moved, now - session.phase_since) if rollout else 0.0,
        waits_for=rollout.waits() if rollout else "",
        queued=rollout.fleet.waiting if rollout else 0,
        engines=_engines(rollout, trace.ended, loop_now) if rollout else (),
        rewards=_rewards(session) if rollout else None,
        outcome=outcome,
        error=error[:ERROR_CHARACTERS],
    )


def _engines(rollout: Rollout, ended: dict[str, float], now: float) -> tuple[EngineView, ...]:
    views: list[EngineView] = []
    for number, engine in rollout.fleet.engines.items():
        load, limit = engine.load(), rollout.fleet.limit(number)
        answered = ended.get(generating(number))
        views.append(
            EngineView(
                engine=number,
                in_flight=rollout.fleet.in_flight(number),
                limit=int(limit) if isfinite(limit) else None,
                running=load.running,
                waiting=load.waiting,
                kv_share=load.kv_tokens / load.kv_capacity if load.kv_capacity else None,
                version=load.version,
                last_answer_s=None if answered is None else now - answered,
            )
        )
    return tuple(views)


def _rewards(session: Session) -> RewardView:
    stats = session.rewards.stats
    return RewardView(
        under_way=session.rewards.under_way,
        calls=stats.calls,
        failures=stats.failures,
        timeouts=stats.timeouts,
        restarts=stats.restarts,
    )


def tell_stuck(session: Session, error: RollickError) -> None:
    """A run hangs: log what the doctor would say, and write where every task and thread is."""
    situation = _describe(session)
    found = _look(session.folder.path, alive=True)
    diagnosis = diagnose(situation, found, now=situation.written_at)
    path = session.folder.path / STUCK
    LOG.error("%s", "\n".join([*diagnosis.lines(), f"stacks: {path}"]))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error}\n")
            file.writelines(f"{line}\n" for line in diagnosis.lines())
            _write_tasks(file)
            file.write("\nthreads\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
    except OSError as problem:
        LOG.warning("the stacks cannot be written: %s", problem)


def _write_tasks(file: TextIO) -> None:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    file.write(f"\n{len(tasks)} tasks, innermost call last\n")
    for task in tasks[:SHOWN_TASKS]:
        file.write(f"{task.get_name()}\n")
        file.writelines(f"  {line}\n" for line in _calls_of(task))
    if len(tasks) > SHOWN_TASKS:
        file.write(f"and {len(tasks) - SHOWN_TASKS} more\n")


def _calls_of(task: asyncio.Task[Any]) -> list[str]:
    """Where a task waits: the chain of awaits, of which Task.get_stack gives the first only."""
    calls: list[str] = []
    waits: Any = task.get_coro()
    while waits is not None:
        kinds = [kind for kind in ("cr", "gi", "ag") if hasattr(waits, f"{kind}_frame")]
        if not kinds:
            calls.append(repr(waits)[:200])
            break
        frame = getattr(waits, f"{kinds[0]}_frame")
        if frame is not None:
            code = frame.f_code
            calls.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        inner = "gi_yieldfrom" if kinds[0] == "gi" else f"{kinds[0]}_await"
        waits = getattr(waits, inner)
    return calls


def examine(run: Path) -> Diagnosis:
    """What is the matter with a run, from its folder; the run itself is not touched."""
    if not (run / "recipe.yaml").is_file():
        raise ConfigError(
            f"{run} is not a run's folder", fix="give a folder with recipe.yaml, such as runs/NAME"
        )
    situation = read_situation(run)
    found = _look(run, alive=_is_alive(run, situation))
    return diagnose(situation, found, now=time.time(), environment=environment_facts())


def _look(run: Path, *, alive: bool | None) -> Finding:
    step, at = _newest_checkpoint(run)
    logged: list[dict[str, float]] = []
    with suppress(OSError):
        logged = read_metrics(run / "metrics.jsonl")
    stuck = run / STUCK
    return Finding(
        folder=run,
        alive=alive,
        checkpoint=step,
        checkpoint_at=at,
        step=int(logged[-1]["step"]) if logged else None,
        stuck=stuck if stuck.is_file() else None,
    )


def _newest_checkpoint(run: Path) -> tuple[int | None, float]:
    """Step and time of the newest one, as its name says: hashing it all would take too long."""
    newest, at = None, 0.0
    with suppress(OSError):
        for path in (run / "checkpoints").iterdir():
            match = STEP_FOLDER.match(path.name)
            manifest = path / MANIFEST
            if match and manifest.is_file() and int(match[1]) >= (newest or 0):
                newest, at = int(match[1]), manifest.stat().st_mtime
    return newest, at


def _is_alive(run: Path, situation: Situation | None) -> bool | None:
    """Whether the run's process lives; None where it is another machine's."""
    pid, host, start = _holder(run)
    if situation is not None and (pid is None or not situation.outcome):
        pid, host, start = situation.pid, situation.host, situation.process_start
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
    # A zombie has ended; a number that was given again has another start.
    began = _process_start(pid)
    return bool(began) and start in (0, began) if Path("/proc/self/stat").exists() else True


def _holder(run: Path) -> tuple[int | None, str, int]:
    """Who holds the run's lock, as its file says: a run that ends leaves it empty."""
    with suppress(OSError, ValueError):
        words = (run / "run.lock").read_text("utf-8").split()
        if len(words) == 4:
            return int(words[1]), words[3], 0
    return None, "", 0


def _process_start(pid: int) -> int:
    """The start of a process in the kernel's ticks; 0 if it is gone, a zombie, or not Linux."""
    with suppress(OSError, ValueError, IndexError):
        # The name (in brackets) may hold anything; the fields after it are numbers, state first.
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2]
        state, *numbers = text.split()
        return 0 if state in "ZX" else int(numbers[18])
    return 0


def environment_facts(*, probe: bool = False) -> dict[str, str]:
    """What can be told of this machine without importing anything heavy.

    `probe` tries bfloat16 in a child process (seconds) where no former result is kept, and starts
    a box of the sandbox to see which layers hold.
    """
    facts = {"python": platform.python_version()}
    for package in ("rollick", "torch", "ray", "transformers"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    facts["cpus"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0)
    facts["gpus"] = _gpus()
    works = probe_bf16() if probe else known_bf16()
    words = {None: "not tried since the last boot", True: "works", False: "crashes: worked around"}
    facts["bfloat16 on the CPU"] = words[works]
    if probe:
        facts["sandbox"] = asyncio.run(find_layers()).text
    return facts


def _gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none found (no nvidia-smi)"
    try:
        listed = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi does not answer"
    return "; ".join(line.split(" (UUID")[0] for line in listed.stdout.splitlines()) or "none"
