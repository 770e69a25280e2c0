"""Back end of `rollick train --restarts N`: the run is a child process, restarted after a crash.

    supervisor (no torch, no Ray) ──starts──> rollick train ──starts──> Ray, rewards, environments
       exit 0, 2 or 75                 the supervisor exits with the same code
       a signal, any other exit code   every process of the run is killed; then it is started again
                                       with --resume, after a delay, while the budget lasts

SIGINT and SIGTERM are passed on to the run, which saves and exits with 75. After one of them
nothing is restarted. If the supervisor itself dies, the run gets SIGTERM.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from rollick.checkpoint import CheckpointStore
from rollick.children.memory_kills import count_memory_kills, describe_signal
from rollick.children.process_tree import (
    ProcessId,
    adopt_orphans,
    find_descendants,
    kill_processes,
    reap_orphans,
    signal_on_parent_death,
)
from rollick.config.load import load_recipe
from rollick.errors import EXIT_INTERRUPTED, EXIT_MISTAKE, WorkerLost
from rollick.observe.faults import Fault, FaultLog
from rollick.run_folder import RunFolder, refuse_existing_run

LOG = logging.getLogger("rollick")

FINAL_CODES = (0, EXIT_MISTAKE, EXIT_INTERRUPTED)
"""Exit codes after which a restart is useless or unwanted."""
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
KILL_TIMEOUT_S = 60.0
"""How long killed processes may take to end; a GPU driver can hold one for a while."""
LOOK_S = 1.0
"""How often to look whether a restarted run has made a step."""
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
        after a new checkpoint comes at once."""
        if step is not None and (self.last_step is None or step > self.last_step):
            self.used = 0
        self.last_step = step
        if self.used >= self.limit:
            return None
        self.used += 1
        return min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (self.used - 2)) if self.used > 1 else 0.0


