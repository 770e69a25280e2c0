"""Where the time of a run went: every second belongs to exactly one state.

    TimeAccount, one per process --> goodput.jsonl --> read_goodput --> metrics, report, doctor

    start     workers and models start
    train     the step computes: annotates, trains, and everything without another state
    generate  the step waits for samples, and an engine generates
    wait      the step waits for samples, and no engine generates: rewards or environments work
    publish   the new weights are sent to the engines
    save      training waits for a checkpoint
    validate  held-out prompts are sampled and scored
    recover   the step, or the whole run, waits for the repair of a fault
    redo      the work was lost: steps after the restored checkpoint, the time from the last
              finished step to a crash, steps that a rollback undid, and calls that failed; or a new
              worker trains on earlier batches again

The account is always in one state, so the states sum to the wall time. The wall time of a run that
crashed includes the time until it was resumed (recover). The time between a normal end (finished,
stopped by a signal or run.max_minutes) and a resume is not counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from rollick.observe.diagnosis import read_run_snapshot
from rollick.observe.faults import Fault, FaultKind, LostTime
from rollick.observe.row_file import append_row, read_rows

GOODPUT = "goodput.jsonl"

State = Literal[
    "start", "train", "generate", "wait", "publish", "save", "validate", "recover", "redo"
]
Event = Literal["opened", "begun", "step", "restored", "rolled_back", "stopped", "failed"]
STATES: tuple[State, ...] = get_args(State)
PROGRESS: frozenset[State] = frozenset({"train", "generate", "wait", "publish", "validate"})
"""States in which the run makes progress, if it is not lost later."""
NEVER_REDONE: frozenset[State] = frozenset({"start", "recover", "redo"})
"""States that keep their time if their step is lost."""
NO_REPAIR: frozenset[FaultKind] = frozenset({"not_finite", "exploded"})
"""Faults that end immediately: they have no recovery time."""
PHASE_STATES: Mapping[str, State] = {
    "generate": "generate",
    "publish": "publish",
    "validate": "validate",
}
"""The state of a phase; `train` for all others."""

Clock = Callable[[], float]
TimeByState = dict[State, float]


def zero_seconds() -> TimeByState:
    return dict.fromkeys(STATES, 0.0)


@dataclass(frozen=True, slots=True)
class TimeRow:
    """A row of goodput.jsonl. Its `seconds` sum to the time since the previous row, unless the run
    was not running in between."""

    at: float
    """Seconds since the epoch."""
    step: int | None = None
    """The step that the time was spent for; None if it cannot be lost with a step."""
    seconds: Mapping[State, float] = field(default_factory=zero_seconds)
    event: Event = "step"
    """opened: a process started. begun: its first step began. step: a step ended. restored,
    rolled_back: the steps after `step` were lost. stopped, failed: the process ended; after a crash
    both are missing."""
    redone_steps: int = 0
    """Steps since the previous row whose work was lost, without those that the event names."""


@dataclass(slots=True)
class Goodput:
    """The time of a run by state, over all its processes."""

    seconds: TimeByState = field(default_factory=zero_seconds)
    processes: int = 0
    redone_steps: int = 0
    last_row: TimeRow | None = None
    _by_step: dict[int, TimeByState] = field(default_factory=dict[int, TimeByState])
    _finished: set[int] = field(default_factory=set[int])

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def ettr(self) -> float:
        """Effective training time ratio: time of progress that was not lost / wall time."""
        return sum(self.seconds[state] for state in PROGRESS) / self.wall_s if self.wall_s else 1.0

    @property
    def shares(self) -> dict[State, float]:
        """The share of each state that occurred, in the order of STATES."""
        wall_s = self.wall_s
        return {state: value / wall_s for state, value in self.seconds.items() if value > 0}

    def add(self, row: TimeRow) -> None:
        self._add_time(row)
        if row.event in ("restored", "rolled_back"):
            self._lose_steps_after(row.step)
        self.redone_steps += row.redone_steps
        self.processes += row.event == "opened"
        self.last_row = row

    def _add_time(self, row: TimeRow) -> None:
        by_step = zero_seconds()
        if row.step is not None:
            by_step = self._by_step.setdefault(row.step, by_step)
        for state, seconds in row.seconds.items():
            self.seconds[state] += seconds
            by_step[state] += seconds
        if row.event == "step" and row.step is not None:
            self._finished.add(row.step)

    def _lose_steps_after(self, step: int | None) -> None:
        """The time of these steps becomes `redo`, because they are done again."""
        assert step is not None, "a restored run has a step"
        for lost in [number for number in self._by_step if number > step]:
            for state, seconds in self._by_step.pop(lost).items():
                if state not in NEVER_REDONE:
                    self.seconds[state] -= seconds
                    self.seconds["redo"] += seconds
            self.redone_steps += lost in self._finished and lost > 0
            self._finished.discard(lost)


def read_goodput(folder: Path) -> Goodput:
    """The time of a run so far."""
    path, goodput = folder / GOODPUT, Goodput()
    for row in read_rows(path) if path.exists() else ():
        goodput.add(TimeRow(**row))
    return goodput


class TimeAccount:
    """Records the time of this process by state. Open it with `TimeAccount.open`."""

    def __init__(self, path: Path, totals: Goodput, clock: Clock, now: Clock) -> None:
        self.totals = totals
        self.waiting_state: Callable[[], State] = lambda: "generate"
        """The state while a step waits for samples; call `refresh` when it may have changed."""
        self._path = path
        self._clock = clock
        self._since = clock()
        self._epoch = now() - self._since
        self._base: State = "start"
        self._state: State = "start"
        self._recoveries = 0
        self._replays = 0
        self._redone_steps = 0
        """Since the last row."""
        self._claimed = LostTime()
        self._unwritten = zero_seconds()
        self._step_seconds = zero_seconds()
        """Since the last row of metrics."""
        self._is_open = True

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        resume: bool,
        clock: Clock = time.monotonic,
        now: Clock = time.time,
    ) -> TimeAccount:
        """Continue the account of a run, or begin a new one. If the run's last process crashed, the
        time since its last finished step is lost, and the time from the crash to the first step is
        recovery."""
        if not resume:
            (folder / GOODPUT).unlink(missing_ok=True)
        totals = read_goodput(folder)
        account, last = cls(folder / GOODPUT, totals, clock, now), totals.last_row
        if last is not None and last.event != "stopped":
            crashed_at = min(_crash_time(folder, last), account.recorded_until)
            is_step_lost = last.event in ("begun", "step", "rolled_back")
            account._unwritten["redo" if is_step_lost else "recover"] += crashed_at - last.at
            account._unwritten["recover"] += account.recorded_until - crashed_at
            account._base = account._state = "recover"
        account._write(None, "opened")
        account.claim_lost_time()
        return account

    @property
    def recorded_until(self) -> float:
        """Seconds since the epoch, up to which the time is recorded."""
        return self._epoch + self._since

    @property
    def state(self) -> State:
        return self._state

    def refresh(self) -> None:
        """Add the time since the last call to the current state, and determine the state again."""
        if not self._is_open:
            return
        now = self._clock()
        for seconds in (self._unwritten, self._step_seconds):
            seconds[self._state] += now - self._since
        self._since = now
        self._state = self.waiting_state() if self._base == "generate" else self._base
        if self._recoveries:
            self._state = "redo" if self._replays else "recover"

    def begin_steps(self) -> None:
        """The run has started: from now on it trains."""
        self._base = "train"
        self._write(None, "begun")
        self.claim_lost_time()  # The supervisor records the crash and its cost.

    @contextmanager
    def during(self, state: State) -> Generator[None]:
        """The run is in this state while the block runs."""
        before, self._base = self._base, state
        self.refresh()
        try:
            yield
        finally:
            self._base = before
            self.refresh()

    @contextmanager
    def recovering(self, *, lost_s: float = 0.0) -> Generator[None]:
        """The step waits for the repair of a fault while the block runs. `lost_s`: seconds before
        the block whose work is done again, such as those of a call that failed."""
        self.refresh()
        # A repair within a repair loses no work of the step.
        moved = 0.0 if self._recoveries else min(lost_s, self._unwritten[self._state])
        for seconds in (self._unwritten, self._step_seconds):
            seconds[self._state] -= moved
            seconds["redo"] += moved
        self._recoveries += 1
        self.refresh()
        try:
            yield
        finally:
            self._recoveries -= 1
            self.refresh()

    @contextmanager
    def redoing(self, steps: int) -> Generator[None]:
        """A repaired role is trained on the batches of these steps again while the block runs."""
        self._replays += 1
        self.refresh()
        try:
            yield
            self._redone_steps += steps
        finally:
            self._replays -= 1
            self.refresh()

    def undo_steps_after(self, step: int) -> None:
        """A rollback has undone the steps after `step`, including the current one."""
        self.refresh()
        for seconds in (self._unwritten, self._step_seconds):
            for state in STATES:
                if state not in NEVER_REDONE:
                    seconds["redo"] += seconds[state]
                    seconds[state] = 0.0
        self._redone_steps += 1
        self._write(step, "rolled_back")

    def claim_lost_time(self) -> LostTime:
        """The time of `recover` and `redo` since the last call. A repaired fault claims it, so that
        each second counts for one fault: the first to be repaired, if there are several."""
        self.refresh()
        states: tuple[State, State] = ("recover", "redo")
        lost = LostTime(*(self.totals.seconds[state] + self._unwritten[state] for state in states))
        claimed, self._claimed = self._claimed, lost
        return lost.since(claimed)

    def finish_step(self, step: int) -> dict[str, float]:
        """Record the step. Returns its time by state as metrics, and the totals of the run."""
        self._write(step, "step")
        seconds, self._step_seconds = self._step_seconds, zero_seconds()
        totals = self.totals.seconds
        metrics = {f"time/goodput/{s}": seconds[s] for s, total in totals.items() if total > 0}
        metrics["time/goodput/ettr"] = self.totals.ettr
        return metrics | {"time/goodput/redone_steps": float(self.totals.redone_steps)}

    def drop_rows_after(self, step: int) -> None:
        """Record that the steps after `step` were lost, because the run does them again. Removes no
        row: their time becomes `redo`."""
        self._append(TimeRow(self.recorded_until, step, event="restored"))

    def close(self, step: int, *, failed: bool = False) -> None:
        """Record the remaining time. `step`: finished steps. A resume loses a failed step."""
        if self._is_open:
            self._write(step + 1 if failed else step, "failed" if failed else "stopped")
            self._is_open = False

    def _write(self, step: int | None, event: Event) -> None:
        self.refresh()
        seconds: TimeByState = {state: value for state, value in self._unwritten.items() if value}
        redone, self._redone_steps = self._redone_steps, 0
        self._unwritten = zero_seconds()
        self._append(TimeRow(self.recorded_until, step, seconds, event, redone))

    def _append(self, row: TimeRow) -> None:
        self.totals.add(row)
        append_row(self._path, asdict(row))


def _crash_time(folder: Path, last: TimeRow) -> float:
    """When a process failed, or was last seen alive."""
    snapshot = read_run_snapshot(folder)
    if last.event == "failed" or snapshot is None:
        return last.at
    return max(last.at, snapshot.written_at)


@dataclass(frozen=True, slots=True)
class RoleFaults:
    """The faults of a role."""

    role: str
    kinds: Mapping[FaultKind, int]
    gave_up: int
    """Faults that were not repaired because a budget was spent."""
    redone_steps: int
    recovery_s: Sequence[float]
    """From each fault to its repair."""
    lost_s: float = 0.0
    """Time of the run that they cost: it waited for repairs, or lost work."""

    @property
    def count(self) -> int:
        return sum(self.kinds.values())

    @property
    def median_s(self) -> float | None:
        return median(self.recovery_s) if self.recovery_s else None

    @property
    def longest_s(self) -> float | None:
        return max(self.recovery_s, default=None)


def summarise_faults(faults: Iterable[Fault]) -> list[RoleFaults]:
    """The faults by role, in the order of each role's first fault."""
    by_role: dict[str, list[Fault]] = {}
    for fault in faults:
        by_role.setdefault(fault.role, []).append(fault)
    return [
        RoleFaults(
            role=role,
            kinds=Counter(fault.kind for fault in role_faults),
            gave_up=sum(fault.gave_up is not None for fault in role_faults),
            redone_steps=sum(fault.redone_steps for fault in role_faults),
            recovery_s=[
                fault.rejoined_at - fault.failed_at
                for fault in role_faults
                if fault.rejoined_at is not None and fault.kind not in NO_REPAIR
            ],
            lost_s=sum(fault.recover_s + fault.redo_s for fault in role_faults),
        )
        for role, role_faults in by_role.items()
    ]


def fault_metrics(faults: Iterable[Fault]) -> dict[str, float]:
    """Faults and the median time to recover, by role."""
    metrics: dict[str, float] = {}
    for role in summarise_faults(faults):
        metrics[f"time/goodput/faults/{role.role}"] = float(role.count)
        if role.median_s is not None:
            metrics[f"time/goodput/recovery/{role.role}"] = role.median_s
    return metrics
