"""The book: the records of the groups in flight, and every sum over them, kept in step.

Each method is one change of one record that the sums follow. Whether it may happen is asked of the
states alone; budgets, versions and rules are the ledger's.
"""

from __future__ import annotations

from typing import Any

from rollick.rollout.groups import (
    GroupState,
    LedgerError,
    LiveGroup,
    SampleState,
    group_to_json,
)
from rollick.rollout.rules import Cohorts
from rollick.rollout.tally import Totals
from rollick.types import PolicyVersion, SampleId


class Book:
    """Groups that are neither trained nor dropped. All is O(1) for a sample, but `check`."""

    def __init__(self) -> None:
        self.live: dict[int, LiveGroup] = {}  # those with a place, in the order of their start
        self.parked: dict[int, LiveGroup] = {}  # in the order in which they were parked
        self.completed: dict[int, None] = {}  # complete or taken, in the order of completion
        self.totals = Totals()
        self.cohorts = Cohorts()

    def placed(self, uid: int) -> LiveGroup:
        """The record of a group that has a place."""
        if uid not in self.live:
            where = "is parked" if uid in self.parked else "is not in the ledger"
            raise LedgerError(f"group {uid} {where}")
        return self.live[uid]

    def add(self, group: LiveGroup) -> None:
        """A new group."""
        self.refuse_older(group.started)
        self.totals.started(group)
        self.live[group.uid] = group
        self.cohorts.started(group.started)

    def adopt(self, group: LiveGroup) -> None:
        """A group that was counted as submitted before, as it stands."""
        self.totals.entered(group)
        if group.state is GroupState.PARKED:
            self.parked[group.uid] = group
            return
        self.live[group.uid] = group
        self.cohorts.started(group.started, long=group.deferred)
        if group.state is GroupState.COMPLETE:
            self.cohorts.completed(group.started, long=group.deferred)

    def advance(self, uid: SampleId, old: SampleState, new: SampleState) -> LiveGroup:
        """A sample goes from `old` to `new`."""
        group = self.placed(uid.group)
        if group.samples[uid.index] is not old:
            raise LedgerError(
                f"sample {uid} is {group.samples[uid.index]}, so it cannot become {new}"
            )
        group.samples[uid.index] = new
        self.totals.sample_moved(old, new)
        return group

    def complete(self, group: LiveGroup) -> tuple[SampleId, ...]:
        """Its samples under way become CANCELLED, and are returned."""
        self._move(group, GroupState.OPEN, GroupState.COMPLETE)
        self.completed[group.uid] = None
        self.cohorts.completed(group.started, long=group.deferred)
        surplus = group.under_way()
        for uid in surplus:
            self.advance(uid, group.samples[uid.index], SampleState.CANCELLED)
        return surplus

    def take(self, group: LiveGroup) -> None:
        self._move(group, GroupState.COMPLETE, GroupState.TAKEN)
        self.cohorts.left(group.started, complete=True, long=group.deferred)

    def train(self, group: LiveGroup) -> None:
        if group.state is not GroupState.TAKEN:
            raise LedgerError(f"group {group.uid} is {group.state}, so it cannot have been trained")
        self.totals.trained(group)
        self._forget(group)

    def drop(self, group: LiveGroup, reason: str) -> tuple[SampleId, ...]:
        """Returns its samples under way."""
        if group.state is GroupState.TAKEN:
            raise LedgerError(f"group {group.uid} is in a batch, so it cannot be dropped")
        is_complete = group.state is GroupState.COMPLETE
        self.cohorts.left(group.started, complete=is_complete, long=group.deferred)
        self.totals.dropped(group, reason)
        self._forget(group)
        return group.under_way()

    def park(self, group: LiveGroup) -> tuple[SampleId, ...]:
        """All its samples but cancelled spares wait for a new start; returns those under way."""
        is_complete = group.state is GroupState.COMPLETE
        self._move(
            group, GroupState.COMPLETE if is_complete else GroupState.OPEN, GroupState.PARKED
        )
        self.cohorts.left(group.started, complete=is_complete, long=group.deferred)
        under_way = group.under_way()
        for index, state in enumerate(group.samples):
            if state is not SampleState.CANCELLED:
                self.totals.sample_moved(state, SampleState.WAITING)
                group.samples[index] = SampleState.WAITING
        group.done = 0
        group.deferred, group.judged = True, group.judged or is_complete
        self.completed.pop(group.uid, None)
        self.parked[group.uid] = self.live.pop(group.uid)
        return under_way

    def unpark(self, version: PolicyVersion) -> int:
        """The group that has been parked for longest starts at `version`; returns its id."""
        self.refuse_older(version)
        uid = next(iter(self.parked))
        group = self.live[uid] = self.parked.pop(uid)
        self._move(group, GroupState.PARKED, GroupState.OPEN)
        group.started = version
        self.cohorts.started(version, long=True)
        return uid

    def refuse_older(self, version: PolicyVersion) -> None:
        """Groups start in the order of versions."""
        newest = next(reversed(self.live.values())).started if self.live else version
        if version < newest:
            raise LedgerError(f"a group cannot start at version {version} after one at {newest}")

    def check(self, group_size: int) -> None:
        """Assert the conservation law and that the sums agree with the records."""
        self.totals.check([*self.live.values(), *self.parked.values()])
        for group in self.live.values():
            done = group.samples.count(SampleState.DONE)
            ended = done == group_size and not group.under_way()
            if done != group.done or (group.state is not GroupState.OPEN and not ended):
                raise LedgerError(f"group {group.uid} is {group.state} with {done} samples done")

    def state(self) -> dict[str, Any]:
        return {
            **self.totals.state(),
            "groups": [group_to_json(group) for group in self.live.values()],
            "parked": [group_to_json(group) for group in self.parked.values()],
            "completed": list(self.completed),
        }

    def _forget(self, group: LiveGroup) -> None:
        del self.live[group.uid]
        self.completed.pop(group.uid, None)

    def _move(self, group: LiveGroup, old: GroupState, new: GroupState) -> None:
        if group.state is not old:
            raise LedgerError(f"group {group.uid} is {group.state}, so it cannot become {new}")
        group.state = new
        self.totals.group_moved(old, new)
