"""What a sample does now, in words, and who a batch waits for. Pure.

"group 37: sample 3 in tool search for 310 s, sample 5 being scored for 12 s"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from rollick.types import SampleId

NAMED_WAITS = 4
"""Samples that a message about a wait names; the others are counted."""

WAITING = "waiting for an engine"
GENERATING = "generating on engine"
PREFILLING = "prefilling on engine"
"""Until the first token."""
QUEUED = "queued on engine"
"""In the engine's own queue."""
SCORING = "being scored"
BETWEEN_TURNS = "between turns"
IN_GROUP = "waiting for its group"
PARKED = "parked"
"""Put off to a long round (see rules.py)."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a sample does, and since when (the event loop's seconds)."""

    what: str
    since: float


@cache
def generating(engine: int) -> str:
    return f"{GENERATING} {engine}"


@cache
def parts_of_generating(what: str) -> tuple[str, str]:
    """For `generating on engine 3`: the words for its engine's queue and for the prefill there."""
    engine = what.removeprefix(GENERATING)
    return QUEUED + engine, PREFILLING + engine


@cache
def kind_of(what: str) -> str:
    """What a sample does, without the number of an engine."""
    kinds = (GENERATING, PREFILLING, QUEUED)
    return next((kind for kind in kinds if what.startswith(kind)), what)


def name_waits(doing: Mapping[SampleId, Doing], *, now: float) -> str:
    """The samples that are waited for, group by group, in the order of the mapping."""
    named: list[str] = []
    first = list(doing.items())[:NAMED_WAITS]
    for group, members in groupby(first, key=lambda item: item[0].group):
        said = [
            f"sample {uid.index} {does.what} for {_seconds(now - does.since)}"
            for uid, does in members
        ]
        named.append(f"group {group}: {', '.join(said)}")
    if len(doing) > NAMED_WAITS:
        named.append(f"and {len(doing) - NAMED_WAITS} more samples")
    return "; ".join(named)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
