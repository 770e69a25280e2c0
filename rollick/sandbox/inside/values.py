"""Values of the standard library that pytest files and the candidate exchange as data.

    split_value(Fraction(1, 2)) -> ("fractions.Fraction", (1, 2)) -> join_value -> Fraction(1, 2)

Only these types are rebuilt, from numbers, text and lists; no code is sent. Runs inside both boxes:
see inside/__init__.py.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MARK = "\0rollick"
"""The first item of each tuple that represents a value which is not plain data."""


def _split_time(value: Any) -> tuple[Any, ...]:
    return (value.hour, value.minute, value.second, value.microsecond, value.tzinfo)


PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (value.year, value.month, value.day, *_split_time(value)),
    "datetime.time": _split_time,
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "uuid.UUID": lambda value: (str(value),),
}
"""By the name of a type: a function that returns the constructor arguments of a value."""


def split_value(value: Any) -> tuple[str, tuple[Any, ...]] | None:
    """(name of the type, arguments); None if the value is of another type."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in PARTS or getattr(sys.modules[kind.__module__], kind.__name__, None) is not kind:
        return None
    return name, PARTS[name](value)


def join_value(name: str, arguments: tuple[Any, ...]) -> Any:
    """The inverse of `split_value`. Raises what the type raises for other arguments."""
    if name not in PARTS:
        raise ValueError(f"unknown type {name!r}")
    module, _, kind = name.rpartition(".")
    return getattr(__import__(module), kind)(*arguments)
