"""Tables of metrics and rewards for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollick.observe.terminal import SafeConsole, escape_controls

MAX_CHARACTERS = 60
"""Maximum characters of a completion in a table."""


def stderr_console() -> Console:
    """A console on stderr for progress; stdout is for results."""
    return SafeConsole(stderr=True)


def evaluation_table(figures: Mapping[str, Mapping[str, float]], *, title: str = "") -> Table:
    columns = list(dict.fromkeys(column for row in figures.values() for column in row))
    table = Table(title=title or None)
    table.add_column("domain", overflow="fold")
    for column in columns:
        # Fold on a narrow terminal: a truncated number would be wrong.
        table.add_column(column, justify="right", overflow="fold")
    for name, row in figures.items():
        table.add_row(name, *(f"{row[c]:.4g}" if c in row else "" for c in columns))
    return table


class CheckResult(Protocol):
    """A check of `rollick selftest`."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def fix(self) -> str: ...
    @property
    def seconds(self) -> float: ...


def check_row(check: CheckResult) -> Text:
    """One line, and what to do if the check did not pass."""
    color = {"pass": "green", "fail": "red"}.get(check.status, "yellow")
    row = Text(f"{check.name:<12}").append(f"{check.status:<6}", style=color)
    row.append(f"{check.seconds:5.1f} s  {escape_controls(check.detail)}")
    if check.status != "pass":
        row.append(f"\n{'':12}{'':6}{'':9}{escape_controls(check.fix)}")
    return row


def reward_table(results: Sequence[Mapping[str, Any]]) -> Table:
    """The result of a reward for each completion: value, parts, time and isolation."""
    table = Table("completion", "value", "parts", "ms", "status", "isolation", "detail")
    for result in results:
        text = escape_controls(" ".join(str(result["completion"]).split()))
        parts = {**result["parts"], **result["metrics"]}
        table.add_row(
            Text(text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."),
            "-" if result["value"] is None else f"{result['value']:.4g}",
            Text(", ".join(f"{name} {value:.4g}" for name, value in parts.items())),
            f"{1000 * result['seconds']:.3g}",
            Text(result["status"], style="green" if result["status"] == "ok" else "red"),
            result["isolation"],
            Text(escape_controls(result["detail"])),
        )
    return table
