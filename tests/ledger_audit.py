"""Checks the conservation law of a ledger and of its log. Shares no code with the ledger, so that
it finds the ledger's mistakes.

    submitted = trained + dropped (with a reason) + waiting + running
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollick.errors import CheckpointError
from rollick.rollout.ledger.events import (
    BatchTrained,
    CheckpointMarked,
    Event,
    GroupCompleted,
    GroupDeferred,
    GroupDropped,
    GroupRestarted,
    GroupStarted,
    RunRestored,
    SampleDone,
)
from rollick.rollout.ledger.group_record import GroupState, LedgerError, SampleState
from rollick.rollout.ledger.ledger import Ledger
from rollick.rollout.ledger.log import BEGINNING, LogContents, missing_mark
from rollick.rollout.ledger.staleness import SURPLUS


@dataclass(frozen=True, slots=True)
class FlowCounts:
    """The conservation law of groups or of samples.

    Of samples, `running` are being generated or scored, and `waiting` wait for an engine or, when
    done, for their training. Of groups, `running` are open and `waiting` wait for their training or
    are deferred.
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
class LedgerCounts:
    """Groups and samples by state."""

    groups: FlowCounts
    samples: FlowCounts
    dropped_by_reason: Mapping[str, int]
    """Groups by reason."""
    dropped_samples: Mapping[str, int]
    """Samples by reason: those of dropped groups, and spares that were not needed."""


def ledger_counts(ledger: Ledger) -> LedgerCounts:
    """Counts from the ledger's totals of groups that left it, and from the records in it."""
    state, records = ledger.state(), [*ledger.active_groups(), *ledger.deferred_groups()]
    running = sum(record.state is GroupState.OPEN for record in records)
    samples = Counter(state for record in records for state in record.samples)
    dropped, dropped_samples = state["dropped"], state["dropped_samples"]
    return LedgerCounts(
        FlowCounts(
            state["next"],
            state["trained"],
            sum(dropped.values()),
            len(records) - running,
            running,
        ),
        FlowCounts(
            state["submitted_samples"],
            state["trained_samples"],
            sum(dropped_samples.values()),
            samples[SampleState.WAITING] + samples[SampleState.DONE],
            samples[SampleState.RUNNING] + samples[SampleState.SCORING],
        ),
        dropped,
        dropped_samples,
    )


def count_complete(ledger: Ledger) -> int:
    return sum(group.state is GroupState.COMPLETE for group in ledger.active_groups())


def check_ledger(ledger: Ledger) -> None:
    """Assert that every group and sample is accounted for and the sums match the records."""
    counts = ledger_counts(ledger)
    if not (counts.groups.balanced and counts.samples.balanced):
        raise LedgerError(f"the law of conservation is broken: {counts}")
    states = Counter(group.state for group in ledger.active_groups())
    deferred = ledger.deferred_groups()
    assert states[GroupState.COMPLETE] == len(ledger._table.completed) - ledger._table.taken
    assert states[GroupState.TAKEN] == ledger._table.taken
    assert states[GroupState.DEFERRED] == 0
    assert {group.state for group in deferred} <= {GroupState.DEFERRED}
    for group in ledger.active_groups():
        done = group.samples.count(SampleState.DONE)
        complete = done == ledger.group_size and not group.unfinished()
        if done != group.done or (group.state is not GroupState.OPEN and not complete):
            raise LedgerError(f"group {group.uid} is {group.state} with {done} samples done")


def effective_events(log: LogContents) -> list[Event]:
    """The events without those that a resume after a kill discarded."""
    effective: list[Event] = []
    marks = {BEGINNING: 0}
    for event in log.events:
        if isinstance(event, RunRestored):
            if event.step not in marks:
                raise missing_mark(event.step)
            del effective[marks[event.step] :]
            marks = {step: length for step, length in marks.items() if length <= len(effective)}
            continue
        effective.append(event)
        if isinstance(event, CheckpointMarked):
            marks[event.step] = len(effective)
    return effective


def audit(
    log: LogContents, *, step: int = BEGINNING, state: Mapping[str, Any] | None = None
) -> LedgerCounts:
    """The counts after the checkpoint of `step` (its ledger's `state`) and the log.

    Raises a CheckpointError at the first impossible event, such as a group that is trained twice.
    The log does not record which samples run, so all that are neither trained nor dropped count as
    waiting.
    """
    events = effective_events(log)
    marks = [n for n, e in enumerate(events) if isinstance(e, CheckpointMarked) and e.step == step]
    if not marks and step != BEGINNING:
        raise missing_mark(step)
    replay = _Replay()
    if state is not None:
        replay.load_state(state)
    for event in events[marks[-1] + 1 if marks else 0 :]:
        replay.apply(event)
    return replay.counts()


@dataclass(slots=True)
class _ReplayedGroup:
    """The state of one group after the events so far."""

    size: int
    """Its samples, without the spares that were cancelled."""
    all_samples: int
    """Its samples, with the cancelled spares."""
    state: GroupState = GroupState.OPEN
    done: set[int] = field(default_factory=set[int])


