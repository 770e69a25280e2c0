"""The trace: a file with every span of every sample and every phase of the controller.

    rollout (spans), pipeline (phases, batches, trainings) -> Trace -> RUN/trace.jsonl

timeline.py converts the file for a trace viewer. Tracing is on by default, because it is cheap: a
span takes about two microseconds, memory is bounded by one chunk and disk by `observe.trace_mb`.
Each line of the file holds one chunk and can be read without the others:

    {"step", "zero", "spans": [[group, sample, stage, engine, label, begin, end]], "phases":
     [[step, name, begin, end]], "taken": [[step, when, [[group, sample]]]], "trained":
     [[step, when, version]]}

Times are microseconds of the event loop's clock. `zero` is the wall-clock time, in seconds, at
which that clock was 0.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollick.observe.metrics import replace_rows
from rollick.observe.row_file import read_rows
from rollick.observe.sample_stage import SampleActivity, SampleStage
from rollick.types import SampleId

LOG = logging.getLogger("rollick")
Clock = Callable[[], float]

TRACE = "trace.jsonl"
OLDER = "trace.older.jsonl"
"""The previous file: the trace is rotated when it reaches half of the size limit."""

CHUNK = 256
"""Spans per write. A write blocks the controller for about a millisecond."""


class Trace:
    """Collects and writes the trace of one event loop; `clock` is the time of that loop."""

    def __init__(
        self, folder: Path, *, clock: Clock, limit_bytes: int, zero: float | None = None
    ) -> None:
        """Keeps at most about `limit_bytes`, at least the newest half; 0 writes nothing. `zero` is
        the wall-clock time at which `clock` was 0; set it for a virtual clock."""
        self.folder = folder
        self.step = 1
        self.last_generation_end: dict[int, float] = {}
        """When each engine last finished a generation; updated even without tracing."""
        self._clock = clock
        self._zero = time.time() - clock() if zero is None else zero
        self._limit = limit_bytes
        self._spans: list[tuple[SampleId, SampleActivity, float, float]] = []
        self._marks: dict[str, list[Any]] = {}

    def record_span(
        self, uid: SampleId, activity: SampleActivity, begin: float, end: float
    ) -> None:
        if activity.stage is SampleStage.GENERATING and activity.engine is not None:
            self.last_generation_end[activity.engine] = end
        if self._limit:
            self._spans.append((uid, activity, begin, end))
            if len(self._spans) >= CHUNK:
                self.flush()

    def record_phase(self, name: str, begin: float, end: float, *, step: int) -> None:
        """Record a phase of the controller; `step` becomes the current step."""
        self.step = step
        self._mark("phases", [step, name, _to_us(begin), _to_us(end)])

    def record_batch(self, uids: Iterable[SampleId], *, step: int) -> None:
        """Record that these samples now form the batch of `step`."""
        self.step = step
        if self._limit:
            members = [[uid.group, uid.index] for uid in uids]
            self._mark("taken", [step, _to_us(self._clock()), members])

    def record_training(self, version: int, *, step: int) -> None:
        """Record that training on the batch of `step` produced `version`."""
        self._mark("trained", [step, _to_us(self._clock()), version])
        self.flush()

    def flush(self, *, step: int | None = None) -> None:
        """Write the collected entries under `step` (default: the current step)."""
        if not self._spans and not self._marks:
            return
        row: dict[str, Any] = {"step": self.step if step is None else step, "zero": self._zero}
        if self._spans:
            spans = self._spans
            row["spans"] = [
                [*uid, *activity, _to_us(b), _to_us(e)] for uid, activity, b, e in spans
            ]
        line = json.dumps(row | self._marks, separators=(",", ":")) + "\n"
        self._spans.clear()
        self._marks.clear()
        try:
            self._append(line)
        except OSError as error:
            self._limit = 0
            LOG.warning("tracing stopped: %s", error)

    def drop_rows_after(self, step: int) -> None:
        """Remove the rows after `step`: a resumed run writes them again."""
        for name in (OLDER, TRACE):
            path = self.folder / name
            if path.exists():
                replace_rows(path, [row for row in read_rows(path) if row["step"] <= step])

    def _mark(self, kind: str, mark: list[Any]) -> None:
        if self._limit:
            marks = self._marks.setdefault(kind, [])
            marks.append(mark)
            if len(marks) >= CHUNK:
                self.flush()

    def _append(self, line: str) -> None:
        path = self.folder / TRACE
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            size = file.tell()
        if 2 * size > self._limit:
            path.replace(self.folder / OLDER)


def _to_us(seconds: float) -> int:
    # Truncation keeps the order, and the end of a span stays equal to the start of the next.
    return int(seconds * 1e6)


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's trace, oldest first; none if it has no trace."""
    paths = [folder / name for name in (OLDER, TRACE)]
    return [row for path in paths if path.exists() for row in read_rows(path)]
