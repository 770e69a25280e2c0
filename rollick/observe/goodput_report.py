"""Shows where the time of a run went, and its faults: lines, a bar, and a table."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path

from rollick.observe.diagnosis import format_duration
from rollick.observe.faults import read_faults
from rollick.observe.goodput import Goodput, RoleFaults, State, read_goodput, summarise_faults

COLORS: Mapping[State, str] = {
    "start": "#9d9da1",
    "train": "#4c78a8",
    "generate": "#54a24b",
    "wait": "#d9d9d9",
    "publish": "#f58518",
    "save": "#b279a2",
    "validate": "#72b7b2",
    "recover": "#e45756",
    "redo": "#8c2d2d",
}
MIN_LABEL = 0.06
"""Smaller shares have no label in the bar, only in the legend."""
MIN_LOST_S = 0.05
"""A smaller cost of faults is not shown."""


@dataclass(frozen=True, slots=True)
class Reliability:
    """The time and the faults of a run."""

    goodput: Goodput
    faults: Sequence[RoleFaults] = ()

    @classmethod
    def read(cls, folder: Path) -> Reliability:
        return cls(read_goodput(folder), summarise_faults(read_faults(folder)))

    def lines(self) -> list[str]:
        """A few plain lines; none if the run has recorded no time."""
        goodput = self.goodput
        if not goodput.wall_s:
            return []
        shares = ", ".join(f"{state} {_percent(share)}" for state, share in goodput.shares.items())
        lost = (
            f", {format_count(goodput.redone_steps, 'step')} done again"
            if goodput.redone_steps
            else ""
        )
        ettr = f"effective training time ratio (ETTR) {goodput.ettr:.1%}{lost}"
        lines = [f"time: {format_duration(goodput.wall_s)}: {shares}", ettr]
        return [
            *lines,
            *(f"faults of {role.role}: {describe_faults(role)}" for role in self.faults),
        ]

    def html_section(self) -> str:
        """The section of report.html; empty if the run has recorded no time."""
        if not self.goodput.wall_s:
            return ""
        image = base64.b64encode(draw_time_bar(self.goodput)).decode()
        bar = f"<img alt='time by state' src='data:image/png;base64,{image}'>"
        tables = _time_table(self.goodput) + _faults_table(self.faults)
        return f"<h2>Where the time went</h2>{bar}{tables}"


def describe_faults(role: RoleFaults) -> str:
    parts = [_describe_kinds(role)]
    if role.median_s is not None and role.longest_s is not None:
        median, longest = format_duration(role.median_s), format_duration(role.longest_s)
        parts.append(f"repaired in {median} (median; longest {longest})")
    if role.lost_s >= MIN_LOST_S:
        parts.append(f"cost {format_duration(role.lost_s)} of the run")
    if role.gave_up:
        parts.append(f"{role.gave_up} not repaired")
    if role.redone_steps:
        parts.append(f"{format_count(role.redone_steps, 'step')} done again")
    return "; ".join(parts)


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _describe_kinds(role: RoleFaults) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in role.kinds.items())


def draw_time_bar(goodput: Goodput) -> bytes:
    """A stacked bar of the run's wall time by state, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.7), layout="constrained")
    axes, left = figure.subplots(), 0.0
    for state, share in goodput.shares.items():
        label = f"{state} {_percent(share)}"
        axes.barh(0, share, left=left, color=COLORS[state], label=label)
        if share >= MIN_LABEL:
            axes.text(left + share / 2, 0, label, ha="center", va="center", fontsize=8)
        left += share
    axes.set(xlim=(0, 1), ylim=(-0.4, 0.4), yticks=[], xticks=[])
    axes.set_title(f"{format_duration(goodput.wall_s)}, ETTR {goodput.ettr:.1%}", fontsize=10)
    axes.legend(fontsize=8, ncols=9, loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False)
    for side in axes.spines.values():
        side.set_visible(False)
    picture = BytesIO()
    figure.savefig(picture, dpi=110)
    return picture.getvalue()


def _time_table(goodput: Goodput) -> str:
    shares = goodput.shares.items()
    rows = [[s, format_duration(goodput.seconds[s]), f"{share:.1%}"] for s, share in shares]
    rows += [["ETTR", "", f"{goodput.ettr:.1%}"]]
    rows += [["redone steps", str(goodput.redone_steps), ""]] if goodput.redone_steps else []
    return _table(["", "time", "share"], rows)


def _faults_table(faults: Sequence[RoleFaults]) -> str:
    if not faults:
        return ""
    head = ["role", "faults", "kinds", "median repair", "longest repair", "cost", "not repaired"]
    rows: list[list[str]] = []
    for role in faults:
        cost_s = role.lost_s if role.lost_s >= MIN_LOST_S else None
        seconds = (role.median_s, role.longest_s, cost_s)
        times = ["" if s is None else format_duration(s) for s in seconds]
        rows.append(
            [role.role, str(role.count), _describe_kinds(role), *times, str(role.gave_up or "")]
        )
    return f"<h2>Faults</h2>{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{titles}</tr>{body}</table>"
