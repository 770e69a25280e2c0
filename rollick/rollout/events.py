"""What happened to groups, as records: what the ledger tells and the log keeps.

One event is one line of JSON. Decoding is strict: a line with an unknown event, a missing or
further field or a value of another type is not an event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Started:
    """A group got a place; `size` samples wait."""

    group: int
    prompt: str
    domain: str
    version: int
    size: int


@dataclass(frozen=True, slots=True)
class SampleDone:
    """A sample is generated and scored."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class Completed:
    """A group has enough samples; those not done are surplus."""

    group: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group will not be trained."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A group was put off; its samples wait for a new start."""

    group: int


@dataclass(frozen=True, slots=True)
class Unparked:
    """A parked group has a place again, from `version` on."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class Trained:
    """A batch was trained, which made `version`."""

    groups: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class Marked:
    """The ledger's state went into the checkpoint of `step`; `started` groups were started."""

    step: int
    started: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A run goes on from the checkpoint of `step`: what came after that mark does not count."""

    step: int


Event = (
    Started
    | SampleDone
    | Completed
    | Dropped
    | Parked
    | Unparked
    | Trained
    | Marked
    | Restored
)  # fmt: skip

_NAMES: Mapping[type[Event], str] = {
    Started: "started",
    SampleDone: "done",
    Completed: "complete",
    Dropped: "dropped",
    Parked: "parked",
    Unparked: "unparked",
    Trained: "trained",
    Marked: "checkpoint",
    Restored: "restored",
}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in _NAMES}
_TYPES = {kind: {f.name: str(f.type) for f in fields(kind)} for kind in _NAMES}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def encode(event: Event) -> bytes:
    """The event as one line, with its end."""
    kind = type(event)
    told: dict[str, Any] = {"event": _NAMES[kind]}
    for name in _FIELDS[kind]:
        told[name] = getattr(event, name)
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """The event of a whole line; None if it is not one."""
    if not line.endswith(b"\n"):
        return None
    try:
        told = json.loads(line)
    except ValueError:
        return None
    if not isinstance(told, dict):
        return None
    values = cast("dict[str, Any]", told)
    kind = _KINDS.get(str(values.pop("event", "")))
    if kind is None or values.keys() != _TYPES[kind].keys():
        return None
    if not all(_READS[type_](values[name]) for name, type_ in _TYPES[kind].items()):
        return None
    make = cast("Callable[..., Event]", kind)
    return make(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_int, cast("list[object]", value)))


_READS: Mapping[str, Callable[[object], bool]] = {
    "int": _is_int,
    "str": _is_str,
    "tuple[int, ...]": _is_ints,
}
