"""Comparison of runs: their curves in one picture, and first, best and last values in a table.

groups of runs (one line of the table and one colour each; seeds of one recipe are one group)
    -> summarise -> GroupSummary -> table, JSON
    -> draw_comparison -> PNG
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from rollick.errors import writing_to
from rollick.observe.diagnosis import format_duration
from rollick.observe.metrics import MetricRows
from rollick.observe.report import LOSS, disable_math_text

HELD_OUT = ("eval/pass@1", "eval/score")
TRAINING_SCORE = "score/mean"
DEFAULT_METRICS = (*HELD_OUT, TRAINING_SCORE, LOSS)
"""Metrics that show whether a run learns; the first one that all runs have is compared."""
TITLES = {
    "eval/pass@1": "held-out prompts, pass@1",
    "eval/score": "held-out prompts, mean score",
    TRAINING_SCORE: "training, mean score",
}
SMOOTHED_PARTS = 20
"""The thick line of a training curve is a moving average over 1/20 of its steps."""


@dataclass(frozen=True, slots=True)
class RunCurves:
    name: str
    seed: int
    rows: MetricRows

    def points(self, metric: str) -> dict[float, float]:
        """The metric's values by step."""
        return {row["step"]: row[metric] for row in self.rows if metric in row}


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that differ only in their seeds."""

    label: str
    runs: Sequence[RunCurves]


@dataclass(frozen=True, slots=True)
class MeanAndDeviation:
    """Mean over the runs of a group, and the standard deviation if there are several."""

    mean: float
    deviation: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanAndDeviation:
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        deviation = "" if self.deviation is None else f" ± {self.deviation:.2g}"
        return f"{self.mean:.3g}{deviation}"


@dataclass(frozen=True, slots=True)
class GroupSummary:
    label: str
    runs: Sequence[str]
    seeds: Sequence[int]
    steps: int
    """Steps that every run of the group has made."""
    first: MeanAndDeviation
    best: MeanAndDeviation
    last: MeanAndDeviation
    seconds: float
    """Mean duration of a run."""


def common_metric(groups: Sequence[RunGroup]) -> str | None:
    """The default metric that every run has; None if they have none in common. The mean score
    replaces held-out pass@1 if no run ever passes, as with rewards between 0 and 1."""
    runs = [run for group in groups for run in group.runs]
    common = [name for name in DEFAULT_METRICS if all(run.points(name) for run in runs)]
    if tuple(common[:2]) == HELD_OUT:
        passes = any(value for run in runs for value in run.points(HELD_OUT[0]).values())
        return HELD_OUT[0] if passes else HELD_OUT[1]
    return common[0] if common else None


def summarise(group: RunGroup, metric: str) -> GroupSummary:
    """First, best and last value of a metric, over the runs of a group."""
    curves = [list(run.points(metric).values()) for run in group.runs]
    choose_best = min if metric == LOSS else max
    seconds = [sum(row.get("time/step", 0.0) for row in run.rows) for run in group.runs]
    return GroupSummary(
        label=group.label,
        runs=[run.name for run in group.runs],
        seeds=[run.seed for run in group.runs],
        steps=min(int(run.rows[-1]["step"]) for run in group.runs),
        first=MeanAndDeviation.of([values[0] for values in curves]),
        best=MeanAndDeviation.of([choose_best(values) for values in curves]),
        last=MeanAndDeviation.of([values[-1] for values in curves]),
        seconds=fmean(seconds),
    )


def comparison_table(summaries: Sequence[GroupSummary], metric: str) -> Table:
    table = Table(title=f"{metric}, mean ± standard deviation over seeds")
    for name in ("runs", "seeds", "steps", "first", "best", "last", "time"):
        table.add_column(name, justify="left" if name == "runs" else "right", overflow="fold")
    for row in summaries:
        seeds = ", ".join(str(seed) for seed in row.seeds)
        values = [str(value) for value in (row.first, row.best, row.last)]
        table.add_row(row.label, seeds, str(row.steps), *values, format_duration(row.seconds))
    return table


@disable_math_text()
def draw_comparison(path: Path, groups: Sequence[RunGroup], metrics: Sequence[str]) -> Path:
    """Plot the metrics of all runs over the steps: a thin line for each run, a thick one for the
    mean of a group, and the range between its runs."""
    from matplotlib.figure import Figure

    runs = [run for group in groups for run in group.runs]
    plotted = [metric for metric in metrics if any(run.points(metric) for run in runs)]
    figure = Figure(figsize=(6 * len(plotted), 4.5), layout="constrained")
    panels = figure.subplots(1, len(plotted), squeeze=False)[0]
    for axes, metric in zip(panels, plotted, strict=True):
        for index, group in enumerate(groups):
            _plot_group(axes, group, metric, color=f"C{index % 10}")
        axes.set(title=TITLES.get(metric, metric), xlabel="step")
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    lines, labels = panels[0].get_legend_handles_labels()
    if lines:
        columns = max(1, min(3, len(labels)))
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, fontsize=8)
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    return path


def _plot_group(axes: Any, group: RunGroup, metric: str, *, color: str) -> None:
    curves = [points for run in group.runs if (points := run.points(metric))]
    if not curves:
        axes.plot([], [], color=color, lw=2, label=group.label)
        return
    steps = sorted(set.intersection(*(set(points) for points in curves)))
    values = [[points[step] for points in curves] for step in steps]
    width = 1 if metric.startswith("eval/") else max(1, len(steps) // SMOOTHED_PARTS)
    mean = _smooth([fmean(step_values) for step_values in values], width)
    for points in curves:
        if width > 1 or len(curves) > 1:
            axes.plot(list(points), list(points.values()), color=color, lw=0.7, alpha=0.35)
    if len(curves) > 1:
        low = _smooth([min(step_values) for step_values in values], width)
        high = _smooth([max(step_values) for step_values in values], width)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)
    marker = "o" if metric.startswith("eval/") or len(steps) == 1 else ""
    axes.plot(steps, mean, color=color, lw=2, marker=marker, markersize=4, label=group.label)


def _smooth(values: Sequence[float], width: int) -> list[float]:
    """Means over `width` neighbours; fewer at both ends."""
    half = width // 2
    return [fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]