class _Replay:
    """Applies the events one by one."""

    def __init__(self) -> None:
        self._groups: dict[int, _ReplayedGroup] = {}
        self._submitted = self._submitted_samples = 0
        self._trained = self._trained_samples = 0
        self._dropped: dict[str, int] = {}
        self._dropped_samples: dict[str, int] = {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for saved in (*state["groups"], *state["deferred"]):
            replayed = _ReplayedGroup(saved["size"] - len(saved["cancelled"]), saved["size"])
            replayed.state, replayed.done = GroupState(saved["state"]), set(saved["done"])
            self._groups[saved["uid"]] = replayed
        self._submitted, self._submitted_samples = state["next"], state["submitted_samples"]
        self._trained, self._trained_samples = state["trained"], state["trained_samples"]
        self._dropped = dict(state["dropped"])
        self._dropped_samples = dict(state["dropped_samples"])

    def apply(self, event: Event) -> None:
        match event:
            case GroupStarted():
                self._start(event)
            case SampleDone(group, index):
                self._finish(group, index)
            case GroupCompleted(group):
                self._complete(group)
            case GroupDropped(group, reason):
                dropped = self._remove(group, (GroupState.OPEN, GroupState.COMPLETE), "dropped")
                _add(self._dropped, reason, 1)
                _add(self._dropped_samples, reason, dropped.size)
            case GroupDeferred(group):
                deferred = self._expect(group, (GroupState.OPEN, GroupState.COMPLETE), "deferred")
                deferred.state = GroupState.DEFERRED
                deferred.done.clear()
            case GroupRestarted(group):
                self._expect(group, (GroupState.DEFERRED,), "restarted").state = GroupState.OPEN
            case BatchTrained(groups):
                for group in groups:
                    trained = self._remove(group, (GroupState.COMPLETE,), "trained")
                    self._trained += 1
                    self._trained_samples += trained.size
            case CheckpointMarked(step, started):
                self._check_mark(step, started)
            case RunRestored():
                raise AssertionError("effective_events() leaves no RunRestored")

    def counts(self) -> LedgerCounts:
        running = sum(group.state is GroupState.OPEN for group in self._groups.values())
        waiting = len(self._groups) - running
        samples = sum(group.size for group in self._groups.values())
        dropped, dropped_samples = sum(self._dropped.values()), sum(self._dropped_samples.values())
        counts = LedgerCounts(
            FlowCounts(self._submitted, self._trained, dropped, waiting, running),
            FlowCounts(
                self._submitted_samples, self._trained_samples, dropped_samples, samples, running=0
            ),
            self._dropped,
            self._dropped_samples,
        )
        if not (counts.groups.balanced and counts.samples.balanced):
            raise _audit_error(f"the law of conservation is broken: {counts}")
        return counts

    def _start(self, event: GroupStarted) -> None:
        if event.group != self._submitted:
            raise _audit_error(f"group {event.group} started where {self._submitted} was the next")
        self._groups[event.group] = _ReplayedGroup(event.size, event.size)
        self._submitted += 1
        self._submitted_samples += event.size

    def _finish(self, group: int, index: int) -> None:
        replayed = self._expect(group, (GroupState.OPEN,), "given a sample")
        if index in replayed.done or not 0 <= index < replayed.all_samples:
            raise _audit_error(
                f"sample {index} of {replayed.all_samples} of group {group} cannot be done"
            )
        replayed.done.add(index)

    def _complete(self, group: int) -> None:
        replayed = self._expect(group, (GroupState.OPEN,), "completed")
        replayed.state = GroupState.COMPLETE
        surplus = replayed.size - len(replayed.done)
        if surplus:
            _add(self._dropped_samples, SURPLUS, surplus)
        replayed.size = len(replayed.done)

    def _check_mark(self, step: int, started: int) -> None:
        if started != self._submitted:
            raise _audit_error(
                f"the mark of step {step} has {started} groups started, and the log "
                f"{self._submitted}"
            )

    def _expect(self, group: int, states: Sequence[GroupState], description: str) -> _ReplayedGroup:
        replayed = self._groups.get(group)
        if replayed is None:
            raise _audit_error(f"group {group} was {description}, but it is not in flight")
        if replayed.state not in states:
            raise _audit_error(f"group {group} was {description} while {replayed.state}")
        return replayed

    def _remove(self, group: int, states: Sequence[GroupState], description: str) -> _ReplayedGroup:
        replayed = self._expect(group, states, description)
        del self._groups[group]
        return replayed


def _add(totals: dict[str, int], reason: str, number: int) -> None:
    totals[reason] = totals.get(reason, 0) + number


def _audit_error(description: str) -> CheckpointError:
    return CheckpointError(
        f"the ledger's log does not add up: {description}",
        fix="report it with the log: it is our mistake",
    )