@dataclass(slots=True)
class Signals:
    """Catches SIGINT, SIGTERM and SIGCHLD, so that one wait sees all of them."""

    on_stop: Callable[[int], None] = lambda number: None
    stop_requested: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)
    _pipe: tuple[int, int] = (-1, -1)

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
            self._stack.callback(os.close, end)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            self._stack.callback(signal.signal, number, signal.signal(number, self._handle))
        self._stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._pipe[1]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.stop_requested = True
            self.on_stop(number)

    def wait(self, timeout_s: float | None) -> None:
        """Return when a signal arrives or the time is up."""
        if select.select([self._pipe[0]], [], [], timeout_s)[0]:
            os.read(self._pipe[0], 4096)

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Whether a stop was requested within the time."""
        deadline = time.monotonic() + timeout_s
        while not self.stop_requested and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        return self.stop_requested


class RunSupervisor:
    """Runs `command(resume)` until it ends for good. Must be the only user of this process's
    children: those that it did not start before `run` belong to the run and are killed."""

    def __init__(
        self, command: Callable[[bool], Sequence[str]], folder: Path, *, restarts: int
    ) -> None:
        self._command = command
        self._folder = folder
        self._budget = RestartBudget(restarts)
        self._faults = FaultLog(folder, step=lambda: last_logged_step(folder) or 0)
        self._fault: Fault | None = None
        """The last crash, until the restarted run has made a step."""
        self._memory_kills_before = 0
        self._earlier: set[ProcessId] = set()
        """Children that this process had before."""

    def run(self, *, resume: bool) -> int:
        """Returns the exit code for the supervisor."""
        adopt_orphans()
        self._earlier = find_descendants()
        with Signals() as signals:
            while True:
                code = self._run_once(self._command(resume), signals)
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

    def _run_once(self, command: Sequence[str], signals: Signals) -> int:
        """Start the run and wait for its end. Returns its exit code; -N if signal N killed it."""
        self._memory_kills_before = count_memory_kills()
        # A group of its own: a terminal signals the supervisor, which passes the signal on once.
        process = subprocess.Popen(command, process_group=0, preexec_fn=_prepare_child)
        signals.on_stop = process.send_signal
        if signals.stop_requested:  # It arrived before there was a process to pass it on to.
            process.send_signal(signal.SIGTERM)
        started_at = time.time()
        if self._fault:
            self._fault.restarted()
        while process.poll() is None:
            signals.wait(LOOK_S if self._fault else None)
            reap_orphans(process.pid)
            self._look_for_progress(started_at)
        signals.on_stop = lambda number: None
        self._look_for_progress(started_at)
        if self._fault:
            cause = self._describe_exit(process.returncode)
            self._fault.give_up(f"the restarted run ended before a step: {cause}")
            self._fault = None
        return process.returncode

    def _look_for_progress(self, started_at: float) -> None:
        """The last crash is repaired when the restarted run has logged a step of its own."""
        fault, metrics = self._fault, self._folder / "metrics.jsonl"
        if fault is None or not metrics.exists() or metrics.stat().st_mtime < started_at:
            return
        resumed_from = self._budget.last_step or 0
        if (last_logged_step(self._folder) or 0) > resumed_from:
            fault.rejoined(redone_steps=max(0, fault.step - resumed_from))
            self._fault = None

    def _plan_restart(self, code: int) -> float | None:
        """Record the crash and announce the restart. Returns its delay, None if it must not be."""
        store = CheckpointStore(self._folder / "checkpoints", keep_last=1, keep_best=0)
        step, cause = store.newest_step(), self._describe_exit(code)
        kind = "killed" if code < 0 else "raised"
        fault = self._faults.begin("controller", 0, kind=kind, cause=cause)
        delay_s, budget = self._budget.take(step), self._budget
        where = "the beginning" if step is None else f"the checkpoint of step {step}"
        if delay_s is None:
            reason = f"{budget.limit} restarts in a row made no new checkpoint"
            fault.give_up(reason)
            LOG.error("the run crashed: %s; giving up: %s", cause, reason)
            return None
        self._fault = fault
        when = f"in {delay_s:g} s" if delay_s else "now"
        LOG.warning(
            "the run crashed: %s, after step %d; restart %d of %d %s, from %s",
            *(cause, fault.step, budget.used, budget.limit, when, where),
        )
        return delay_s

    def _describe_exit(self, code: int) -> str:
        if code >= 0:
            return f"exit code {code}"
        return describe_signal(-code, memory_kills_before=self._memory_kills_before)

    def _end_processes(self) -> None:
        """Kill what the run left: Ray, workers, rewards, environments, sandboxes. Free its shared
        memory."""

        def find() -> set[ProcessId]:
            reap_orphans()
            return find_descendants() - self._earlier

        left = kill_processes(find, timeout_s=KILL_TIMEOUT_S)
        for folder in find_unused_memory():
            shutil.rmtree(folder, ignore_errors=True)
        if sys.stdout.isatty():
            sys.stdout.write(SHOW_CURSOR)  # The live view of a killed run had hidden it.
            sys.stdout.flush()
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise WorkerLost(
                f"processes {pids} of the run did not end within {KILL_TIMEOUT_S:g} s of SIGKILL",
                fix="wait until they are gone, then resume the run with --resume",
            )


def supervise_train(recipe: Path, overrides: Sequence[str], *, restarts: int, resume: bool) -> int:
    """Run `rollick train` in a child process, with at most `restarts` restarts in a row that make
    no new checkpoint. Returns the exit code."""
    loaded = load_recipe(recipe, overrides)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    if not resume:
        # A restart resumes whatever is in the folder, so it must be this run.
        refuse_existing_run(RunFolder(folder, loaded.recipe))
    program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]

    def command(resume: bool) -> list[str]:
        options = ["--resume"] if resume else []
        return [*program, "train", *options, "--", str(recipe), *overrides]

    return RunSupervisor(command, folder, restarts=restarts).run(resume=resume)


def _prepare_child() -> None:
    """In the child, before exec: the run saves if its supervisor dies."""
    signal_on_parent_death(signal.SIGTERM)


def find_unused_memory() -> list[Path]:
    """Folders of runs in shared memory whose lock nobody holds: their controller is gone."""
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
