"""The record of one group in flight and of its samples, and how it is saved.

    sample   WAITING -> RUNNING -> SCORING -> DONE
             RUNNING -> WAITING (its engine is lost)    not DONE -> CANCELLED (its group has enough)
    group    OPEN -> COMPLETE -> TAKEN -> trained
             OPEN or COMPLETE -> DEFERRED -> OPEN       OPEN or COMPLETE -> dropped, with a reason

The ledger decides which of these transitions happens when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, cast

from rollick.errors import CheckpointError
from rollick.types import PolicyVersion, Prompt, SampleId, Turn


class LedgerError(AssertionError):
    """An impossible transition: a bug in rollick, not a mistake of the user."""


class SampleState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SCORING = "scoring"
    DONE = "done"
    CANCELLED = "cancelled"
    """A spare that its group did not need."""


class GroupState(StrEnum):
    """The state of a group; trained and dropped groups are not in the ledger."""

    OPEN = "open"
    COMPLETE = "complete"
    TAKEN = "taken"
    DEFERRED = "deferred"
    """Waits for a long round; it has no slot."""


ENDED = frozenset({SampleState.DONE, SampleState.CANCELLED})


@dataclass(slots=True)
class GroupRecord:
    """A group that is neither trained nor dropped."""

    uid: int
    prompt: Prompt
    start_version: PolicyVersion
    """The policy version when it started, or started again after it was deferred."""
    samples: list[SampleState]
    state: GroupState = GroupState.OPEN
    done: int = 0
    was_deferred: bool = False
    """Whether it was ever deferred."""
    was_reported: bool = False
    """Whether it was complete before it was deferred: its scores are reported only once."""

    def unfinished(self) -> tuple[SampleId, ...]:
        states = enumerate(self.samples)
        return tuple(SampleId(self.uid, index) for index, state in states if state not in ENDED)

    def to_json(self) -> dict[str, Any]:
        """What a resumed run needs of a group. A taken batch is complete again."""
        prompt, samples = self.prompt, list(enumerate(self.samples))
        return {
            "uid": self.uid,
            "started": int(self.start_version),
            "state": GroupState.COMPLETE if self.state is GroupState.TAKEN else self.state,
            "done": [index for index, state in samples if state is SampleState.DONE],
            "cancelled": [index for index, state in samples if state is SampleState.CANCELLED],
            "size": len(samples),
            "was_deferred": self.was_deferred,
            "was_reported": self.was_reported,
            "prompt": {
                "uid": prompt.uid,
                "domain": prompt.domain,
                "turns": [[turn.role, turn.content] for turn in prompt.turns],
                # Types that JSON does not have (such as dates) become text, as in data/store.py.
                "row": json.loads(json.dumps(dict(prompt.row), default=str)),
            },
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> GroupRecord:
        """The saved group; samples that were being generated or scored wait again."""
        prompt = saved["prompt"]
        samples = [SampleState.WAITING] * saved["size"]
        for state in (SampleState.DONE, SampleState.CANCELLED):
            for index in cast("list[int]", saved[state]):
                samples[index] = state
        turns = cast("list[list[str]]", prompt["turns"])
        turns = tuple(Turn(role, content) for role, content in turns)
        return cls(
            saved["uid"],
            Prompt(prompt["uid"], prompt["domain"], turns, prompt["row"]),
            PolicyVersion(saved["started"]),
            samples,
            GroupState(saved["state"]),
            done=len(saved["done"]),
            was_deferred=saved["was_deferred"],
            was_reported=saved["was_reported"],
        )


class RemovedGroups(NamedTuple):
    """Groups that a staleness rule dropped (with the reason) or deferred."""

    dropped: tuple[tuple[int, str], ...] = ()
    unfinished: tuple[SampleId, ...] = ()
    """Their unfinished samples, which the caller must stop."""
    deferred: tuple[int, ...] = ()


class TakenBatch(NamedTuple):
    """The groups of a batch, ordered by id, and what the rule removed when it was taken."""

    uids: tuple[int, ...]
    removed: RemovedGroups = RemovedGroups()


def check_group_size(group: GroupRecord, *, group_size: int, spares: int) -> None:
    """Raises if a saved group has another number of samples than a new one."""
    saved = len(group.samples)
    if saved == group_size + spares:
        return
    with_spares = f" with {spares} spares" if spares else ""
    raise CheckpointError(
        f"rollout.group_size is {group_size}{with_spares}, but group {group.uid} of the checkpoint "
        f"has {saved} samples",
        fix=f"resume with rollout.group_size={saved - spares}",
    )
