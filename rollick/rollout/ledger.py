"""The ledger: which groups and samples are where, and which batch may be trained on next.

A pure state machine: no asyncio, no clock, no model. It owns the ids, the staleness rule and the
conservation law; the scheduler asks it and acts. The states are in groups.py, the rules in
rules.py, the number of places in pacing.py, the records and their sums in book.py.

Trained and dropped groups leave the ledger; only their numbers are kept. Each transition costs
O(1), a question in vain O(max_staleness); only a batch that is given costs O(groups in flight).
Where a transition makes samples useless, it returns their ids: they are to be taken from the queue
or aborted, and must not be told of again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from math import ceil
from typing import Any

from rollick.errors import CheckpointError
from rollick.rollout.book import Book
from rollick.rollout.events import (
    Completed,
    Dropped,
    Event,
    Parked,
    SampleDone,
    Started,
    Trained,
    Unparked,
)
from rollick.rollout.groups import (
    ENDED,
    GroupState,
    LedgerError,
    LiveGroup,
    Removed,
    SampleState,
    Taken,
    Wait,
    group_from_json,
    refuse_other_size,
)
from rollick.rollout.pacing import Pacing
from rollick.rollout.rules import LAST_VERSION, SURPLUS_RULES, Rule, Staleness, count_places
from rollick.rollout.tally import Counts, Tally
from rollick.types import PolicyVersion, Prompt, SampleId

__all__ = [
    "Counts",
    "GroupState",
    "Ledger",
    "LedgerError",
    "LiveGroup",
    "Removed",
    "Rule",
    "SampleState",
    "Taken",
    "Tally",
    "Wait",
]


def _tell_nobody(event: Event) -> None:
    """Where no log is kept."""


class Ledger:
    """Admits groups within the staleness budget and says which of them make the next batch.

    `spares` samples more than `group_size` are started in each group; it is complete with the
    first `group_size`. `surplus` groups more are in flight under first_finished and long_rounds.
    `count_down` gives the ids -1, -2, … instead of 0, 1, …, so that an evaluation beside a training
    never has a sample of the same name on an engine. `record` is told every transition that the
    log keeps.
    """

    def __init__(
        self,
        groups_per_step: int,
        group_size: int,
        max_staleness: float = 0,
        *,
        spares: int = 0,
        rule: Rule | str = Rule.MUST_TAKE,
        surplus: int = 0,
        drops_allowed: int | None = None,
        count_down: bool = False,
        record: Callable[[Event], None] = _tell_nobody,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.spares = spares
        self.horizon = ceil(max_staleness)
        self.rule = Rule(rule)
        if surplus and self.rule not in SURPLUS_RULES:
            raise LedgerError(f"the rule {self.rule} knows no surplus, but it is {surplus}")
        self._staleness = Staleness(self.rule, self.horizon, groups_per_step)
        places = count_places(groups_per_step, max_staleness, surplus=surplus)
        self._pacing = Pacing(places, surplus=surplus, drops_allowed=drops_allowed)
        self._book = Book()
        self._promised: deque[tuple[int, str]] = deque()
        self._count_down = count_down
        self._record = record

    @property
    def places(self) -> int:
        """Groups that may be in flight at once."""
        return self._pacing.places

    @property
    def drops_in_step(self) -> int:
        """Groups that the caller dropped since the last batch was taken."""
        return self._pacing.drops_in_step

    @property
    def complete_groups(self) -> int:
        return self._book.totals.groups[GroupState.COMPLETE]

    @property
    def parked_groups(self) -> int:
        return self._book.totals.groups[GroupState.PARKED]

    @property
    def in_long_round(self) -> bool:
        """Whether groups that were parked are to be placed or are not in a batch yet."""
        return self._pacing.to_place > 0 or self._book.cohorts.total.long > 0

    @property
    def held_until(self) -> PolicyVersion | None:
        """The version whose publishing opens places, if some are held for one."""
        return self._pacing.held_until

    @property
    def exhausted(self) -> bool:
        """Whether no batch can ever come: nothing is in flight and nothing may be refilled."""
        coming = self._book.live or self._pacing.is_holding or self.may_start() or self.may_resume()
        return not coming

    @property
    def promised(self) -> str | None:
        """The uid of the prompt that the next group must have, as before a kill; None: any."""
        return self._promised[0][1] if self._promised else None

    def group(self, uid: int) -> LiveGroup:
        """The record of a group that has a place or is parked."""
        return self._book.parked[uid] if uid in self._book.parked else self._book.placed(uid)

    def live(self) -> list[LiveGroup]:
        """All groups that have a place, in the order of their start."""
        return list(self._book.live.values())

    def parked(self) -> list[LiveGroup]:
        """All groups that were put off, in that order."""
        return list(self._book.parked.values())

    def is_wanted(self, uid: SampleId) -> bool:
        """Whether something is still to come from a sample; False if it was cancelled."""
        group = self._book.live.get(uid.group)
        return group is not None and group.samples[uid.index] not in ENDED

    def deadline(self, uid: int) -> PolicyVersion:
        """The version at which a group must be trained, or else it is too old."""
        return PolicyVersion(self._book.placed(uid).started + self.horizon)

    def oldest_allowed(self, version: PolicyVersion) -> PolicyVersion:
        """A token of an earlier version is too old for the batch of `version`."""
        return self._staleness.oldest_allowed(version)

    def may_start(self) -> bool:
        """started - trained - dropped - parked < B * (1 + K); see pacing.py for what is held."""
        return self._pacing.has_place(len(self._book.live), in_long_round=self.in_long_round)

    def may_resume(self) -> bool:
        """Whether a parked group may start again; under long_rounds, as one of a round."""
        waiting = self._pacing.to_place if self.rule is Rule.LONG_ROUNDS else len(self._book.parked)
        return waiting > 0 and self._pacing.has_place_again(len(self._book.live))

    def start_group(self, prompt: Prompt, version: PolicyVersion) -> int:
        """Give a place to a group; its samples wait. Ids count up and are never used again."""
        book, size = self._book, self.group_size + self.spares
        if not self.may_start():
            raise LedgerError(f"no place for a group: {len(book.live)} of {self.places} taken")
        number = book.totals.submitted
        uid = -1 - number if self._count_down else number
        if self._promised and self._promised[0] != (uid, prompt.uid):
            raise LedgerError(
                f"prompt {prompt.uid} cannot start as group {uid}: before the kill it was prompt "
                f"{self.promised}"
            )
        book.add(LiveGroup(uid, prompt, version, [SampleState.WAITING] * size))
        if self._promised:
            self._promised.popleft()
        self._record(Started(uid, prompt.uid, prompt.domain, version, size))
        return uid

    def sample_started(self, uid: SampleId) -> None:
        self._book.advance(uid, SampleState.WAITING, SampleState.RUNNING)

    def sample_lost(self, uid: SampleId) -> None:
        """Its engine is gone: it waits again, under the same id."""
        self._book.advance(uid, SampleState.RUNNING, SampleState.WAITING)

    def sample_finished(self, uid: SampleId) -> None:
        self._book.advance(uid, SampleState.RUNNING, SampleState.SCORING)

    def sample_scored(self, uid: SampleId) -> bool:
        """Returns whether its group has enough now, and must be completed or dropped."""
        if self._book.placed(uid.group).done == self.group_size:
            raise LedgerError(f"group {uid.group} has enough samples without {uid}")
        group = self._book.advance(uid, SampleState.SCORING, SampleState.DONE)
        group.done += 1
        self._record(SampleDone(*uid))
        return group.done == self.group_size

    def complete(self, uid: int) -> tuple[SampleId, ...]:
        """The group waits for its training. Returns the samples that it does without."""
        group = self._book.placed(uid)
        if group.done != self.group_size:
            raise LedgerError(f"group {uid} has {group.done} of {self.group_size} samples")
        surplus = self._book.complete(group)
        self._record(Completed(uid))
        return surplus

    def drop(self, uid: int, reason: str) -> tuple[SampleId, ...]:
        """Take a group out. Its place is free at once, so that the refill is one for one.

        Returns its samples still under way.
        """
        cancelled = self._drop(self._book.placed(uid), reason)
        self._pacing.drops_in_step += 1
        self._begin_round()
        return cancelled

    def forgive_drops(self) -> None:
        """Drops so far do not count against the allowance of the step under way."""
        self._pacing.drops_in_step = 0

    def defer(self, uid: int) -> tuple[SampleId, ...]:
        """Put a group off to a round of long samples: it keeps its id and gives its place back.

        Returns its samples under way. All its samples, the done ones too, wait for the new start:
        tokens drawn before it may be too old by then. A caller that keeps some must compare their
        versions with `oldest_allowed`.
        """
        under_way = self._defer(self._book.placed(uid))
        self._begin_round()
        return under_way

    def resume_parked(
        self,
        version: PolicyVersion,
        count: int | None = None,
        *,
        ready: Callable[[int], bool] = lambda uid: True,
    ) -> tuple[int, ...]:
        """Start parked groups again, at most `count`, while there are places; returns their ids.

        They start at `version` now, so that the bound on ages holds for them as for all. The first
        that is not `ready` (an engine still has a sample of it) and those behind it wait.
        """
        book, resumed = self._book, list[int]()
        while self.may_resume() and (count is None or len(resumed) < count):
            if not ready(next(iter(book.parked))):
                break
            uid = book.unpark(version)
            self._pacing.to_place = max(0, self._pacing.to_place - 1)
            self._record(Unparked(uid, version))
            resumed.append(uid)
        return tuple(resumed)

    def take(self, version: PolicyVersion, count: int | None = None) -> Taken | None:
        """The batch of the step that starts at `version`; None means: wait.

        Under must_take it contains every group whose time is up (see rules.py) and, for the rest,
        the complete groups that started first. It has fewer than `count` groups only where the
        drop allowance is spent and nothing is open any more.
        """
        count = self.groups_per_step if count is None else count
        if not 0 < count <= self.groups_per_step:
            raise LedgerError(f"a batch has 1 to {self.groups_per_step} groups, not {count}")
        if self._book.totals.groups[GroupState.TAKEN]:
            raise LedgerError("the batch before must be trained first")
        if not self._is_ready(version, count):
            return None
        batch = self._choose(version, count)
        for group in batch:
            self._book.take(group)
        late = self._remove_late(version, taken=True)
        left = len(self._book.live) - len(batch)
        shut = self._staleness.shut_places(self.places, batch=len(batch), left=left)
        self._pacing.end_step(version, shut=shut)
        self._begin_round()
        uids = sorted((group.uid for group in batch), key=abs)
        return Taken(tuple(uids), late.dropped, late.cancelled, late.deferred)

    def waits_for(self, version: PolicyVersion, count: int | None = None) -> list[Wait]:
        """The samples without which the batch of `version` cannot be taken, as groups started."""
        count = self.groups_per_step if count is None else count
        latest = self._staleness.waits_until(self._book.cohorts, version, count=count)
        if latest is None:
            return []
        oldest = self._staleness.oldest_counted(version)
        only_long = self.rule is Rule.LONG_ROUNDS and latest < LAST_VERSION
        return [
            Wait(SampleId(group.uid, index), state)
            for group in self._book.live.values()
            if group.state is GroupState.OPEN and oldest <= group.started <= latest
            if group.deferred or not only_long
            for index, state in enumerate(group.samples)
            if state not in ENDED
        ]

    def trained(self, uids: Sequence[int], version: PolicyVersion) -> None:
        """The taken groups were trained on, which made `version` (the old one if skipped)."""
        for uid in uids:
            self._book.train(self._book.placed(uid))
        self._pacing.hold(len(uids), version)
        self._release()
        self._record(Trained(tuple(uids), version))

    def published(self, version: PolicyVersion) -> Removed:
        """All engines draw from `version` now; the places that waited for it open.

        Under drop_stale, what is too old for it is dropped here at once.
        """
        self._pacing.publish(version)
        late = self._remove_late(version, taken=False)
        self._release()
        return late

    def counts(self) -> Counts:
        return self._book.totals.counts()

    def check(self) -> None:
        """Assert the conservation law and that the running sums agree with the records."""
        self._book.check(self.group_size)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON. The samples themselves are saved by the caller."""
        return {
            "next": self._book.totals.submitted,
            "drops_in_step": self._pacing.drops_in_step,
            "published": int(self._pacing.published),
            "to_place": self._pacing.to_place,
            **self._book.state(),
        }

    def restore(self, state: Mapping[str, Any], *, started: Iterable[tuple[int, str]] = ()) -> None:
        """Take over a saved state: what was in flight waits again, under the same ids; a batch that
        was taken and not trained is complete again.

        `started` are the groups, with the uids of their prompts, that the log knows after the
        checkpoint: the next groups will have to be these (see `promised`).
        """
        book = self._book
        if book.totals.submitted:
            raise LedgerError("only a ledger that has started nothing can be restored")
        promised = _promises(started, next_uid=state["next"])
        groups = [group_from_json(saved) for saved in (*state["groups"], *state["parked"])]
        for group in groups:
            refuse_other_size(group, group_size=self.group_size, spares=self.spares)
        for group in groups:
            book.adopt(group)
        book.completed.update(dict.fromkeys(state["completed"]))
        book.totals.restore(state, submitted=state["next"])
        self._promised.extend(promised)
        self._pacing.drops_in_step = state["drops_in_step"]
        self._pacing.published = PolicyVersion(state["published"])
        self._pacing.to_place = state["to_place"] if self.rule is Rule.LONG_ROUNDS else 0
        self._begin_round()

    def _is_ready(self, version: PolicyVersion, count: int) -> bool:
        counted = self._staleness.counted(self._book.cohorts, version)
        if not counted.complete:
            return False
        if counted.complete < count:
            # Only if nothing more will complete in this step, since drops are not refilled.
            if counted.live > counted.complete or self.may_start() or not self._pacing.unreplaced:
                return False
            if self._pacing.to_place:
                return False
            count = counted.complete
        return self._staleness.waits_until(self._book.cohorts, version, count=count) is None

    def _choose(self, version: PolicyVersion, count: int) -> list[LiveGroup]:
        """The batch, given that there is one."""
        book = self._book
        if self.rule is Rule.FIRST_FINISHED:
            return [book.live[uid] for uid in islice(book.completed, count)]
        size = self._staleness.batch_size(book.cohorts, version, count=count)
        oldest = self._staleness.oldest_counted(version)
        # The first to start come first: no other choice leaves less for the next batches.
        complete = (
            group
            for group in book.live.values()
            if group.state is GroupState.COMPLETE and group.started >= oldest
        )
        if self.rule is Rule.LONG_ROUNDS:
            due = self._staleness.oldest_allowed(version)
            complete = sorted(
                complete, key=lambda group: not (group.deferred and group.started <= due)
            )
        return list(islice(complete, size))

    def _remove_late(self, version: PolicyVersion, *, taken: bool) -> Removed:
        """Drop or defer what is late. It is refilled, whatever the allowance of drops."""
        before = self._staleness.late_before(version, taken=taken)
        late: list[LiveGroup] = []
        for group in self._book.live.values():
            if group.started >= before:
                break
            if group.state is not GroupState.TAKEN:
                late.append(group)
        if self.rule is Rule.LONG_ROUNDS:
            under_way = [uid for group in late for uid in self._defer(group)]
            return Removed((), tuple(under_way), tuple(group.uid for group in late))
        reason = self._staleness.drop_reason
        cancelled = [uid for group in late for uid in self._drop(group, reason)]
        return Removed(tuple((group.uid, reason) for group in late), tuple(cancelled))

    def _drop(self, group: LiveGroup, reason: str) -> tuple[SampleId, ...]:
        under_way = self._book.drop(group, reason)
        self._record(Dropped(group.uid, reason))
        return under_way

    def _defer(self, group: LiveGroup) -> tuple[SampleId, ...]:
        under_way = self._book.park(group)
        self._record(Parked(group.uid))
        return under_way

    def _begin_round(self) -> None:
        """The next places are for B parked groups, if there are so many and no round goes on."""
        is_due = self.parked_groups >= self.groups_per_step
        if self.rule is Rule.LONG_ROUNDS and is_due and not self.in_long_round:
            self._pacing.to_place = self.groups_per_step

    def _release(self) -> None:
        if not self._book.totals.groups[GroupState.TAKEN]:
            self._pacing.release()


def _promises(started: Iterable[tuple[int, str]], *, next_uid: int) -> list[tuple[int, str]]:
    """Those not in the checkpoint, which must follow on it without a gap."""
    promises = [(uid, prompt) for uid, prompt in started if uid >= next_uid]
    for expected, (uid, _) in enumerate(promises, start=next_uid):
        if uid != expected:
            raise CheckpointError(
                f"the ledger's log goes on with group {uid} where group {expected} should be",
                fix="resume from a checkpoint of this log, or move the log away to go on without",
            )
    return promises
