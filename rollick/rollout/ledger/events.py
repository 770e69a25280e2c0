"""Events of the ledger and of its log, which stores each one as a line of JSON.

Decoding is strict: a line with an unknown event, a missing or extra field or a value of another
type is not an event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """A group got a slot; `size` samples wait."""

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
class GroupCompleted:
    """A group has enough samples; the others are cancelled."""

    group: int


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """A group will not be trained on."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupDeferred:
    """A group waits for a long round; all its samples will be generated again."""

    group: int


@dataclass(frozen=True, slots=True)
class GroupRestarted:
    """A deferred group got a slot again, at `version`."""

    group: int
    version: int


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """A batch was trained. `version` is the one after it (unchanged if the step was skipped)."""

    groups: tuple[int, ...]
    version: int


@dataclass(frozen=True, slots=True)
class CheckpointMarked:
    """The checkpoint of `step` has the ledger's state at this line: `started` groups so far."""

    step: int
    started: int


@dataclass(frozen=True, slots=True)
class RunRestored:
    """A run resumed from the checkpoint of `step`; events since its CheckpointMarked are void."""

    step: int


GroupEvent = GroupStarted | GroupCompleted | GroupDropped | GroupDeferred | GroupRestarted
Event = GroupEvent | SampleDone | BatchTrained | CheckpointMarked | RunRestored

_NAMES: Mapping[type[Event], str] = {
    GroupStarted: "started",
    SampleDone: "done",
    GroupCompleted: "complete",
    GroupDropped: "dropped",
    GroupDeferred: "deferred",
    GroupRestarted: "restarted",
    BatchTrained: "trained",
    CheckpointMarked: "checkpoint",
    RunRestored: "restored",
}
_TYPES = {kind: {f.name: str(f.type) for f in fields(kind)} for kind in _NAMES}
_KINDS = {name: kind for kind, name in _NAMES.items()}


def encode(event: Event) -> bytes:
    """The event as one line."""
    kind = type(event)
    row: dict[str, Any] = {"event": _NAMES[kind]}
    for name in _TYPES[kind]:
        row[name] = getattr(event, name)
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """The event of a complete line; None if the line is not a valid event."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    values = cast("dict[str, Any]", row)
    kind = _KINDS.get(str(values.pop("event", "")))
    if kind is None or values.keys() != _TYPES[kind].keys():
        return None
    if not all(_has_type(values[name], type_) for name, type_ in _TYPES[kind].items()):
        return None
    make = cast("Callable[..., Event]", kind)
    return make(**{n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _has_type(value: object, name: str) -> bool:
    """Whether a JSON value fits a field of the type `name`; a bool is not an int."""
    if name == "tuple[int, ...]":
        items = cast("list[object]", value)
        return isinstance(value, list) and all(type(item) is int for item in items)
    return type(value).__name__ == name
