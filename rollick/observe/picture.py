"""The timeline of a simulated run as a PNG: how full the engines are, and what the trainer does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

COLORS = {"generate": "#d9d9d9", "train": "#4c78a8", "publish": "#f58518"}
"""Of the trainer's phases; waiting for a batch is grey."""


def draw_timeline(
    path: Path,
    points: Sequence[tuple[float, int, int]],
    phases: Sequence[tuple[float, str]],
    *,
    slots: int,
    title: str,
) -> None:
    """Slots in use and waiting requests over time, above what the trainer does.

    points: (seconds, samples that run, requests that wait); phases: (begin, what the trainer does).
    """
    # Here, since a simulation without a picture has no need of it.
    import matplotlib.figure

    times = [at_s for at_s, _, _ in points]
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    engines, trainer = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    used = [min(1.0, running / slots) for _, running, _ in points]
    engines.fill_between(times, used, step="post", color="#54a24b", alpha=0.8, lw=0)
    engines.set(ylim=(0, 1.02), ylabel="slots in use")
    queue = engines.twinx()
    queue.plot(times, [waiting for _, _, waiting in points], color="#b279a2", lw=0.8)
    queue.set(ylabel="requests that wait", ylim=(0, None))
    for (begin, phase), (end, _) in pairwise(phases):
        if phase in COLORS:
            trainer.axvspan(begin, end, color=COLORS[phase], lw=0)
    trainer.set(yticks=[], xlabel="seconds", ylabel="trainer")
    figure.suptitle(f"{title} (blue: trains, grey: waits for a batch, orange: publishes)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
