"""Figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table


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
