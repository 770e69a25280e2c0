"""Figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN = 60
"""Characters of a completion in a table."""


def side_console() -> Console:
    """What people read while it happens goes to stderr; stdout is for results."""
    return Console(stderr=True)


def evaluation_table(figures: Mapping[str, Mapping[str, float]], *, title: str = "") -> Table:
    """One row a domain, one column a figure."""
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    table = Table(title=title or None)
    table.add_column("domain", overflow="fold")
    for column in columns:
        # Folded where the terminal is narrow: a figure that is cut short is a wrong figure.
        table.add_column(column, justify="right", overflow="fold")
    for name, row in figures.items():
        table.add_row(name, *(f"{row[c]:.4g}" if c in row else "" for c in columns))
    return table


def reward_table(tried: Sequence[Mapping[str, Any]]) -> Table:
    """What a reward said of a few completions: value, parts, time, and where it ran."""
    table = Table("completion", "value", "parts", "ms", "status", "isolation", "detail")
    for one in tried:
        text = " ".join(str(one["completion"]).split())
        parts = {**one["parts"], **one["figures"]}
        table.add_row(
            Text(text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."),
            "-" if one["value"] is None else f"{one['value']:.4g}",
            Text(", ".join(f"{name} {value:.4g}" for name, value in parts.items())),
            f"{1000 * one['seconds']:.3g}",
            Text(one["status"], style="green" if one["status"] == "ok" else "red"),
            one["isolation"],
            Text(one["detail"]),
        )
    return table
