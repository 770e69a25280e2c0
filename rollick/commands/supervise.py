"""Back end of `rollick train --restarts N`: the run is a child process, restarted after a crash.

    supervisor (no torch, no Ray) ──starts──> rollick train ──starts──> Ray, rewards, environments
       exit 0, 2 or 75                 the supervisor exits with the same code
       a signal, any other exit code   every process of the run is killed; then it is started again
                                       with --resume, after a delay, while the budget lasts
       stopped (SIGSTOP)               it is killed, and restarted like any other

With a standby (standby.py) the run resumes in a process that is already prepared.

SIGINT and SIGTERM are passed on to the run, which saves and exits with 75. It is then not
restarted. If the supervisor itself dies, the run gets SIGTERM.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rollick.checkpoint import CheckpointStore
from rollick.children.process_tree import (
    ProcessId,
    adopt_orphans,
    count_memory_kills,
    describe_signal,
    find_descendants,
    is_stopped,
    kill_processes,
    reap_orphans,
)
from rollick.commands.standby import Standby, start_run
from rollick.config.load import load_recipe
from rollick.errors import EXIT_INTERRUPTED, EXIT_MISTAKE, WorkerLost
from rollick.observe.faults import Fault, FaultLog, LostTime, read_faults
from rollick.observe.goodput import Goodput, read_goodput
from rollick.run_folder import RunFolder, refuse_existing_run

LOG = logging.getLogger("rollick")

FINAL_CODES = (0, EXIT_MISTAKE, EXIT_INTERRUPTED)
"""Exit codes after which the run is not restarted."""
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
KILL_TIMEOUT_S = 60.0
"""How long killed processes may take to end; a GPU driver can hold one for a while."""
POLL_S = 1.0
"""Seconds between checks whether the run is stopped, or a restarted one has made a step."""
STOPPED_S = 1.0
"""A run that has been stopped (SIGSTOP) for this long is killed."""
SHARED_MEMORY = Path("/dev/shm")
SHOW_CURSOR = "\x1b[?25h"
TAIL_BYTES = 1 << 16


@dataclass(slots=True)
class RestartBudget:
    """Allows `limit` restarts in a row without a new checkpoint; a new one refills it."""

    limit: int
    used: int = 0
    last_step: int | None = None
    """Step of the newest checkpoint at the last crash."""

    def take(self, step: int | None) -> float | None:
        """Seconds to wait before the next restart; None if the budget is spent. The first restart
        after a new checkpoint is immediate."""
        if step is not None and (self.last_step is None or step > self.last_step):
            self.used = 0
        self.last_step = step
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.used - 2)) if self.used > 1 else 0.0


@dataclass(slots=True)
class Signals:
    """Catches SIGINT, SIGTERM and SIGCHLD, so that one call waits for all of them."""

    pipe: int
    """Readable after a signal."""
    on_stop: Callable[[int], None] = lambda number: None
    stop_requested: bool = False

    @classmethod
    @contextmanager
    def catch(cls) -> Generator[Signals]:
        with ExitStack() as stack:
            reader, writer = os.pipe()
            for end in (reader, writer):
                os.set_blocking(end, False)
                stack.callback(os.close, end)
            signals = cls(reader)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                stack.callback(signal.signal, number, signal.signal(number, signals._handle))
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writer))
            yield signals

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.stop_requested = True
            self.on_stop(number)

    def wait(self, timeout_s: float | None) -> None:
        """Return when a signal arrives or the time is up."""
        if select.select([self.pipe], [], [], timeout_s)[0]:
            os.read(self.pipe, 4096)

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Whether a stop was requested within the time."""
        deadline = time.monotonic() + timeout_s
        while not self.stop_requested and (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
        return self.stop_requested


class RunSupervisor:
    """Runs `command(resume)` until it needs no restart. Nothing else may start children of this
    process meanwhile: those that did not exist when `run` was called are killed."""

    def __init__(
        self,
        command: Callable[[bool], Sequence[str]],
        folder: Path,
        *,
        restarts: int,
        standby: Standby | None = None,
    ) -> None:
        self._command = command
        self._standby = standby
        self._folder = folder
        self._budget = RestartBudget(restarts)
        self._faults = FaultLog(folder, step=lambda: last_logged_step(folder) or 0)
        self._fault: Fault | None = None
        """The last crash, until the restarted run has made a step."""
        self._time_before = Goodput()
        """The run's time before the last crash."""
        self._resumed_from = 0
        """Step of the checkpoint that the run was started from."""
        self._memory_kills_before = 0
        self._stopped_since: float | None = None
        self._was_stopped = False
        """Whether the last run was killed because it was stopped."""
        self._failed_at = 0.0
        """When the last run ended or was stopped, in seconds since the epoch."""
        self._children_before: set[ProcessId] = set()
        """Children that this process had when `run` was called."""

    def run(self, *, resume: bool) -> int:
        """Returns the exit code for the supervisor."""
        adopt_orphans()
        self._children_before = find_descendants()
        try:
            with Signals.catch() as signals:
                return self._run_until_final(signals, resume=resume)
        finally:
            if self._standby is not None:
                self._standby.discard()
                self._end_processes()

    def _run_until_final(self, signals: Signals, *, resume: bool) -> int:
        while True:
            code = self._run_once(resume, signals)
            self._end_processes()
            if signals.stop_requested:
                return code if code >= 0 else EXIT_INTERRUPTED
            if code in FINAL_CODES:
                return code
            delay_s = self._plan_restart(code)
            if delay_s is None:
                return code if code > 0 else 128 - code
            if signals.wait_for_stop(delay_s):
                return EXIT_INTERRUPTED
            resume = (self._folder / "recipe.yaml").exists()

    def _run_once(self, resume: bool, signals: Signals) -> int:
        """Start the run and wait for its end. Returns its exit code; -N if signal N killed it."""
        self._memory_kills_before = count_memory_kills()
        self._stopped_since, self._was_stopped = None, False
        self._resumed_from = (self._checkpoint_step() or 0) if resume else 0
        process = self._standby.take() if self._standby and resume else None
        process = process or start_run(self._command(resume))
        signals.on_stop = process.send_signal
        if signals.stop_requested:  # It arrived before the process was started.
            process.send_signal(signal.SIGTERM)
        started_at = time.time()
        if self._fault:
            self._fault.mark_restarted()
        while process.poll() is None:
            signals.wait(POLL_S)
            reap_orphans(process.pid)
            if self._check_progress(started_at) and self._standby:
                self._standby.start()
            self._kill_if_stopped(process)
        if not self._was_stopped:
            self._failed_at = time.time()
        signals.on_stop = lambda number: None
        self._check_progress(started_at)
        if self._fault:
            cause = self._describe_exit(process.returncode)
            reason = f"the restarted run ended before a step: {cause}"
            self._fault.give_up(reason, lost=self._time_lost_by(self._fault))
            self._fault = None
        return process.returncode

    def _time_lost_by(self, crash: Fault) -> LostTime:
        """The time lost since the crash, without that of other faults."""
        before, now = self._time_before, read_goodput(self._folder)
        recover_s = now.seconds["recover"] - before.seconds["recover"]
        redo_s = now.seconds["redo"] - before.seconds["redo"]
        counted_from = before.last_row.at if before.last_row else 0.0
        counted_to = now.last_row.at if now.last_row else 0.0
        for fault in read_faults(self._folder):
            repaired_at = fault.rejoined_at or 0.0
            if fault.role == "controller" or not counted_from < repaired_at <= counted_to:
                continue
            if repaired_at > crash.failed_at:
                recover_s, redo_s = recover_s - fault.recover_s, redo_s - fault.redo_s
            else:  # The restarted run counted all time since the last row as redo.
                redo_s -= min(fault.recover_s + fault.redo_s, repaired_at - counted_from)
        return LostTime(max(0.0, recover_s), max(0.0, redo_s))

    def _checkpoint_step(self) -> int | None:
        store = CheckpointStore(self._folder / "checkpoints", keep_last=1, keep_best=0)
        return store.newest_step()

    def _kill_if_stopped(self, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        if not is_stopped(process.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now - self._stopped_since >= STOPPED_S:
            self._was_stopped = True
            self._failed_at = time.time() - (now - self._stopped_since)
            process.kill()

    def _check_progress(self, started_at: float) -> bool:
        """Whether the process has logged a step of its own. Then the last crash is repaired."""
        metrics = self._folder / "metrics.jsonl"
        if not metrics.exists() or metrics.stat().st_mtime < started_at:
            return False
        if (last_logged_step(self._folder) or 0) <= self._resumed_from:
            return False
        if self._fault is not None:
            redone_steps = max(0, self._fault.step - self._resumed_from)
            lost = self._time_lost_by(self._fault)
            self._fault.mark_rejoined(redone_steps=redone_steps, lost=lost)
            self._fault = None
        return True

    def _plan_restart(self, code: int) -> float | None:
        """Record the crash and announce the restart. Returns its delay, or None if the budget is
        spent."""
        step, cause = self._checkpoint_step(), self._describe_exit(code)
        kind = "hung" if self._was_stopped else "killed" if code < 0 else "raised"
        fault = self._faults.begin(
            "controller", 0, kind=kind, cause=cause, failed_at=self._failed_at
        )
        delay_s, budget = self._budget.take(step), self._budget
        start = "the beginning" if step is None else f"the checkpoint of step {step}"
        if delay_s is None:
            reason = f"{budget.limit} restarts in a row made no new checkpoint"
            fault.give_up(reason)
            LOG.error("the run crashed: %s; giving up: %s", cause, reason)
            return None
        self._fault, self._time_before = fault, read_goodput(self._folder)
        when = f"in {delay_s:g} s" if delay_s else "now"
        LOG.warning(
            "the run crashed: %s, after step %d; restart %d of %d %s, from %s",
            *(cause, fault.step, budget.used, budget.limit, when, start),
        )
        return delay_s

    def _describe_exit(self, code: int) -> str:
        if self._was_stopped:
            return "stopped by a signal, so it was killed"
        if code >= 0:
            return f"exit code {code}"
        return describe_signal(-code, memory_kills_before=self._memory_kills_before)

    def _end_processes(self) -> None:
        """Kill the remaining processes of the run: Ray, workers, rewards, environments, sandboxes.
        Free its shared memory."""

        def find_processes() -> set[ProcessId]:
            reap_orphans()
            processes = find_descendants() - self._children_before
            # Read later: a process that the standby has just started is in both.
            return processes - self._standby.processes() if self._standby else processes

        remaining = kill_processes(find_processes, timeout_s=KILL_TIMEOUT_S)
        for folder in find_unused_shared_memory():
            shutil.rmtree(folder, ignore_errors=True)
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # The live view of a killed run leaves it hidden.
            sys.stdout.flush()
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise WorkerLost(
                f"processes {pids} of the run did not end within {KILL_TIMEOUT_S:g} s of SIGKILL",
                fix="wait until they are gone, then resume the run with --resume",
            )


def supervise_train(
    recipe: Path, overrides: Sequence[str], *, restarts: int, standby: bool, resume: bool
) -> int:
    """Run `rollick train` in a child process, with at most `restarts` restarts in a row without a
    new checkpoint. Returns the exit code."""
    loaded = load_recipe(recipe, overrides)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    if not resume:
        # A restart resumes whatever is in the folder, so it must be this run.
        refuse_existing_run(RunFolder(folder, loaded.recipe))
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]

    def command(resume: bool, *options: str) -> list[str]:
        options = ("--resume", *options) if resume else options
        return [*program, "train", *options, "--", str(recipe), *overrides]

    prepared = Standby(lambda: command(True, "--wait")) if standby else None
    return RunSupervisor(command, folder, restarts=restarts, standby=prepared).run(resume=resume)


def find_unused_shared_memory() -> list[Path]:
    """Folders of runs in shared memory whose lock is free: their controller is gone."""
    unused: list[Path] = []
    for folder in SHARED_MEMORY.glob("rollick-*"):
        with suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unused.append(folder)
    return unused


def last_logged_step(folder: Path) -> int | None:
    """The step of the last complete row of metrics.jsonl."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    return int(json.loads(lines[-1])["step"]) if lines else None
