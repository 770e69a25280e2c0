"""The ledger: which groups and samples are where, and which batch may be trained on next.

A pure state machine: no asyncio, no clock, no model. It owns the ids, the staleness rule and the
conservation law; the scheduler asks it and acts.

    sample   WAITING -> RUNNING -> SCORING -> DONE
    group    OPEN -> COMPLETE -> TAKEN -> trained
             OPEN or COMPLETE -> dropped, with a reason

Trained and dropped groups leave the ledger; only their numbers are kept. A *place* is what a group
occupies from its start until it is trained or dropped. There are B * (1 + K) places, for B groups
in a step and staleness K.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from math import ceil
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


class GroupState(StrEnum):
    """Where a group is; what was trained or dropped is not in the ledger any more."""

    OPEN = "open"
    COMPLETE = "complete"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Wait:
    """One sample that a batch waits for."""

    uid: SampleId
    state: SampleState


@dataclass(frozen=True, slots=True)
class Tally:
    """The conservation law of one kind: submitted = trained + dropped + waiting + running.

    Of samples, `running` are being generated or scored, and `waiting` wait for an engine or, being
    done, for their training. Of groups, `running` are open and `waiting` wait for their training.
    """

    submitted: int
    trained: int
    dropped: int
    waiting: int
    running: int

    @property
    def balanced(self) -> bool:
        return self.submitted == self.trained + self.dropped + self.waiting + self.running


@dataclass(frozen=True, slots=True)
class Counts:
    """Where everything that was ever submitted is now."""

    groups: Tally
    samples: Tally
    dropped_by_reason: Mapping[str, int]


@dataclass(slots=True)
class LiveGroup:
    """A group that has a place."""

    uid: int
    prompt: Prompt
    started: PolicyVersion
    samples: list[SampleState]
    state: GroupState = GroupState.OPEN
    done: int = field(default=0)


class Ledger:
    """Admits groups within the staleness budget and says which of them make the next batch.

    `count_down` gives the ids -1, -2, … instead of 0, 1, …, so that an evaluation beside a training
    never has a sample of the same name on an engine.
    """

    def __init__(
        self,
        groups_per_step: int,
        group_size: int,
        max_staleness: float = 0,
        *,
        drops_allowed: int | None = None,
        count_down: bool = False,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.horizon = ceil(max_staleness)
        # Rounded, since 10 * (1 + 0.1) is a little more than 11 in floating point.
        self.places = ceil(round(groups_per_step * (1 + max_staleness), 9))
        self._drops_allowed = drops_allowed
        self._count_down = count_down
        self._live: dict[int, LiveGroup] = {}  # in the order of their start
        self._next = 0
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._drops_in_step = 0
        self._in_state: Counter[GroupState] = Counter()
        self._published = PolicyVersion(0)
        # Places that open only when version `_held_until` is published.
        self._held = 0
        self._held_until = PolicyVersion(0)

    @property
    def drops_in_step(self) -> int:
        """Groups dropped since the last batch was taken."""
        return self._drops_in_step

    @property
    def complete_groups(self) -> int:
        return self._in_state[GroupState.COMPLETE]

    @property
    def held_until(self) -> PolicyVersion | None:
        """The version whose publishing opens places, if some are held for one."""
        return self._held_until if self._held else None

    @property
    def exhausted(self) -> bool:
        """Whether no batch can ever come: nothing is in flight and nothing may be refilled."""
        return not self._live and not self._held and not self.may_start()

    def group(self, uid: int) -> LiveGroup:
        """The record of a group that has a place."""
        if uid not in self._live:
            raise LedgerError(f"group {uid} is not in the ledger")
        return self._live[uid]

    def live(self) -> list[LiveGroup]:
        """All groups that have a place, in the order of their start."""
        return list(self._live.values())

    def may_start(self) -> bool:
        """started - trained - dropped < B * (1 + K).

        A place opened by training is held until the new version is published: a group that started
        in between would draw its first tokens from the old version and count as one of the new.
        A drop beyond the allowance keeps its place until the step is over.
        """
        return len(self._live) + self._held + self._unreplaced() < self.places

    def start_group(self, prompt: Prompt, version: PolicyVersion) -> int:
        """Give a place to a group; its samples wait. Ids count up and are never used again."""
        if not self.may_start():
            raise LedgerError(f"no place for a group: {len(self._live)} of {self.places} taken")
        newest = next(reversed(self._live.values())).started if self._live else version
        if version < newest:
            raise LedgerError(f"a group cannot start at version {version} after one at {newest}")
        uid = -1 - self._next if self._count_down else self._next
        self._next += 1
        waiting = [SampleState.WAITING] * self.group_size
        self._live[uid] = LiveGroup(uid, prompt, version, waiting)
        self._in_state[GroupState.OPEN] += 1
        return uid

    def sample_started(self, uid: SampleId) -> None:
        self._advance(uid, SampleState.WAITING, SampleState.RUNNING)

    def sample_finished(self, uid: SampleId) -> None:
        self._advance(uid, SampleState.RUNNING, SampleState.SCORING)

    def sample_scored(self, uid: SampleId) -> bool:
        """Returns whether it was the last of its group, which can then complete or be dropped."""
        group = self._advance(uid, SampleState.SCORING, SampleState.DONE)
        group.done += 1
        return group.done == self.group_size

    def complete(self, uid: int) -> None:
        group = self.group(uid)
        if group.done != self.group_size:
            raise LedgerError(f"group {uid} has {group.done} of {self.group_size} samples")
        self._move(group, GroupState.OPEN, GroupState.COMPLETE)

    def drop(self, uid: int, reason: str) -> None:
        """Take a group out. Its place is free at once, so that the refill is one for one."""
        group = self.group(uid)
        if group.state is GroupState.TAKEN:
            raise LedgerError(f"group {uid} is in a batch, so it cannot be dropped")
        self._in_state[group.state] -= 1
        del self._live[uid]
        self._dropped[reason] += 1
        self._drops_in_step += 1

    def forgive_drops(self) -> None:
        """Drops so far do not count against the allowance of the step under way."""
        self._drops_in_step = 0

    def take(self, version: PolicyVersion, count: int | None = None) -> list[int] | None:
        """The batch of the step that starts at `version`, in the order of ids; None means: wait.

        It contains every group whose time is up (see `_required`) and, for the rest, the complete
        groups with the lowest ids. It has fewer than `count` groups only where the drop allowance
        is spent and nothing is open any more.
        """
        count = self.groups_per_step if count is None else count
        if not 0 < count <= self.groups_per_step:
            raise LedgerError(f"a batch has 1 to {self.groups_per_step} groups, not {count}")
        if self._in_state[GroupState.TAKEN]:
            raise LedgerError("the batch before must be trained first")
        complete = self.complete_groups
        if not complete or (complete < count and not self._is_spent()):
            return None
        batch, short = self._choose(version, count)
        if short:
            return None
        for group in batch:
            self._move(group, GroupState.COMPLETE, GroupState.TAKEN)
        # What was dropped and not replaced stays empty until this batch is trained and published.
        self._hold(self._unreplaced(), PolicyVersion(version + 1))
        self._drops_in_step = 0
        return [group.uid for group in batch]

    def waits_for(self, version: PolicyVersion, count: int | None = None) -> list[Wait]:
        """The samples without which the batch of `version` cannot be taken, in the order of ids."""
        count = self.groups_per_step if count is None else count
        batch, short = self._choose(version, count)
        limit = len(self._live) if len(batch) < count else short
        return [
            Wait(SampleId(group.uid, index), state)
            for group in islice(self._live.values(), limit)
            if group.state is GroupState.OPEN
            for index, state in enumerate(group.samples)
            if state is not SampleState.DONE
        ]

    def trained(self, uids: Sequence[int], version: PolicyVersion) -> None:
        """The taken groups were trained on, which made `version` (the old one if skipped)."""
        for uid in uids:
            group = self.group(uid)
            if group.state is not GroupState.TAKEN:
                raise LedgerError(f"group {uid} is {group.state}, so it cannot have been trained")
            self._in_state[GroupState.TAKEN] -= 1
            del self._live[uid]
        self._trained += len(uids)
        self._hold(len(uids), version)
        self._release()

    def published(self, version: PolicyVersion) -> None:
        """All engines draw from `version` now; the places that waited for it open."""
        if version < self._published:
            raise LedgerError(f"version {version} comes after version {self._published}")
        self._published = version
        self._release()

    def counts(self) -> Counts:
        size = self.group_size
        dropped = self._dropped.total()
        running = sum(
            state in (SampleState.RUNNING, SampleState.SCORING)
            for group in self._live.values()
            if group.state is GroupState.OPEN
            for state in group.samples
        )
        open_groups = self._in_state[GroupState.OPEN]
        held = self._in_state[GroupState.COMPLETE] + self._in_state[GroupState.TAKEN]
        waiting = len(self._live) * size - running
        return Counts(
            Tally(self._next, self._trained, dropped, held, open_groups),
            Tally(self._next * size, self._trained * size, dropped * size, waiting, running),
            dict(self._dropped),
        )

    def check(self) -> None:
        """Assert the conservation law and that the running totals agree with the records."""
        counts = self.counts()
        if not (counts.groups.balanced and counts.samples.balanced):
            raise LedgerError(f"the law of conservation is broken: {counts}")
        if Counter(group.state for group in self._live.values()) != +self._in_state:
            raise LedgerError(f"totals {self._in_state} differ from the records")
        for group in self._live.values():
            done = group.samples.count(SampleState.DONE)
            if done != group.done or (
                group.state is not GroupState.OPEN and done < len(group.samples)
            ):
                raise LedgerError(f"group {group.uid} is {group.state} with {done} samples done")

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON. The samples themselves are saved by the caller."""
        return {
            "next": self._next,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "drops_in_step": self._drops_in_step,
            "published": int(self._published),
            "groups": [_group_to_json(group) for group in self._live.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state: what was in flight waits again, under the same ids; a batch that
        was taken and not trained is complete again."""
        if self._next:
            raise LedgerError("only a ledger that has started nothing can be restored")
        for saved in state["groups"]:
            group = _group_from_json(saved)
            if len(group.samples) != self.group_size:
                raise CheckpointError(
                    f"rollout.group_size is {self.group_size}, but group {group.uid} of the "
                    f"checkpoint has {len(group.samples)} samples",
                    fix=f"resume with rollout.group_size={len(group.samples)}",
                )
            self._live[group.uid] = group
            self._in_state[group.state] += 1
        self._next = state["next"]
        self._trained = state["trained"]
        self._dropped = Counter(state["dropped"])
        self._drops_in_step = state["drops_in_step"]
        self._published = PolicyVersion(state["published"])

    def _choose(self, version: PolicyVersion, count: int) -> tuple[list[LiveGroup], int]:
        """The best batch of what is complete, and how many of the first live groups lie in the
        first rule that it breaks (0 if it breaks none)."""
        required = self._required(version)
        size = max([count, *(needed for _, needed in required)])
        complete = (g for g in self._live.values() if g.state is GroupState.COMPLETE)
        # Lowest ids first: no other choice has more groups in any of the prefixes.
        batch = list(islice(complete, size))
        picked = {group.uid for group in batch}
        for prefix, needed in required:
            if sum(uid in picked for uid in islice(self._live, prefix)) < needed:
                return batch, prefix
        return batch, 0

    def _required(self, version: PolicyVersion) -> list[tuple[int, int]]:
        """The must-take rule, as pairs (p, n): n of the first p live groups must be in the batch.

        With C = ceil(K), every group that started at a version <= v - C must be in the batch of
        version v. So that this never asks for more than B groups, the batches before must leave at
        most j * B groups for the j next ones: of the N groups that started at <= v - C + j, at
        least N - j * B are in this batch. j = 0 is the rule itself.
        """
        started = [group.started for group in self._live.values()]
        required: list[tuple[int, int]] = []
        steps_ahead = min(self.horizon, len(started) // self.groups_per_step)
        for ahead in range(steps_ahead + 1):
            latest = version - self.horizon + ahead
            prefix = sum(start <= latest for start in started)
            needed = prefix - ahead * self.groups_per_step
            if needed > 0:
                required.append((prefix, needed))
        return required

    def _is_spent(self) -> bool:
        """Whether nothing more will complete in this step, since drops are no longer refilled."""
        return (
            self._unreplaced() > 0 and not self._in_state[GroupState.OPEN] and not self.may_start()
        )

    def _unreplaced(self) -> int:
        if self._drops_allowed is None:
            return 0
        return max(0, self._drops_in_step - self._drops_allowed)

    def _hold(self, places: int, until: PolicyVersion) -> None:
        self._held += places
        self._held_until = until

    def _release(self) -> None:
        if self._held_until <= self._published and not self._in_state[GroupState.TAKEN]:
            self._held = 0

    def _advance(self, uid: SampleId, old: SampleState, new: SampleState) -> LiveGroup:
        group = self.group(uid.group)
        if group.samples[uid.index] is not old:
            raise LedgerError(
                f"sample {uid} is {group.samples[uid.index]}, so it cannot become {new}"
            )
        group.samples[uid.index] = new
        return group

    def _move(self, group: LiveGroup, old: GroupState, new: GroupState) -> None:
        if group.state is not old:
            raise LedgerError(f"group {group.uid} is {group.state}, so it cannot become {new}")
        group.state = new
        self._in_state[old] -= 1
        self._in_state[new] += 1


def _group_to_json(group: LiveGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "uid": group.uid,
        "started": int(group.started),
        "state": GroupState.OPEN if group.state is GroupState.OPEN else GroupState.COMPLETE,
        "done": [n for n, state in enumerate(group.samples) if state is SampleState.DONE],
        "size": len(group.samples),
        "prompt": {
            "uid": prompt.uid,
            "domain": prompt.domain,
            "turns": [[turn.role, turn.content] for turn in prompt.turns],
            # What JSON does not know (a date, say) becomes text, as in data/store.py.
            "row": json.loads(json.dumps(dict(prompt.row), default=str)),
        },
    }


def _group_from_json(saved: Mapping[str, Any]) -> LiveGroup:
    told = saved["prompt"]
    turns = cast("list[list[str]]", told["turns"])
    prompt = Prompt(
        uid=told["uid"],
        domain=told["domain"],
        turns=tuple(Turn(role, content) for role, content in turns),
        row=told["row"],
    )
    done = set(cast("list[int]", saved["done"]))
    samples = [
        SampleState.DONE if index in done else SampleState.WAITING for index in range(saved["size"])
    ]
    state, started = GroupState(saved["state"]), PolicyVersion(saved["started"])
    return LiveGroup(saved["uid"], prompt, started, samples, state, len(done))
