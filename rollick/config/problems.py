"""Problems of a recipe: where they are, and how they are printed.

source.py, validation_messages.py and rules/ create Problems; `raise_problems` turns a list of them
into one ConfigError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollick.config.names import find_similar
from rollick.errors import ConfigError

KeyPath = tuple[str | int, ...]

MAX_SHOWN = 60
"""Maximum characters of a value in a message."""


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
    """A problem of a recipe, printed as `location: path: message; fix`."""

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


def format_path(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)


def show(value: Any) -> str:
    """A value as written in a recipe, shortened to one line."""
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
    """The type and shortened repr of a Python or JSON value."""
    return f"{type(value).__name__} {_shorten(repr(value))}"


def did_you_mean(name: object, known: Sequence[str]) -> str:
    """Suggests the most similar known name; empty if none is similar."""
    similar = find_similar(str(name), list(known), count=1)
    return f"did you mean {similar[0]!r}?" if similar else ""
