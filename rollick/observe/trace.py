"""The trace: every stretch of every sample's life and every phase of the controller, in a file.

    Rollout (span), Session (phase), pipeline (taken, trained) -> Trace -> RUN/trace.jsonl

Owns the collecting and the file; timeline.py makes of it what a trace viewer opens. Collecting is
on by default, because nobody knows before a slow night that its trace will be wanted: a stretch
costs about two microseconds, and memory (one chunk) and disk (`observe.trace_mb`) are bounded.
A line holds a chunk and needs no other line to be read:

    {"step", "zero", "spans": [[group, sample, what, begin, end]], "phases": [[step, name, begin,
     end]], "taken": [[step, when, [[group, sample]]]], "trained": [[step, when, version]]}

Times are microseconds of the event loop's clock; `zero` is the wall clock's second at its zero.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from rollick.observe.metrics import rewrite
from rollick.types import SampleId

LOG = logging.getLogger("rollick")

TRACE = "trace.jsonl"
OLDER = "trace.older.jsonl"
"""What was written before the file was half as large as allowed."""

CHUNK = 256
"""Stretches that are written at once: a millisecond of the controller's time."""


class Trace:
    """Collects and writes. All methods belong to one event loop; `clock` is its time."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float],
        limit_bytes: int,
        zero: float | None = None,
    ) -> None:
        """Keeps between half of `limit_bytes` and all of it; 0 writes nothing. `zero` is the wall
        clock's second at the clock's zero (for a virtual clock, which has none)."""
        self.folder = folder
        self.ended: dict[str, float] = {}
        """When somebody last ended doing this, by what it was; kept if nothing is written too."""
        self.moved = clock()
        """When a stretch of a sample's life last ended."""
        self.step = 1
        """The step under way."""
        self._clock = clock
        self._zero = time.time() - clock() if zero is None else zero
        self._limit = limit_bytes
        self._spans: list[tuple[SampleId, str, float, float]] = []
        self._marks: dict[str, list[Any]] = {}

    def span(self, uid: SampleId, what: str, begin: float, end: float) -> None:
        """A sample did something from `begin` to `end`."""
        self.ended[what] = self.moved = end
        if self._limit:
            self._spans.append((uid, what, begin, end))
            if len(self._spans) >= CHUNK:
                self.flush()

    def phase(self, name: str, begin: float, end: float, *, step: int) -> None:
        """The controller was in a phase of `step`, which is the one under way from now on."""
        self.step = step
        self._mark("phases", [step, name, _micro(begin), _micro(end)])

    def taken(self, uids: Iterable[SampleId], *, step: int) -> None:
        """These samples are the batch of `step`, since now."""
        self.step = step
        if self._limit:
            members = [[uid.group, uid.index] for uid in uids]
            self._mark("taken", [step, _micro(self._clock()), members])

    def trained(self, version: int, *, step: int) -> None:
        """The batch of `step` was trained on, which made `version`."""
        self._mark("trained", [step, _micro(self._clock()), version])
        self.flush()

    def flush(self, *, step: int | None = None) -> None:
        """Write what was collected, as of `step` (by default the one under way)."""
        if not self._spans and not self._marks:
            return
        row: dict[str, Any] = {"step": self.step if step is None else step, "zero": self._zero}
        if self._spans:
            row["spans"] = [
                [uid[0], uid[1], what, int(begin * 1e6), int(end * 1e6)]
                for uid, what, begin, end in self._spans
            ]
        line = json.dumps(row | self._marks, separators=(",", ":")) + "\n"
        self._spans.clear()
        self._marks.clear()
        try:
            self._append(line)
        except OSError as error:
            self._limit = 0
            LOG.warning("the trace is off: %s", error)

    def forget_after(self, step: int) -> None:
        """Remove what was written of later steps, which will be made again."""
        for name in (OLDER, TRACE):
            path = self.folder / name
            if path.exists():
                rewrite(path, [row for row in _rows(path) if row["step"] <= step])

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


def _micro(seconds: float) -> int:
    # Cut off, not rounded, and the same way everywhere: order and adjacency survive.
    return int(seconds * 1e6)


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's trace, oldest first; none if it has no trace."""
    paths = [folder / name for name in (OLDER, TRACE)]
    return [row for path in paths if path.exists() for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a file; a line that a kill cut short, and junk, are left out."""
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "step" in row:
                rows.append(cast("dict[str, Any]", row))
    return rows
