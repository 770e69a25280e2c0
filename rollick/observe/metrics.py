"""The metrics of a run: one flat mapping of names to numbers for each step.

metrics.jsonl in the run's folder is authoritative; other sinks may fail without stopping the run.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollick.errors import DiskError
from rollick.observe.metric_table import current_name
from rollick.observe.row_file import RowFile, read_rows

LOG = logging.getLogger("rollick")

MetricRows = Sequence[Mapping[str, float]]
"""The metrics of a run by step, oldest first."""


class Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class GuardedSink:
    """Runs a sink in a thread: a sink that raises or blocks cannot stop the run."""

    def __init__(self, name: str, create: Callable[[], Sink], *, capacity: int = 1000) -> None:
        self.name = name
        self.failure: str | None = None
        self.num_lost_steps = 0
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, args=(create,), daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.failure is not None:
            return
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.num_lost_steps += 1

    def close(self, *, grace_s: float = 10.0) -> None:
        """Write the queued metrics and end the thread, within `grace_s` seconds."""
        deadline = time.monotonic() + grace_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            # Short waits: if the sink fails now, its full queue never has room again.
            try:
                self._queue.put(None, timeout=min(0.1, grace_s))
            except queue.Full:
                continue
            self._thread.join(max(0.0, deadline - time.monotonic()))
            return

    def _work(self, create: Callable[[], Sink]) -> None:
        # Catch everything: a tracker may raise anything.
        try:
            sink = create()
            while (entry := self._queue.get()) is not None:
                sink.log(*entry)
            sink.close()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            LOG.warning("metrics sink %s stopped: %s", self.name, self.failure)


class MetricLog:
    """Writes each step's metrics to all sinks, and keeps them for the report."""

    def __init__(self, folder: Path, sinks: Sequence[GuardedSink]) -> None:
        self.path = folder / "metrics.jsonl"
        self._file = RowFile(self.path)
        self.sinks = list(sinks)
        self.history: list[dict[str, float]] = []

    def drop_rows_after(self, step: int) -> None:
        """Remove the rows after `step`, which the resumed run repeats."""
        if not self.path.exists():
            return
        rows = read_metrics(self.path)
        self.history = [row for row in rows if row["step"] <= step]
        replace_rows(self.path, self.history)

    @property
    def last(self) -> dict[str, float]:
        """The newest row, without its step."""
        row = self.history[-1] if self.history else {}
        return {name: value for name, value in row.items() if name != "step"}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(v) for name, v in metrics.items() if math.isfinite(v)}
        row = {"step": step, **finite}
        self.history.append(row)
        self._file.append([row])
        for sink in self.sinks:
            sink.log(step, finite)

    def close(self) -> None:
        self._file.close()
        for sink in self.sinks:
            sink.close()


def replace_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of a .jsonl file atomically."""
    new_path = path.with_name(path.name + ".new")
    try:
        new_path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        new_path.replace(path)
    except OSError as error:
        new_path.unlink(missing_ok=True)
        fix = "free some space, then resume the run"
        raise DiskError(f"{path} cannot be written: {error.strerror}", fix=fix) from error


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl. Translates old metric names."""
    rows: list[dict[str, float]] = list(read_rows(path))
    names = {name: current_name(name) for row in rows for name in row}
    renamed = sorted(name for name, current in names.items() if name != current)
    if not renamed:
        return rows
    LOG.warning("%s: %s", path, ", ".join(f"{name} is now {names[name]}" for name in renamed))
    return [{names[name]: value for name, value in row.items()} for row in rows]
