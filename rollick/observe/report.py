"""Pictures and a page to look at after a run: learning curves as PNG, a small HTML report.

The page has no scripts, loads nothing, and escapes all text that a model wrote.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

Rows = Sequence[Mapping[str, float]]

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.3rem .8rem;border-bottom:1px solid #ddd;
text-align:left;vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}
pre{white-space:pre-wrap;margin:0}img{max-width:100%}.good{color:#18794e}.bad{color:#b42318}
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One held-out prompt with what the policy said before and after training."""

    domain: str
    prompt: str
    before: str
    after: str
    before_ok: bool
    after_ok: bool


def draw_curves(rows: Rows, path: Path, *, title: str) -> Path:
    """Score by domain and validation over the steps, and the seconds of a step, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    scores, speed = figure.subplots(1, 2, width_ratios=(3, 1))
    for name, label in _curves(rows).items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        marker = "o" if name.startswith("eval/") else ""
        style = "--" if name.startswith("eval/") else "-"
        scores.plot(*zip(*points, strict=True), style, label=label, marker=marker, markersize=4)
    scores.set(title=title, xlabel="step", ylabel="score")
    scores.grid(alpha=0.3)
    if scores.get_lines():
        scores.legend(fontsize=8)
    phases = [f"time/{phase}" for phase in ("generate", "annotate", "train", "publish", "validate")]
    for name in phases:
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            speed.plot(*zip(*points, strict=True), label=name.removeprefix("time/"))
    speed.set(title="seconds by phase", xlabel="step")
    speed.grid(alpha=0.3)
    if speed.get_lines():
        speed.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _curves(rows: Rows) -> dict[str, str]:
    """Which metrics are drawn, with what people call them."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        parts = name.split("/")
        if name == "score/mean" or name.startswith("score/domain/"):
            labels[name] = f"training: {parts[-1] if len(parts) > 2 else 'all'}"
        elif parts[0] == "eval" and parts[-1] == "pass@1":
            labels[name] = f"held out: {parts[1] if len(parts) > 2 else 'all'}"
    return labels


def write_report(
    path: Path,
    *,
    title: str,
    table: Mapping[str, Mapping[str, float]],
    rows: Rows,
    exchanges: Sequence[Exchange] = (),
) -> Path:
    """The page: a table of results, the curves, and samples before and after."""
    picture = draw_curves(rows, path.with_suffix(".png"), title=title)
    image = base64.b64encode(picture.read_bytes()).decode()
    page = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<meta http-equiv='Content-Security-Policy' content=\"{POLICY}\">",
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _results(table),
        f"<img alt='learning curves' src='data:image/png;base64,{image}'>",
        _samples(exchanges),
        "</body></html>",
    ]
    path.write_text("\n".join(page), encoding="utf-8")
    return path


def _results(table: Mapping[str, Mapping[str, float]]) -> str:
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td class='n'>{row[c]:.3g}</td>" if c in row else "<td></td>" for c in columns)
        + "</tr>"
        for name, row in table.items()
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def _samples(exchanges: Sequence[Exchange]) -> str:
    if not exchanges:
        return ""

    def cell(text: str, ok: bool) -> str:
        return f"<td class='{'good' if ok else 'bad'}'><pre>{escape(text)}</pre></td>"

    body = "".join(
        f"<tr><td>{escape(e.domain)}</td><td><pre>{escape(e.prompt)}</pre></td>"
        f"{cell(e.before, e.before_ok)}{cell(e.after, e.after_ok)}</tr>"
        for e in exchanges
    )
    head = "<tr><th>domain</th><th>prompt</th><th>before</th><th>after</th></tr>"
    return f"<h2>Held-out prompts, before and after</h2><table>{head}{body}</table>"
