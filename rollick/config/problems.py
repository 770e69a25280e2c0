"""Problems of a recipe: where they are, and how they are printed.

A Problem is data: locations and rules come from elsewhere (source.py, wording.py, rules/), and
`raise_problems` turns a list of them into one ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollick.config.names import nearest
from rollick.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_SHOWN = 60
"""Characters of a value that a message repeats."""


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """Where a value is set: a file with line and column, an override, or a call."""

    origin: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}:{self.column}" if self.line else self.origin


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to repair: `location: path: message; fix`."""

    location: Location
    path: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.location}: {self.path}: " if self.path else f"{self.location}: "
        return f"{head}{self.message}; {self.fix}" if self.fix else f"{head}{self.message}"


def raise_problems(problems: Sequence[Problem], *, origin: str) -> None:
    """Raises one ConfigError with all problems, in the order of the file, if there are any."""
    if not problems:
        return
    ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.location)
    count = f"{len(ordered)} problem{'s' if len(ordered) > 1 else ''}"
    raise ConfigError("\n".join([f"{origin} has {count}:", *(f"  {line}" for line in ordered)]))


def dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def show(value: Any) -> str:
    """A value as in a recipe, short enough for a line."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case dict():
            return "a section"
        case list() | tuple():
            return "a list"
        case _:
            return _shorten(repr(value))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def describe_value(value: object) -> str:
    """Type and start of a value of Python or JSON, for messages."""
    return f"{type(value).__name__} {_shorten(repr(value))}"


def did_you_mean(name: object, known: Sequence[str]) -> str:
    """A question with the closest known name; empty if none is close."""
    close = nearest(str(name), list(known), count=1)
    return f"did you mean {close[0]!r}?" if close else ""
