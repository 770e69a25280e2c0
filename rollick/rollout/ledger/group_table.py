"""The table of the groups in flight, with every sum over groups and samples kept up to date.

Each method is one transition of one group or sample and raises if the current state does not allow
it. The ledger handles slots, versions and staleness rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollick.rollout.ledger.group_record import GroupRecord, GroupState, LedgerError, SampleState
from rollick.rollout.ledger.staleness import SURPLUS, CountsByVersion
from rollick.types import PolicyVersion, SampleId


class GroupTable:
    """Groups that are neither trained nor dropped. A transition costs O(1) for each sample."""

    def __init__(self) -> None:
        self.active: dict[int, GroupRecord] = {}  # groups with a slot, in the order of their start
        self.deferred: dict[int, GroupRecord] = {}  # in the order in which they were deferred
        self.completed: dict[int, None] = {}  # complete or taken, in the order of completion
        self.counts = CountsByVersion()
        self.taken = 0
        # Invariant: submitted = trained + dropped + the groups in this table.
        self.submitted = self.submitted_samples = 0
        self.trained = self.trained_samples = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_samples: Counter[str] = Counter()  # includes cancelled spares

    def active_group(self, uid: int) -> GroupRecord:
        if uid not in self.active:
            where = "is deferred" if uid in self.deferred else "is not in the ledger"
            raise LedgerError(f"group {uid} {where}")
        return self.active[uid]

    def add(self, group: GroupRecord) -> None:
        self._check_version_order(group.start_version)
        self.submitted += 1
        self.submitted_samples += len(group.samples)
        self.active[group.uid] = group
        self.counts.add(group, active=1)

    def move_sample(self, uid: SampleId, old: SampleState, new: SampleState) -> GroupRecord:
        group = self.active_group(uid.group)
        state = group.samples[uid.index]
        if state is not old:
            raise LedgerError(f"sample {uid} is {state}, so it cannot become {new}")
        group.samples[uid.index] = new
        return group

    def complete(self, group: GroupRecord) -> tuple[SampleId, ...]:
        """Cancels and returns its unfinished samples."""
        _change_state(group, GroupState.OPEN, GroupState.COMPLETE)
        self.completed[group.uid] = None
        self.counts.add(group, complete=1)
        unfinished = group.unfinished()
        for uid in unfinished:
            group.samples[uid.index] = SampleState.CANCELLED
        if unfinished:
            self.dropped_samples[SURPLUS] += len(unfinished)
        return unfinished

    def take(self, group: GroupRecord) -> None:
        _change_state(group, GroupState.COMPLETE, GroupState.TAKEN)
        self.taken += 1
        self.counts.add(group, active=-1, complete=-1)

    def train(self, group: GroupRecord) -> None:
        if group.state is not GroupState.TAKEN:
            raise LedgerError(f"group {group.uid} is {group.state}, so it cannot have been trained")
        self.taken -= 1
        self.trained += 1
        self.trained_samples += self._remove(group)

    def drop(self, group: GroupRecord, reason: str) -> tuple[SampleId, ...]:
        """Returns its unfinished samples."""
        if group.state is GroupState.TAKEN:
            raise LedgerError(f"group {group.uid} is in a batch, so it cannot be dropped")
        self.counts.add(group, active=-1, complete=-(group.state is GroupState.COMPLETE))
        self.dropped[reason] += 1
        self.dropped_samples[reason] += self._remove(group)
        return group.unfinished()

    def defer(self, group: GroupRecord) -> tuple[SampleId, ...]:
        """Set all its samples except cancelled spares to WAITING; returns the unfinished ones."""
        was_complete = group.state is GroupState.COMPLETE
        _change_state(group, group.state if was_complete else GroupState.OPEN, GroupState.DEFERRED)
        self.counts.add(group, active=-1, complete=-was_complete)
        unfinished = group.unfinished()
        for index, state in enumerate(group.samples):
            if state is not SampleState.CANCELLED:
                group.samples[index] = SampleState.WAITING
        group.done = 0
        group.was_deferred, group.was_reported = True, group.was_reported or was_complete
        self.completed.pop(group.uid, None)
        self.deferred[group.uid] = self.active.pop(group.uid)
        return unfinished

    def restart_deferred(self, version: PolicyVersion) -> int:
        """Restart the group that was deferred first, at `version`; returns its id."""
        self._check_version_order(version)
        uid = next(iter(self.deferred))
        group = self.active[uid] = self.deferred.pop(uid)
        _change_state(group, GroupState.DEFERRED, GroupState.OPEN)
        group.start_version = version
        self.counts.add(group, active=1)
        return uid

    def state(self) -> dict[str, Any]:
        return {
            "next": self.submitted,
            "submitted_samples": self.submitted_samples,
            "trained": self.trained,
            "trained_samples": self.trained_samples,
            "dropped": dict(self.dropped),
            "dropped_samples": dict(self.dropped_samples),
            "groups": [group.to_json() for group in self.active.values()],
            "deferred": [group.to_json() for group in self.deferred.values()],
            "completed": list(self.completed),
        }

    def restore(self, state: Mapping[str, Any], groups: list[GroupRecord]) -> None:
        """Restore a saved state, whose groups, active and deferred, are `groups`."""
        for group in groups:
            if group.state is GroupState.DEFERRED:
                self.deferred[group.uid] = group
                continue
            self.active[group.uid] = group
            self.counts.add(group, active=1, complete=int(group.state is GroupState.COMPLETE))
        self.completed = dict.fromkeys(state["completed"])
        self.submitted, self.submitted_samples = state["next"], state["submitted_samples"]
        self.trained, self.trained_samples = state["trained"], state["trained_samples"]
        self.dropped = Counter(state["dropped"])
        self.dropped_samples = Counter(state["dropped_samples"])

    def _check_version_order(self, version: PolicyVersion) -> None:
        """Raises unless groups start in the order of versions."""
        newest = next(reversed(self.active.values())).start_version if self.active else version
        if version < newest:
            raise LedgerError(f"a group cannot start at version {version} after one at {newest}")

    def _remove(self, group: GroupRecord) -> int:
        """Returns the number of its samples, without cancelled spares."""
        del self.active[group.uid]
        self.completed.pop(group.uid, None)
        return len(group.samples) - group.samples.count(SampleState.CANCELLED)


def _change_state(group: GroupRecord, old: GroupState, new: GroupState) -> None:
    if group.state is not old:
        raise LedgerError(f"group {group.uid} is {group.state}, so it cannot become {new}")
    group.state = new
