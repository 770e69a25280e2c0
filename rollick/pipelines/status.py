"""The status of a running controller: written to its folder every few seconds, for `doctor`.

    RunState, Rollout, Trace --every 2 s--> RUN/waits.json --> `rollick doctor` (commands/doctor.py)
    a stuck run --> RUN/stuck.txt (the stacks of all tasks and threads)

A status file that cannot be written is logged once; it never stops the run.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rollick.checkpoint import MANIFEST, STEP_FOLDER
from rollick.children.process_tree import process_start
from rollick.config.schema import Recipe
from rollick.errors import NoSignalError, RollickError, StuckError
from rollick.observe.diagnosis import (
    REPORT_EVERY_S,
    EngineView,
    RewardView,
    RunEvidence,
    RunSnapshot,
    diagnose,
    write_run_snapshot,
)
from rollick.observe.metrics import read_metrics

if TYPE_CHECKING:
    # `rollick doctor` imports this module and must stay light.
    from rollick.observe.trace import Trace
    from rollick.pipelines.state import RunState
    from rollick.rewards.pool import RewardPool
    from rollick.rollout.scheduler import Rollout
    from rollick.types import EngineLoad

LOG = logging.getLogger("rollick")

STUCK = "stuck.txt"
MAX_TASKS_SHOWN = 200
"""Maximum task stacks to write; thousands of samples wait at the same few lines."""
MAX_ERROR_CHARACTERS = 2000


class StatusReporter:
    """Writes the status of a run. Create it with `open`."""

    def __init__(self, recipe: Recipe, state: RunState, trace: Trace) -> None:
        self._recipe, self._state, self._trace = recipe, state, trace
        self.worker_processes: Callable[[], Mapping[str, int]] = dict[str, int]
        """Process ids of the workers on this machine, by role and rank."""
        self._followed: list[tuple[Rollout, RewardPool]] = []
        self._reported_error: StuckError | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, recipe: Recipe, state: RunState, trace: Trace
    ) -> AsyncGenerator[StatusReporter]:
        """Write the status while the block runs, and the outcome when it ends."""
        reporter = cls(recipe, state, trace)
        task = asyncio.create_task(reporter._report_status(), name="status report")
        outcome, error_text = "finished", ""
        try:
            yield reporter
        except Exception as error:
            outcome, error_text = "failed", str(error) or type(error).__name__
            raise
        except BaseException:
            outcome = "interrupted"
            raise
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                LOG.warning("waits.json could not be updated: %r", task.exception())
            if outcome == "finished" and state.stop.is_set():
                outcome = "interrupted"
            with suppress(OSError):
                write_run_snapshot(state.folder.path, reporter._make_snapshot(outcome, error_text))

    @contextmanager
    def follow(self, rollout: Rollout, rewards: RewardPool) -> Generator[None]:
        self._followed.append((rollout, rewards))
        try:
            with self.report_stuck():
                yield
        finally:
            self._followed.remove((rollout, rewards))

    @contextmanager
    def report_stuck(self) -> Generator[None]:
        """Report a StuckError where it is raised, while the stuck tasks still exist."""
        try:
            yield
        except StuckError as error:
            if error is not self._reported_error and not isinstance(error, NoSignalError):
                self._reported_error = error
                self._write_stacks(error)
            raise

    async def _report_status(self) -> None:
        """Write the status every REPORT_EVERY_S, until cancelled or until a write fails."""
        while True:
            write_run_snapshot(self._state.folder.path, self._make_snapshot())
            await asyncio.sleep(REPORT_EVERY_S)

    def _make_snapshot(self, outcome: str = "", error: str = "") -> RunSnapshot:
        now, loop_now = time.time(), asyncio.get_running_loop().time()
        rollout, rewards = self._followed[-1] if self._followed and not outcome else (None, None)
        recipe, state, trace = self._recipe, self._state, self._trace
        return RunSnapshot(
            name=recipe.run.name,
            pipeline=recipe.pipeline,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            written_at=now,
            began_at=state.started_at,
            step=state.step,
            steps=recipe.run.steps,
            version=state.version,
            phase=state.phase,
            phase_since=state.phase_since,
            stuck_after_s=recipe.run.stuck_after_s,
            # Samples need not progress between two phases of a step.
            quiet_s=min(loop_now - rollout.last_progress(), now - state.phase_since)
            if rollout
            else 0.0,
            waits_for=rollout.describe_waits() if rollout else "",
            queued=len(rollout.fleet.queue) if rollout else 0,
            engines=_view_engines(rollout, trace.last_generation_end, loop_now) if rollout else (),
            rewards=_view_rewards(rewards) if rewards else None,
            processes={} if outcome else self.worker_processes(),
            outcome=outcome,
            error=error[:MAX_ERROR_CHARACTERS],
        )

    def _write_stacks(self, error: RollickError) -> None:
        """Log the diagnosis, and write where every task and thread waits."""
        snapshot = self._make_snapshot()
        folder = self._state.folder.path
        diagnosis = diagnose(snapshot, inspect_folder(folder, alive=True), now=snapshot.written_at)
        path = folder / STUCK
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
        except OSError as write_error:
            LOG.warning("cannot write the stacks: %s", write_error)


def _view_engines(
    rollout: Rollout, last_generation_end: dict[int, float], now: float
) -> tuple[EngineView, ...]:
    def view(number: int, load: EngineLoad) -> EngineView:
        limit, last_end = rollout.fleet.router.limit(number), last_generation_end.get(number)
        return EngineView(
            engine=number,
            in_flight=rollout.fleet.router.in_flight(number),
            limit=int(limit) if isfinite(limit) else None,
            running=load.running,
            waiting=load.waiting,
            kv_share=load.kv_tokens / load.kv_capacity if load.kv_capacity else None,
            version=load.version,
            last_answer_s=None if last_end is None else now - last_end,
        )

    return tuple(view(number, engine.load()) for number, engine in rollout.fleet.engines.items())


def _view_rewards(rewards: RewardPool) -> RewardView:
    stats = rewards.stats
    counts = (stats.calls, stats.failures, stats.timeouts, stats.restarts)
    return RewardView(rewards.samples_in_flight, *counts)


def _write_tasks(file: TextIO) -> None:
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    file.write(f"\n{len(tasks)} tasks, innermost call last\n")
    for task in tasks[:MAX_TASKS_SHOWN]:
        file.write(f"{task.get_name()}\n")
        file.writelines(f"  {line}\n" for line in _list_awaits(task))
    if len(tasks) > MAX_TASKS_SHOWN:
        file.write(f"and {len(tasks) - MAX_TASKS_SHOWN} more\n")


def _list_awaits(task: asyncio.Task[Any]) -> list[str]:
    """The chain of awaits of a task. Task.get_stack returns only the first frame."""
    calls: list[str] = []
    target: Any = task.get_coro()
    while target is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(target, f"{kind}_frame")), None)
        if kind is None:
            return [*calls, repr(target)[:200]]
        if (frame := getattr(target, f"{kind}_frame")) is not None:
            code = frame.f_code
            calls.append(f"{code.co_filename}:{frame.f_lineno} {code.co_qualname}")
        target = getattr(target, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return calls


def inspect_folder(run: Path, *, alive: bool | None) -> RunEvidence:
    """Read the status of a run from its files; `alive`: whether its process runs."""
    checkpoint, saved_at = _find_newest_checkpoint(run)
    metrics: list[dict[str, float]] = []
    with suppress(OSError):
        metrics = read_metrics(run / "metrics.jsonl")
    step = int(metrics[-1]["step"]) if metrics else None
    stuck = run / STUCK if (run / STUCK).is_file() else None
    return RunEvidence(run, alive, checkpoint, saved_at, step, stuck)


def _find_newest_checkpoint(run: Path) -> tuple[int | None, float]:
    """Step and time of the newest checkpoint, by name. Verifying its files would be slow."""
    newest, saved_at = None, 0.0
    with suppress(OSError):
        for path in (run / "checkpoints").iterdir():
            match = STEP_FOLDER.match(path.name)
            manifest = path / MANIFEST
            if match and manifest.is_file() and int(match[1]) >= (newest or 0):
                newest, saved_at = int(match[1]), manifest.stat().st_mtime
    return newest, saved_at
