"""The record of one group in flight, with its samples, how it is saved, and what is told of it.

    sample   WAITING -> RUNNING -> SCORING -> DONE
             RUNNING -> WAITING (its engine is lost)    not DONE -> CANCELLED (its group has enough)
    group    OPEN -> COMPLETE -> TAKEN -> trained
             OPEN or COMPLETE -> PARKED -> OPEN         OPEN or COMPLETE -> dropped, with a reason

Owns no rule: what may happen when is the ledger's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from rollick.errors import CheckpointError
from rollick.types import PolicyVersion, Prompt, SampleId, Turn


class LedgerError(AssertionError):
    """A transition that cannot happen: an error of ours, not of the user's."""


class SampleState(StrEnum):
    """Where one sample of a group is."""

    WAITING = "waiting"
    RUNNING = "running"
    SCORING = "scoring"
    DONE = "done"
    CANCELLED = "cancelled"
    """A spare that its group did not need."""


class GroupState(StrEnum):
    """Where a group is; what was trained or dropped is not in the ledger any more."""

    OPEN = "open"
    COMPLETE = "complete"
    TAKEN = "taken"
    PARKED = "parked"
    """Put off to a round of long samples; it has no place."""


ENDED = frozenset({SampleState.DONE, SampleState.CANCELLED})


@dataclass(slots=True)
class LiveGroup:
    """A group that is neither trained nor dropped."""

    uid: int
    prompt: Prompt
    started: PolicyVersion
    samples: list[SampleState]
    state: GroupState = GroupState.OPEN
    done: int = field(default=0)
    deferred: bool = False
    """Whether it was parked, now or before."""
    judged: bool = False
    """Whether it was complete when it was parked: the second time is no news of its prompt."""

    def under_way(self) -> tuple[SampleId, ...]:
        """The samples from which something is still to come."""
        return tuple(
            SampleId(self.uid, index)
            for index, state in enumerate(self.samples)
            if state not in ENDED
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """One sample that a batch waits for."""

    uid: SampleId
    state: SampleState


@dataclass(frozen=True, slots=True)
class Removed:
    """Groups that a rule dropped, with the reason, or deferred, and their samples under way."""

    dropped: tuple[tuple[int, str], ...] = ()
    cancelled: tuple[SampleId, ...] = ()
    deferred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch, in the order of ids, and what the rule dropped or deferred when it was taken."""

    uids: tuple[int, ...]
    dropped: tuple[tuple[int, str], ...] = ()
    cancelled: tuple[SampleId, ...] = ()
    deferred: tuple[int, ...] = ()


def group_to_json(group: LiveGroup) -> dict[str, Any]:
    """What a resumed run needs of a group. A batch that was taken is complete again."""
    prompt = group.prompt
    state = GroupState.COMPLETE if group.state is GroupState.TAKEN else group.state
    return {
        "uid": group.uid,
        "started": int(group.started),
        "state": state,
        "done": _indices(group, SampleState.DONE),
        "cancelled": _indices(group, SampleState.CANCELLED),
        "size": len(group.samples),
        "deferred": group.deferred,
        "judged": group.judged,
        "prompt": {
            "uid": prompt.uid,
            "domain": prompt.domain,
            "turns": [[turn.role, turn.content] for turn in prompt.turns],
            # What JSON does not know (a date, say) becomes text, as in data/store.py.
            "row": json.loads(json.dumps(dict(prompt.row), default=str)),
        },
    }


def group_from_json(saved: Mapping[str, Any]) -> LiveGroup:
    """The group as it was saved; what was being generated or scored waits again."""
    told = saved["prompt"]
    turns = cast("list[list[str]]", told["turns"])
    prompt = Prompt(
        uid=told["uid"],
        domain=told["domain"],
        turns=tuple(Turn(role, content) for role, content in turns),
        row=told["row"],
    )
    samples = [SampleState.WAITING] * saved["size"]
    for state in (SampleState.DONE, SampleState.CANCELLED):
        for index in cast("list[int]", saved[state]):
            samples[index] = state
    state, started = GroupState(saved["state"]), PolicyVersion(saved["started"])
    group = LiveGroup(saved["uid"], prompt, started, samples, state, len(saved["done"]))
    group.deferred, group.judged = saved["deferred"], saved["judged"]
    return group


def refuse_other_size(group: LiveGroup, *, group_size: int, spares: int) -> None:
    """A saved group must have as many samples as a new one would."""
    saved = len(group.samples)
    if saved == group_size + spares:
        return
    beside = f" with {spares} spares" if spares else ""
    raise CheckpointError(
        f"rollout.group_size is {group_size}{beside}, but group {group.uid} of the checkpoint has "
        f"{saved} samples",
        fix=f"resume with rollout.group_size={saved - spares}",
    )


def _indices(group: LiveGroup, wanted: SampleState) -> list[int]:
    return [index for index, state in enumerate(group.samples) if state is wanted]
