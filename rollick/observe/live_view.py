"""The live view of a run: one line per role, progress, score, speed.

Without a terminal, and in notebooks, it prints plain lines: one per step, and one every
PROGRESS_EVERY_S during long steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table
from rich.text import Text

from rollick.observe.terminal import SafeConsole

LOG = logging.getLogger("rollick")
BARS = "▁▂▃▄▅▆▇█"
PROGRESS_EVERY_S = 15.0
"""Seconds between two plain lines of one step."""
PACE_STEPS = 10
"""Finished steps that the estimate of the remaining time averages."""

STEP_LINE: Mapping[str, tuple[str, ...]] = {
    "score": ("score/mean", "score/trained"),
    "held-out": ("eval/score",),
    "loss": ("train/loss",),
    "grad": ("train/grad_norm",),
    "length": ("rollout/response_length", "rollout/bias/length_kept"),
    "tok/s": ("speed/tokens_per_s",),
    "s": ("time/step",),
}
"""Labels of the step line, and their metrics in order of preference. A step of an asynchronous run
can end without a finished sample: the second metric covers the trained samples instead."""


def sparkline(values: Sequence[float], *, width: int = 40) -> str:
    """The last `width` finite values as a line of blocks, scaled between their extremes."""
    recent = [value for value in values if isfinite(value)][-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    span = (high - low) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1))] for value in recent)


def format_seconds(seconds: float) -> str:
    """A duration in the two largest units: `45 s`, `3 min 20 s`, `2 h 5 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


class Pace:
    """Estimates the time left: for the samples of a step, and for the run."""

    def __init__(self, steps: int, clock: Callable[[], float], *, limit_s: float) -> None:
        self.steps = steps
        self.completed = 0
        self.samples = (0, 0)
        """Scored samples, and how many the phase needs."""
        self._clock = clock
        self._durations: deque[float] = deque(maxlen=PACE_STEPS)
        self._step_started = self._sampling_started = clock()
        self._ends_at = clock() + limit_s
        self._samples_before = 0
        """Samples that were scored before the phase began, in an asynchronous run."""

    def begin_run(self) -> None:
        """Start timing the first step. The time limit counts from the creation of the view."""
        self._step_started = self._clock()

    def begin_sampling(self) -> None:
        self.samples, self._sampling_started = (0, 0), self._clock()

    def count_samples(self, done: int, total: int) -> None:
        if self.samples == (0, 0):
            self._samples_before = done - 1
        self.samples = (min(done, total), total)

    def finish_step(self, step: int) -> None:
        now = self._clock()
        if step:  # Step 0 is the validation before the first step.
            self._durations.append(now - self._step_started)
        self.completed, self._step_started = step, now

    @property
    def samples_left_s(self) -> float | None:
        """Seconds until the phase has its samples; None before a quarter of them is scored: many
        run at the same time and end together."""
        done, total = self.samples
        finished = done - self._samples_before
        if finished <= 0 or 4 * done < total:
            return None
        return (self._clock() - self._sampling_started) * max(0, total - done) / finished

    @property
    def run_left_s(self) -> float | None:
        """Seconds until the last step or the time limit; None before the first step is done."""
        if not self._durations:
            return None
        mean_s = sum(self._durations) / len(self._durations)
        now = self._clock()
        left_s = (self.steps - self.completed) * mean_s - (now - self._step_started)
        return max(0.0, min(left_s, self._ends_at - now))


class LiveView:
    """Shows a run. `mode`: on, off, or auto (on if the console is a terminal, else plain lines).
    `limit_s`: the run ends after this time."""

    def __init__(
        self,
        title: str,
        steps: int,
        *,
        mode: str,
        limit_s: float = inf,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Widgets of a notebook would need another package; plain lines work everywhere.
        self.console = console or SafeConsole(stderr=True, force_jupyter=False)
        self.is_live = mode == "on" or (mode == "auto" and self.console.is_terminal)
        self.scores: list[float] = []
        self.roles: dict[str, str] = {}
        self.metrics: Mapping[str, float] = {}
        self.alarms: Mapping[str, str] = {}
        self.advice: Mapping[str, str] = {}
        self.logged_advice: set[str] = set()
        self.phase = "start"
        self.pace = Pace(steps, clock, limit_s=limit_s)
        self._prints_lines = mode == "auto" and not self.is_live
        self._clock = clock
        self._last_line = clock()
        columns = (BarColumn(), MofNCompleteColumn())
        self.progress = Progress("{task.description}", *columns, console=self.console)
        self.task = self.progress.add_task(title, total=steps)
        self.live = Live(get_renderable=self.render, console=self.console, transient=True)

    def announce(self, text: str) -> None:
        """Show a line before the run begins."""
        if self.is_live:
            self.console.print(Text(text), soft_wrap=True)
        self._write_line(text)

    def __enter__(self) -> LiveView:
        self.pace.begin_run()
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self.live.stop()

    def set_role_activity(self, name: str, activity: str) -> None:
        self.roles[name] = activity

    def begin_phase(self, name: str) -> None:
        self.phase = name
        self.pace.begin_sampling()
        self._show_progress()

    def count_samples(self, phase: str, done: int, total: int) -> None:
        """Show how many samples of a phase are scored; ignores phases but the current one."""
        if phase == self.phase:
            self.pace.count_samples(done, total)
            self._show_progress()

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics
        if "score/mean" in metrics:
            self.scores.append(metrics["score/mean"])
        self.pace.finish_step(step)
        self.progress.update(self.task, completed=step)
        parts = [self._position(step), self.summary()]
        if (left_s := self.pace.run_left_s) and step < self.pace.steps:
            parts.append(f"{format_seconds(left_s)} left")
        self._write_line("  ".join(filter(None, parts)))

    def warn(self, alarms: Mapping[str, str]) -> None:
        """Show the reward-hacking alarms by rule; a new one is also logged."""
        for rule, message in alarms.items():
            if rule not in self.alarms:
                LOG.warning("reward-hacking alarm %s: %s", rule, message)
        self.alarms = alarms

    def advise(self, advice: Mapping[str, str]) -> None:
        """Show advice for a run that does not learn, by symptom; each is also logged once."""
        for symptom, message in advice.items():
            if symptom not in self.logged_advice:
                LOG.warning("%s: %s", symptom, message)
        self.logged_advice |= advice.keys()
        self.advice = advice

    def summary(self) -> str:
        """One line about the last step: `score` of training samples, `held-out` of validation."""
        parts: list[str] = []
        for label, names in STEP_LINE.items():
            values = [self.metrics[name] for name in names if name in self.metrics]
            # A step of an asynchronous run may end without a finished sample: hide its speed of 0.
            finite = [value for value in values if isfinite(value) and (value or label != "tok/s")]
            parts += [f"{label} {value:.4g}" for value in finite[:1]]
        return "  ".join(parts)

    def render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, activity in self.roles.items():
            table.add_row(Text(name, style="cyan"), Text(activity))
        if self.pace.samples[1]:
            table.add_row(Text("samples", style="cyan"), Text(self._describe_samples()))
        left_s = self.pace.run_left_s
        left = "known after the first step" if left_s is None else format_seconds(left_s)
        table.add_row(Text("time left", style="cyan"), Text(left))
        table.add_row(Text("score", style="cyan"), Text(sparkline(self.scores), style="green"))
        table.add_row(Text("step", style="cyan"), Text(self.summary()))
        for rule, message in self.alarms.items():
            table.add_row(Text(f"alarm {rule}", style="red"), Text(message, style="red"))
        for symptom, message in self.advice.items():
            table.add_row(Text(symptom, style="yellow"), Text(message, style="yellow"))
        return Group(self.progress, table)

    def _position(self, step: int) -> str:
        steps = str(self.pace.steps)
        return f"step {step:>{len(steps)}}/{steps}"

    def _describe_samples(self) -> str:
        done, total = self.pace.samples
        left_s = self.pace.samples_left_s
        left = f", {format_seconds(left_s)} left" if left_s else ""
        return f"{done}/{total}{left}"

    def _show_progress(self) -> None:
        """Write a plain line about the current step, at most every PROGRESS_EVERY_S seconds."""
        if self.is_live or self._clock() - self._last_line < PROGRESS_EVERY_S:
            return
        samples = f"  samples {self._describe_samples()}" if self.pace.samples[1] else ""
        step = min(self.pace.completed + 1, self.pace.steps)
        self._write_line(f"{self._position(step)}  {self.phase}{samples}")

    def _write_line(self, line: str) -> None:
        """Write to the log if it is shown, otherwise to the console, so that a script or notebook
        without logging shows the progress too."""
        if self.is_live:
            return
        self._last_line = self._clock()
        if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
            LOG.info("%s", line)
        elif self._prints_lines:
            self.console.print(Text(line), soft_wrap=True)


class Stopwatch:
    """Seconds of each phase of a step, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def finish(self) -> dict[str, float]:
        """The step's times as metrics; starts the next step."""
        now = time.perf_counter()
        times = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        times["time/step"] = now - self.started
        self.seconds, self.started = {}, now
        return times
