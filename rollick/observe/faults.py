"""faults.jsonl: every fault of a run, with the times at which it was detected and repaired.

    fault = faults.begin("generators", 1, kind="killed", cause="...")     # writes a row
    fault.mark_restarted()                                               # a new process responds
    fault.mark_rejoined()                                                # repaired; writes a row

A fault has two rows with the same id; the later one counts, so a crash between them loses neither.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, NamedTuple

from rollick.errors import EngineCorrupt, EngineLost, NodeLost, RollickError, WorkerHung, WorkerLost
from rollick.observe.row_file import append_row, read_rows

FAULTS = "faults.jsonl"

FaultKind = Literal[
    "killed",
    "hung",
    "raised",
    "corrupt",
    "not_finite",
    "exploded",
    "rolled_back",
    "slow",
    "shared_memory",
    "node",
]


def fault_kind(error: RollickError) -> FaultKind:
    """The kind of fault that a failed call to a worker shows."""
    if isinstance(error, NodeLost):
        return "node"
    if isinstance(error, WorkerHung):
        return "hung"
    if isinstance(error, EngineCorrupt):
        return "corrupt"
    return "killed" if isinstance(error, WorkerLost | EngineLost) else "raised"


def failure_time(error: Exception) -> float | None:
    """When the worker of a failed call exited or last responded; None if unknown."""
    return error.failed_at if isinstance(error, WorkerLost) else None


class LostTime(NamedTuple):
    """Seconds that a fault cost the run: it waited for the repair, or lost work."""

    recover_s: float = 0.0
    redo_s: float = 0.0

    def since(self, earlier: LostTime) -> LostTime:
        recover_s, redo_s = self.recover_s - earlier.recover_s, self.redo_s - earlier.redo_s
        return LostTime(max(0.0, recover_s), max(0.0, redo_s))


NO_LOST_TIME = LostTime()


@dataclass(slots=True)
class Fault:
    """One fault. Times are seconds since the epoch; None if that did not happen."""

    id: str
    role: str
    rank: int
    kind: FaultKind
    cause: str
    step: int
    """Finished steps when it was detected."""
    failed_at: float
    """When it happened; for a hang, when the process last responded. `detected_at` if unknown."""
    detected_at: float
    restarted_at: float | None = None
    rejoined_at: float | None = None
    gave_up: str | None = None
    """Why it was not repaired; None if it was, or the repair is in progress."""
    redone_steps: int = 0
    recover_s: float = 0.0
    """Time for which the run waited for the repair."""
    redo_s: float = 0.0
    """Time of work that was lost, and of doing it again."""
    _write: Callable[[Fault], None] = field(default=lambda fault: None, repr=False, compare=False)

    def mark_restarted(self) -> None:
        """A new process has replaced the lost one."""
        self.restarted_at = time.time()

    def mark_rejoined(self, *, redone_steps: int = 0, lost: LostTime = NO_LOST_TIME) -> None:
        """The role takes part in the run again. `redone_steps`: steps whose work was lost."""
        self.rejoined_at, self.redone_steps = time.time(), redone_steps
        self.recover_s, self.redo_s = lost
        self._write(self)

    def give_up(self, reason: str, *, lost: LostTime = NO_LOST_TIME) -> None:
        self.gave_up, (self.recover_s, self.redo_s) = reason, lost
        self._write(self)


class FaultLog:
    """Writes the faults of a run. A full disk never stops the run."""

    def __init__(self, folder: Path, *, step: Callable[[], int] = lambda: 0) -> None:
        self._path = folder / FAULTS
        self._step = step
        self._process = uuid.uuid4().hex[:8]
        self._ids = itertools.count()
        self.faults: list[Fault] = []
        """Those of this process, in order."""

    def begin(
        self,
        role: str,
        rank: int,
        *,
        kind: FaultKind,
        cause: str,
        failed_at: float | None = None,
    ) -> Fault:
        now, number = time.time(), next(self._ids)
        fault = Fault(
            id=f"{self._process}-{number}",
            role=role,
            rank=rank,
            kind=kind,
            cause=cause,
            step=self._step(),
            failed_at=now if failed_at is None else min(failed_at, now),
            detected_at=now,
            _write=self._append,
        )
        self.faults.append(fault)
        self._append(fault)
        return fault

    def _append(self, fault: Fault) -> None:
        names = [column.name for column in fields(fault) if not column.name.startswith("_")]
        append_row(self._path, {name: getattr(fault, name) for name in names})


def read_faults(folder: Path) -> list[Fault]:
    """The faults of a run in order, of all its processes."""
    path = folder / FAULTS
    rows = read_rows(path) if path.exists() else ()
    return list({row["id"]: Fault(**row) for row in rows}.values())
