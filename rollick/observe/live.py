"""The live view of a run: one line per role, progress, score, speed. Quiet off a terminal.

Off a terminal each step is one log line instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

LOG = logging.getLogger("rollick")
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The last `width` finite values as a line of blocks, scaled between their extremes."""
    recent = [value for value in values if isfinite(value)][-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    span = (high - low) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in recent)


class LiveView:
    """Shows a run. `mode`: on, off, or auto (on where the console is a terminal)."""

    def __init__(
        self, title: str, steps: int, *, mode: str, console: Console | None = None
    ) -> None:
        self.console = console or Console(stderr=True)
        self.shown = mode == "on" or (mode == "auto" and self.console.is_terminal)
        self.title = title
        self.scores: list[float] = []
        self.roles: dict[str, str] = {}
        self.metrics: Mapping[str, float] = {}
        self.alarms: Mapping[str, str] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.progress.add_task(title, total=steps)
        self.live = Live(
            get_renderable=self.render, console=self.console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveView:
        if self.shown:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown:
            self.live.stop()

    def role(self, name: str, doing: str) -> None:
        """What a role does now."""
        self.roles[name] = doing

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        self.metrics = metrics
        if "score/mean" in metrics:
            self.scores.append(metrics["score/mean"])
        self.progress.update(self.task, completed=step)
        if not self.shown:
            LOG.info("step %4d  %s", step, self.summary())

    def warn(self, alarms: Mapping[str, str]) -> None:
        """What the hacking watch sees now, by rule; one that is new is logged as well."""
        for rule, message in alarms.items():
            if rule not in self.alarms:
                LOG.warning("watch %s: %s", rule, message)
        self.alarms = alarms

    def summary(self) -> str:
        names = {
            "score/mean": "score",
            "train/loss": "loss",
            "train/grad_norm": "grad",
            "rollout/response_length": "length",
            "speed/tokens_per_s": "tok/s",
            "time/step": "s",
        }
        shown = {label: self.metrics[name] for name, label in names.items() if name in self.metrics}
        return "  ".join(f"{label} {value:.4g}" for label, value in shown.items())

    def render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, doing in self.roles.items():
            table.add_row(Text(name, style="cyan"), Text(doing))
        table.add_row(Text("score", style="cyan"), Text(sparkline(self.scores), style="green"))
        table.add_row(Text("step", style="cyan"), Text(self.summary()))
        for rule, message in self.alarms.items():
            table.add_row(Text(f"watch {rule}", style="red"), Text(message, style="red"))
        return Group(self.progress, table)


class Stopwatch:
    """Seconds of each phase of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.begun = time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def finish(self) -> dict[str, float]:
        """The step's times as metrics; starts the next step."""
        now = time.perf_counter()
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/step"] = now - self.begun
        self.seconds, self.begun = {}, now
        return times
