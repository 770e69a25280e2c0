"""Reports after a run: learning curves and the timeline of a simulation as PNG, an HTML page.

The page has no scripts, loads nothing, and escapes all model output.
"""

from __future__ import annotations

import base64
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollick.observe.goodput_report import Reliability
from rollick.observe.metrics import MetricRows

LOSS = "train/loss"

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;margin:0}img{max-width:100%}.good{color:#18794e}.bad{color:#b42318}
"""
COLORS = {"generate": "#d9d9d9", "train": "#4c78a8", "publish": "#f58518"}
"""Colours of the trainer's phases in a timeline; grey: waiting for a batch."""
CONTENT_SECURITY_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
MAX_TEXT = 1500
"""Maximum characters of a prompt or an answer on the page."""


@dataclass(frozen=True, slots=True)
class SampleComparison:
    """A prompt with its responses at the first and the last validation; `before` is None for
    training samples."""

    domain: str
    prompt: str
    before: str | None
    after: str
    before_ok: bool
    after_ok: bool


@contextmanager
def disable_math_text() -> Generator[None]:
    """Inside the block, matplotlib draws dollar signs as text, not as the start of a formula."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False, "text.usetex": False}):
        yield


@disable_math_text()
def draw_curves(rows: MetricRows, path: Path, *, title: str) -> Path:
    """Plot scores by domain, validation scores and phase durations over the steps, as one PNG.

    A run without training scores (supervised training) shows its loss instead.
    """
    from matplotlib.figure import Figure

    labels = curve_labels(rows)
    kinds = dict.fromkeys("loss" if name == LOSS else "score" for name in labels)
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = list(kinds) or ["score"]
    *curves, durations = figure.subplots(1, len(panels) + 1, width_ratios=(*(3 for _ in panels), 1))
    for axes, kind in zip(curves, panels, strict=True):
        panel_labels = {n: label for n, label in labels.items() if (n == LOSS) == (kind == "loss")}
        _plot(axes, rows, panel_labels)
        axes.set(xlabel="step", ylabel=kind)
    phases = ("generate", "annotate", "train", "publish", "validate")
    _plot(durations, rows, {f"time/{phase}": phase for phase in phases})
    curves[0].set_title(title)
    durations.set(title="seconds by phase", xlabel="step")
    figure.savefig(path, dpi=110)
    return path


def _plot(axes: Any, rows: MetricRows, labels: Mapping[str, str]) -> None:
    for name, label in labels.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        style = "--" if name.startswith("eval/") else "-"
        # A single point needs a marker to be visible.
        marker = "o" if name.startswith("eval/") or len(points) == 1 else ""
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, marker=marker, markersize=4)
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_lines():
        axes.legend(fontsize=8)


def curve_labels(rows: MetricRows) -> dict[str, str]:
    """The metrics that show whether a run learns, with labels: held-out, training, or loss."""
    labels: dict[str, str] = {}
    names = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        parts = name.split("/")
        if name == "score/mean" or name.startswith("score/domain/"):
            labels[name] = f"training: {parts[-1] if len(parts) > 2 else 'all'}"
        elif parts[0] == "eval" and parts[-1] == "pass@1":
            labels[name] = f"held-out: {parts[1] if len(parts) > 2 else 'all'}"
    if "score/mean" not in names and LOSS in names:
        labels[LOSS] = "loss"
    domains = {label.partition(": ")[2] for label in labels.values()} - {"all", ""}
    if len(domains) == 1:  # With one domain, its curves equal those of "all".
        labels = {
            n: label for n, label in labels.items() if label.partition(": ")[2] not in domains
        }
    return dict(sorted(labels.items(), key=lambda item: not item[0].startswith("eval/")))


def summarise_curves(rows: MetricRows) -> dict[str, dict[str, float]]:
    """First, best and last value of each curve, by label."""
    table: dict[str, dict[str, float]] = {}
    for name, label in curve_labels(rows).items():
        values = [row[name] for row in rows if name in row]
        best = min(values) if name == LOSS else max(values)
        table[label] = {"first": values[0], "best": best, "last": values[-1]}
    return table


def write_report(
    path: Path,
    rows: MetricRows,
    *,
    title: str,
    facts: Mapping[str, str],
    advice: Mapping[str, str],
    comparisons: Sequence[SampleComparison],
    reliability: Reliability,
) -> Path:
    """Write the page of a run: facts by name, a table of results, the curves of its metrics, advice
    by symptom, time and faults, samples."""
    picture = draw_curves(rows, path.with_suffix(".png"), title=title)
    image = base64.b64encode(picture.read_bytes()).decode()
    page = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<meta http-equiv='Content-Security-Policy' content=\"{CONTENT_SECURITY_POLICY}\">",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _name_table(facts),
        _results_table(summarise_curves(rows)),
        f"<img alt='learning curves' src='data:image/png;base64,{image}'>",
        f"<h2>What to try</h2>{_name_table(advice)}" if advice else "",
        reliability.html_section(),
        _samples_section(comparisons),
        "</body></html>",
    ]
    path.write_text("\n".join(page), encoding="utf-8")
    return path


def _name_table(texts: Mapping[str, str]) -> str:
    rows = [f"<tr><th>{escape(n)}</th><td>{escape(text)}</td></tr>" for n, text in texts.items()]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _results_table(table: Mapping[str, Mapping[str, float]]) -> str:
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = ""
    for name, row in table.items():
        cells = [f"<td class='n'>{row[c]:.3g}</td>" if c in row else "<td></td>" for c in columns]
        body += f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>"
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _samples_section(comparisons: Sequence[SampleComparison]) -> str:
    if not comparisons:
        return ""

    def cell(text: str, kind: str = "") -> str:
        excerpt = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} …"
        return f"<td class='{kind}'><pre>{escape(excerpt)}</pre></td>"

    def answer_cell(text: str, ok: bool) -> str:
        return cell(text, "good" if ok else "bad")

    paired = any(row.before is not None for row in comparisons)
    body = ""
    for row in comparisons:
        before = answer_cell(row.before or "", row.before_ok) if paired else ""
        after = answer_cell(row.after, row.after_ok)
        body += f"<tr><td>{escape(row.domain)}</td>{cell(row.prompt)}{before}{after}</tr>"
    columns = ("domain", "prompt", *(("first", "last") if paired else ("answer",)))
    head = "".join(f"<th>{column}</th>" for column in columns)
    title = "Held-out prompts, first and last validation" if paired else "Samples of the last step"
    return f"<h2>{title}</h2><table><tr>{head}</tr>{body}</table>"


@disable_math_text()
def draw_timeline(
    path: Path,
    points: Sequence[tuple[float, int, int]],
    phases: Sequence[tuple[float, str]],
    *,
    slots: int,
    title: str,
) -> None:
    """Plot slots in use and waiting requests over time, above the phases of the trainer.

    points: (seconds, running samples, waiting requests); phases: (begin, phase of the trainer).
    """
    from matplotlib.figure import Figure

    times = [seconds for seconds, _, _ in points]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    engines, trainer = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    used_shares = [min(1.0, running / slots) for _, running, _ in points]
    engines.fill_between(times, used_shares, step="post", color="#54a24b", alpha=0.8, lw=0)
    engines.set(ylim=(0, 1.02), ylabel="slots in use")
    queue = engines.twinx()
    queue.plot(times, [waiting for _, _, waiting in points], color="#b279a2", lw=0.8)
    queue.set(ylabel="waiting requests", ylim=(0, None))
    for (begin, phase), (end, _) in pairwise(phases):
        if phase in COLORS:
            trainer.axvspan(begin, end, color=COLORS[phase], lw=0)
    trainer.set(yticks=[], xlabel="seconds", ylabel="trainer")
    figure.suptitle(f"{title} (blue: training, grey: waiting for a batch, orange: publishing)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
