"""The ledger: tracks the state of every group and sample and selects the next batch.

A pure state machine: no asyncio, no clock, no model. It assigns ids and applies the staleness rule.
See group_record.py (states), staleness.py (rules), slots.py (limits), group_table.py (groups).

Trained and dropped groups leave the ledger; only their counts are kept. A transition costs O(1) per
sample, a check for a batch O(max_staleness), taking a batch O(groups in flight). A transition that
makes samples unnecessary returns their ids: the caller aborts them and does not report them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from rollick.errors import CheckpointError
from rollick.rollout.ledger import events
from rollick.rollout.ledger.group_record import (
    GroupRecord,
    GroupState,
    LedgerError,
    RemovedGroups,
    SampleState,
    TakenBatch,
    check_group_size,
)
from rollick.rollout.ledger.group_table import GroupTable
from rollick.rollout.ledger.slots import GroupSlots
from rollick.rollout.ledger.staleness import (
    LAST_VERSION,
    STALE,
    SURPLUS,
    StalenessPolicy,
    StalenessRule,
)
from rollick.types import PolicyVersion, Prompt, SampleId


class Ledger:
    """Admits groups within the staleness budget and chooses those of the next batch."""

    def __init__(
        self,
        policy: StalenessPolicy,
        group_size: int,
        *,
        spares: int = 0,
        drops_allowed: int | None = None,
        count_down: bool = False,
        record: Callable[[events.Event], None] | None = None,
    ) -> None:
        """A group starts with `group_size + spares` samples and is complete when the
        first `group_size` are done. `count_down` assigns ids -1, -2, … instead of 0, 1, …."""
        self.policy = policy
        self.horizon = policy.horizon
        self.group_size = group_size
        self.spares = spares
        self._slots = GroupSlots(policy.slots, surplus=policy.surplus, drops_allowed=drops_allowed)
        self._table = GroupTable()
        self._to_replay: deque[tuple[int, str]] = deque()
        self._count_down = count_down
        self._record: Callable[[events.Event], None] = record or (lambda event: None)

    @property
    def deferred_count(self) -> int:
        return len(self._table.deferred)

    @property
    def in_long_round(self) -> bool:
        """Whether slots are reserved for deferred groups, or restarted groups await their batch."""
        return self._slots.round_slots > 0 or self._table.counts.total.long > 0

    @property
    def held_until(self) -> PolicyVersion | None:
        """The version whose publication frees the held slots; None if no slot is held."""
        return self._slots.held_until

    @property
    def exhausted(self) -> bool:
        """Whether no batch can follow: no group in flight, no held slot, and none may start."""
        may_start = self.may_start() or self.may_restart_deferred()
        return not (self._table.active or self._slots.held_until is not None or may_start)

    @property
    def next_prompt_uid(self) -> str | None:
        """After a resume, the prompt that the next group must have; None: any."""
        return self._to_replay[0][1] if self._to_replay else None

    def group(self, uid: int) -> GroupRecord:
        """The record of a group that has a slot or is deferred."""
        return self._table.deferred.get(uid) or self._table.active_group(uid)

    def active_groups(self) -> list[GroupRecord]:
        """All groups that have a slot, in the order of their start."""
        return list(self._table.active.values())

    def deferred_groups(self) -> list[GroupRecord]:
        """All deferred groups, in the order in which they were deferred."""
        return list(self._table.deferred.values())

    def deadline(self, uid: int) -> PolicyVersion:
        """The last version at which no token of the group is too old."""
        return PolicyVersion(self._table.active_group(uid).start_version + self.horizon)

    def may_start(self) -> bool:
        """Whether a slot is free for a new group (slots.py defines the limit and held slots)."""
        return self._slots.has_free(len(self._table.active), in_long_round=self.in_long_round)

    def may_restart_deferred(self) -> bool:
        """Whether a deferred group may restart; with long_rounds, only as part of a long round."""
        is_rounds = self.policy.rule is StalenessRule.LONG_ROUNDS
        waiting = self._slots.round_slots if is_rounds else len(self._table.deferred)
        return waiting > 0 and self._slots.has_free_for_deferred(len(self._table.active))

    def start_group(self, prompt: Prompt, version: PolicyVersion) -> int:
        """Start a group in a free slot; its samples are WAITING. Returns its id; ids are unique."""
        table, size = self._table, self.group_size + self.spares
        if not self.may_start():
            slots = self.policy.slots
            raise LedgerError(f"no slot for a group: {len(table.active)} of {slots} taken")
        uid = -1 - table.submitted if self._count_down else table.submitted
        if self._to_replay and self._to_replay[0] != (uid, prompt.uid):
            raise LedgerError(
                f"prompt {prompt.uid} cannot start as group {uid}: before the crash it was prompt "
                f"{self.next_prompt_uid}"
            )
        table.add(GroupRecord(uid, prompt, version, [SampleState.WAITING] * size))
        if self._to_replay:
            self._to_replay.popleft()
        self._record(events.GroupStarted(uid, prompt.uid, prompt.domain, version, size))
        return uid

    def sample_started(self, uid: SampleId) -> None:
        self._table.move_sample(uid, SampleState.WAITING, SampleState.RUNNING)

    def sample_lost(self, uid: SampleId) -> None:
        """The sample's engine was lost; the sample is WAITING again, with the same id."""
        self._table.move_sample(uid, SampleState.RUNNING, SampleState.WAITING)

    def sample_finished(self, uid: SampleId) -> None:
        self._table.move_sample(uid, SampleState.RUNNING, SampleState.SCORING)

    def sample_scored(self, uid: SampleId) -> bool:
        """Returns whether its group is now full; the caller must then complete or drop it."""
        if self._table.active_group(uid.group).done == self.group_size:
            raise LedgerError(f"group {uid.group} has enough samples without {uid}")
        group = self._table.move_sample(uid, SampleState.SCORING, SampleState.DONE)
        group.done += 1
        self._record(events.SampleDone(*uid))
        return group.done == self.group_size

    def complete(self, uid: int) -> tuple[SampleId, ...]:
        """Mark the group as complete. Returns its unneeded samples, which are to be aborted."""
        group = self._table.active_group(uid)
        if group.done != self.group_size:
            raise LedgerError(f"group {uid} has {group.done} of {self.group_size} samples")
        cancelled = self._table.complete(group)
        self._record(events.GroupCompleted(uid))
        return cancelled

    def drop(self, uid: int, reason: str) -> tuple[SampleId, ...]:
        """Remove a group and free its slot immediately. Returns its unfinished samples."""
        unfinished = self._drop(self._table.active_group(uid), reason)
        self._slots.drops_in_step += 1
        self._begin_long_round()
        return unfinished

    def drop_groups(self, uids: Iterable[int], reason: str) -> RemovedGroups:
        """Remove those of these groups that are in flight and in no batch. Does not count against
        the drop limit."""
        active = (self._table.active.get(uid) for uid in sorted(uids, key=abs))
        groups = [g for g in active if g is not None and g.state is not GroupState.TAKEN]
        unfinished = tuple(uid for group in groups for uid in self._drop(group, reason))
        return RemovedGroups(tuple((group.uid, reason) for group in groups), unfinished)

    def reset_drops(self) -> None:
        self._slots.drops_in_step = 0

    def defer(self, uid: int) -> tuple[SampleId, ...]:
        """Defer a group to a long round: it keeps its id and frees its slot. All its samples are
        generated again later (their tokens may be too old). Returns the unfinished samples."""
        unfinished = self._table.defer(self._table.active_group(uid))
        self._record(events.GroupDeferred(uid))
        self._begin_long_round()
        return unfinished

    def restart_deferred(
        self, version: PolicyVersion, *, is_ready: Callable[[int], bool] = lambda uid: True
    ) -> tuple[int, ...]:
        """Restart deferred groups at `version` while slots are free. Stops at the first one that is
        not ready (an engine still runs a sample of it). Returns the ids."""
        restarted: list[int] = []
        while self.may_restart_deferred() and is_ready(next(iter(self._table.deferred))):
            uid = self._table.restart_deferred(version)
            self._slots.round_slots = max(0, self._slots.round_slots - 1)
            self._record(events.GroupRestarted(uid, version))
            restarted.append(uid)
        return tuple(restarted)

    def take(self, version: PolicyVersion, count: int | None = None) -> TakenBatch | None:
        """Take the batch of the step that starts at `version`; None: not ready. Rules may need more
        than `count`; fewer are taken only if the drop limit is reached and no group is open."""
        count = self.policy.groups_per_step if count is None else count
        if not 0 < count <= self.policy.groups_per_step:
            raise LedgerError(f"a batch has 1 to {self.policy.groups_per_step} groups, not {count}")
        if self._table.taken:
            raise LedgerError("the batch before must be trained first")
        if not self._is_ready(version, count):
            return None
        batch = self._choose(version, count)
        for group in batch:
            self._table.take(group)
        removed = self._remove_late(version, taken=True)
        left = len(self._table.active) - len(batch)
        self._slots.end_step(version, closed=self.policy.closed_slots(batch=len(batch), left=left))
        self._begin_long_round()
        return TakenBatch(tuple(sorted((group.uid for group in batch), key=abs)), removed)

    def next_batch(self, version: PolicyVersion, count: int | None = None) -> tuple[int, ...]:
        """The groups that `take` would take now; empty if it is not ready."""
        count = self.policy.groups_per_step if count is None else count
        if not self._is_ready(version, count):
            return ()
        return tuple(group.uid for group in self._choose(version, count))

    def awaited_samples(self, version: PolicyVersion, count: int | None = None) -> list[SampleId]:
        """The samples that the batch of `version` waits for, ordered by their groups' start."""
        count = self.policy.groups_per_step if count is None else count
        latest = self.policy.waits_until(self._table.counts, version, count=count)
        if latest is None:
            return []
        oldest = self.policy.oldest_eligible(version)
        only_long = self.policy.rule is StalenessRule.LONG_ROUNDS and latest < LAST_VERSION
        return [
            uid
            for group in self._table.active.values()
            if group.state is GroupState.OPEN and oldest <= group.start_version <= latest
            if group.was_deferred or not only_long
            for uid in group.unfinished()
        ]

    def trained(self, uids: Sequence[int], version: PolicyVersion) -> None:
        """Record a trained batch. `version` is the one after it (unchanged if it was skipped)."""
        for uid in uids:
            self._table.train(self._table.active_group(uid))
        self._slots.hold(len(uids), version)
        self._release_slots()
        self._record(events.BatchTrained(tuple(uids), version))

    def published(self, version: PolicyVersion) -> RemovedGroups:
        """Record that all engines now use `version`; frees the slots held for it. Returns
        the groups that were removed because they are too old (see staleness.py)."""
        self._slots.publish(version)
        removed = self._remove_late(version, taken=False)
        self._release_slots()
        return removed

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as JSON values. The caller saves the samples."""
        return {
            "drops_in_step": self._slots.drops_in_step,
            "published": int(self._slots.published),
            "round_slots": self._slots.round_slots,
            **self._table.state(),
        }

    def restore(self, state: Mapping[str, Any], *, started: Iterable[tuple[int, str]] = ()) -> None:
        """Restore a saved state: samples in flight wait again, under the same ids; a batch that was
        taken and not trained is complete again. `started` lists (group id, prompt uid) from the
        log. Those after the saved state must start next, in order (see `next_prompt_uid`)."""
        table, slots = self._table, self._slots
        if table.submitted:
            raise LedgerError("only a ledger that has started nothing can be restored")
        if "parked" in state:
            raise CheckpointError(
                "the checkpoint's ledger has the key parked, which is named deferred now",
                fix="an older version of rollick wrote this checkpoint; start a new run",
            )
        to_replay = _check_sequence(started, next_uid=state["next"])
        groups = [GroupRecord.from_json(saved) for saved in (*state["groups"], *state["deferred"])]
        for group in groups:
            check_group_size(group, group_size=self.group_size, spares=self.spares)
        table.restore(state, groups)
        self._to_replay.extend(to_replay)
        slots.drops_in_step = state["drops_in_step"]
        slots.published = PolicyVersion(state["published"])
        if self.policy.rule is StalenessRule.LONG_ROUNDS:
            slots.round_slots = state["round_slots"]
        self._begin_long_round()

    def _is_ready(self, version: PolicyVersion, count: int) -> bool:
        eligible = self.policy.eligible(self._table.counts, version)
        if not eligible.complete:
            return False
        if eligible.complete < count:
            # A smaller batch only if no other group can complete in this step (drop limit reached).
            is_open = eligible.active > eligible.complete or self._slots.round_slots > 0
            if is_open or self.may_start() or not self._slots.unreplaced:
                return False
            count = eligible.complete
        return self.policy.waits_until(self._table.counts, version, count=count) is None

    def _choose(self, version: PolicyVersion, count: int) -> list[GroupRecord]:
        """The groups of the batch. Call only if `_is_ready`."""
        table, policy = self._table, self.policy
        if policy.rule is StalenessRule.FIRST_FINISHED:
            return [table.active[uid] for uid in islice(table.completed, count)]
        size = policy.batch_size(table.counts, version, count=count)
        oldest = policy.oldest_eligible(version)
        # Oldest first: these have the earliest deadlines, so later batches have to wait for fewer.
        groups = table.active.values()
        complete = (
            g for g in groups if g.state is GroupState.COMPLETE and g.start_version >= oldest
        )
        if policy.rule is StalenessRule.LONG_ROUNDS:
            due = policy.oldest_allowed(version)
            complete = sorted(
                complete, key=lambda g: not (g.was_deferred and g.start_version <= due)
            )
        return list(islice(complete, size))

    def _remove_late(self, version: PolicyVersion, *, taken: bool) -> RemovedGroups:
        """Drop or defer late groups. Does not count against the drop limit."""
        before = self.policy.late_before(version, taken=taken)
        old = takewhile(lambda group: group.start_version < before, self._table.active.values())
        late = [group for group in old if group.state is not GroupState.TAKEN]
        if self.policy.rule is StalenessRule.LONG_ROUNDS:
            unfinished = tuple(uid for group in late for uid in self.defer(group.uid))
            return RemovedGroups((), unfinished, tuple(group.uid for group in late))
        reason = SURPLUS if self.policy.rule is StalenessRule.FIRST_FINISHED else STALE
        unfinished = tuple(uid for group in late for uid in self._drop(group, reason))
        return RemovedGroups(tuple((group.uid, reason) for group in late), unfinished)

    def _drop(self, group: GroupRecord, reason: str) -> tuple[SampleId, ...]:
        unfinished = self._table.drop(group, reason)
        self._record(events.GroupDropped(group.uid, reason))
        return unfinished

    def _begin_long_round(self) -> None:
        """Reserve slots for one batch of deferred groups, if there are enough and no round runs."""
        size = self.policy.groups_per_step
        is_due = self.policy.rule is StalenessRule.LONG_ROUNDS and self.deferred_count >= size
        if is_due and not self.in_long_round:
            self._slots.round_slots = size

    def _release_slots(self) -> None:
        if not self._table.taken:
            self._slots.release()


def _check_sequence(started: Iterable[tuple[int, str]], *, next_uid: int) -> list[tuple[int, str]]:
    """The groups started after the checkpoint; raises if an id is missing."""
    new = [(uid, prompt) for uid, prompt in started if uid >= next_uid]
    for expected, (uid, _) in enumerate(new, start=next_uid):
        if uid != expected:
            raise CheckpointError(
                f"the ledger's log continues with group {uid} instead of group {expected}",
                fix="resume from a checkpoint of this log, or move the log away to resume without",
            )
    return new
