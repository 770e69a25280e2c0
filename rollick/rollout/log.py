"""The ledger's log: every transition on disk, so that a kill loses no group and doubles none.

    Ledger(record=log.append) ---> buffer --flush--> ledger.jsonl, one event a line
    kill, resume:  read_log -> since_checkpoint -> Ledger.restore(state, started=resumed.pairs)

Owns the file; what an event is, is in events.py. The caller flushes once in each turn of its event
loop: what was flushed is the operating system's and survives a kill -9. A checkpoint mark makes the
flush wait for the disk too, so that a checkpoint never knows more than the log before it.

The mark is appended in the moment in which the ledger's state is copied for the checkpoint. A run
that goes on from a checkpoint appends `Restored` first: what follows that mark in the file is then
void, except that a group keeps its prompt for ever. Step 0 is the beginning of the log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from rollick.errors import CheckpointError
from rollick.rollout.events import (
    Completed,
    Dropped,
    Event,
    Marked,
    Parked,
    Restored,
    SampleDone,
    Started,
    Trained,
    Unparked,
    decode,
    encode,
)
from rollick.rollout.groups import GroupState
from rollick.rollout.rules import SURPLUS
from rollick.rollout.tally import Counts, Tally

BEGINNING = 0
"""The step of a run that has no checkpoint yet."""


@dataclass(frozen=True, slots=True)
class Log:
    """The events of a log file, and the bytes that they are; a torn tail is not among them."""

    events: tuple[Event, ...]
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """The groups that were started after a checkpoint, in the order of their ids."""

    step: int
    started: tuple[Started, ...]

    @property
    def pairs(self) -> tuple[tuple[int, str], ...]:
        """(group, prompt uid), as Ledger.restore takes them."""
        return tuple((group.group, group.prompt) for group in self.started)


class LedgerLog:
    """An open log. Made by `open`, closed by a `with`."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._buffer = bytearray()
        self._has_mark = False

    @classmethod
    def open(cls, path: Path, *, known: Log | None = None) -> LedgerLog:
        """Go on with the log at `path`, or begin one. A torn tail is cut off.

        `known` is what the file holds, where the caller has just read it.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if known is None:
            known = read_log(path) if path.exists() else Log(())
        kept = known.bytes
        file = path.open("ab", buffering=0)
        if file.tell() > kept:
            file.truncate(kept)
        log = cls(path, file)
        _sync_folder(path.parent)
        return log

    def append(self, event: Event) -> None:
        """Put an event into the buffer; `flush` writes it."""
        self._buffer += encode(event)
        self._has_mark = self._has_mark or isinstance(event, Marked)

    def flush(self) -> None:
        """Hand the buffer to the operating system; with a checkpoint mark in it, to the disk.

        On a failure (a full disk, say) what is not written stays in the buffer, so that the next
        flush goes on at the same byte.
        """
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
            if self._has_mark:
                os.fsync(self._file.fileno())
                self._has_mark = False
        except OSError as error:
            raise CheckpointError(
                f"the ledger's log {self.path} cannot be written: {error.strerror}; "
                f"{len(self._buffer)} bytes wait",
                fix="make room on the disk; nothing is lost while the run goes on",
            ) from error

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_log(path: Path) -> Log:
    """The events of a file. Lines at its end that are no events are what a crash left, and do not
    count; before an event they are damage, and refused."""
    events: list[Event] = []
    good = position = 0
    torn_line = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            position += len(line)
            event = decode(line)
            if event is None:
                torn_line = torn_line or number
                continue
            if torn_line:
                raise CheckpointError(
                    f"line {torn_line} of the ledger's log {path} is damaged, and events follow it",
                    fix="move the log away to resume without it: the groups started after the "
                    "checkpoint may then get other prompts",
                )
            events.append(event)
            good = position
    return Log(tuple(events), good)


def since_checkpoint(log: Log, step: int) -> Resumed:
    """The groups started after the checkpoint of `step`, whichever run after it started them."""
    marks = [e.started for e in log.events if isinstance(e, Marked) and e.step == step]
    if not marks and step != BEGINNING:
        raise _no_mark(step)
    # Two marks of one step come from a save that was made again after a kill. Either may be the
    # one on the disk, and the ledger leaves out what its state has.
    first = min(marks, default=0)
    started: dict[int, Started] = {}
    for event in log.events:
        if isinstance(event, Started) and event.group >= first:
            before = started.setdefault(event.group, event)
            if before.prompt != event.prompt:
                raise CheckpointError(
                    f"the ledger's log has group {event.group} with prompt {before.prompt} and "
                    f"again with prompt {event.prompt}",
                    fix="two runs wrote into one log; move it away to resume without it",
                )
    return Resumed(step, tuple(started[group] for group in sorted(started)))


def history(log: Log) -> list[Event]:
    """What counts, from the beginning to now: without what a kill and a resume made void."""
    counts: list[Event] = []
    marks = {BEGINNING: 0}
    for event in log.events:
        if isinstance(event, Restored):
            if event.step not in marks:
                raise _no_mark(event.step)
            del counts[marks[event.step] :]
            marks = {step: at for step, at in marks.items() if at <= len(counts)}
            continue
        counts.append(event)
        if isinstance(event, Marked):
            marks[event.step] = len(counts)
    return counts


def audit(log: Log, *, step: int = BEGINNING, state: Mapping[str, Any] | None = None) -> Counts:
    """The law of conservation over the checkpoint of `step` (its ledger's `state`) and the log.

    Follows every group by itself and raises a CheckpointError at the first thing that cannot be: a
    group trained twice, or dropped and trained. The log does not tell which samples run, so that
    all that are neither trained nor dropped count as waiting.
    """
    events = history(log)
    marks = [n for n, e in enumerate(events) if isinstance(e, Marked) and e.step == step]
    if not marks and step != BEGINNING:
        raise _no_mark(step)
    replay = _Replay()
    if state is not None:
        replay.begin_with(state)
    for event in events[marks[-1] + 1 if marks else 0 :]:
        replay.follow(event)
    return replay.counts()


@dataclass(slots=True)
class _Followed:
    """One group, as the log tells of it."""

    size: int
    """Its samples, without the spares that were cancelled."""
    places: int
    """With them."""
    state: GroupState = GroupState.OPEN
    done: set[int] = field(default_factory=set[int])


class _Replay:
    """Follows the events; shares no code with the ledger, since it is to find its mistakes."""

    def __init__(self) -> None:
        self._groups: dict[int, _Followed] = {}
        self._submitted = self._submitted_samples = 0
        self._trained = self._trained_samples = 0
        self._dropped: dict[str, int] = {}
        self._dropped_samples: dict[str, int] = {}

    def begin_with(self, state: Mapping[str, Any]) -> None:
        for saved in (*state["groups"], *state["parked"]):
            followed = _Followed(saved["size"] - len(saved["cancelled"]), saved["size"])
            followed.state, followed.done = GroupState(saved["state"]), set(saved["done"])
            self._groups[saved["uid"]] = followed
        self._submitted, self._submitted_samples = state["next"], state["submitted_samples"]
        self._trained, self._trained_samples = state["trained"], state["trained_samples"]
        self._dropped = dict(state["dropped"])
        self._dropped_samples = dict(state["dropped_samples"])

    def follow(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case SampleDone(group, index):
                self._finish(group, index)
            case Completed(group):
                self._complete(group)
            case Dropped(group, reason):
                dropped = self._leave(group, (GroupState.OPEN, GroupState.COMPLETE), "dropped")
                _add(self._dropped, reason, 1)
                _add(self._dropped_samples, reason, dropped.size)
            case Parked(group):
                parked = self._change(group, (GroupState.OPEN, GroupState.COMPLETE), "parked")
                parked.state = GroupState.PARKED
                parked.done.clear()
            case Unparked(group):
                self._change(group, (GroupState.PARKED,), "unparked").state = GroupState.OPEN
            case Trained(groups):
                for group in groups:
                    trained = self._leave(group, (GroupState.COMPLETE,), "trained")
                    self._trained += 1
                    self._trained_samples += trained.size
            case Marked(step, started):
                self._check_mark(step, started)
            case Restored():
                raise AssertionError("history() leaves no Restored")

    def counts(self) -> Counts:
        running = sum(group.state is GroupState.OPEN for group in self._groups.values())
        waiting = len(self._groups) - running
        samples = sum(group.size for group in self._groups.values())
        dropped, dropped_samples = sum(self._dropped.values()), sum(self._dropped_samples.values())
        counts = Counts(
            Tally(self._submitted, self._trained, dropped, waiting, running),
            Tally(
                self._submitted_samples, self._trained_samples, dropped_samples, samples, running=0
            ),
            self._dropped,
            self._dropped_samples,
        )
        if not (counts.groups.balanced and counts.samples.balanced):
            raise _broken(f"the law of conservation is broken: {counts}")
        return counts

    def _start(self, event: Started) -> None:
        if event.group != self._submitted:
            raise _broken(f"group {event.group} started where {self._submitted} was the next")
        self._groups[event.group] = _Followed(event.size, event.size)
        self._submitted += 1
        self._submitted_samples += event.size

    def _finish(self, group: int, index: int) -> None:
        followed = self._change(group, (GroupState.OPEN,), "given a sample")
        if index in followed.done or not 0 <= index < followed.places:
            raise _broken(f"sample {index} of {followed.places} of group {group} cannot be done")
        followed.done.add(index)

    def _complete(self, group: int) -> None:
        followed = self._change(group, (GroupState.OPEN,), "completed")
        followed.state = GroupState.COMPLETE
        surplus = followed.size - len(followed.done)
        if surplus:
            _add(self._dropped_samples, SURPLUS, surplus)
        followed.size = len(followed.done)

    def _check_mark(self, step: int, started: int) -> None:
        if started != self._submitted:
            raise _broken(
                f"the mark of step {step} tells of {started} groups started, and the log of "
                f"{self._submitted}"
            )

    def _change(self, group: int, states: Sequence[GroupState], what: str) -> _Followed:
        followed = self._groups.get(group)
        if followed is None:
            raise _broken(f"group {group} was {what}, but it is not in flight")
        if followed.state not in states:
            raise _broken(f"group {group} was {what} while {followed.state}")
        return followed

    def _leave(self, group: int, states: Sequence[GroupState], what: str) -> _Followed:
        followed = self._change(group, states, what)
        del self._groups[group]
        return followed


def _add(counted: dict[str, int], reason: str, number: int) -> None:
    counted[reason] = counted.get(reason, 0) + number


def _broken(what: str) -> CheckpointError:
    return CheckpointError(
        f"the ledger's log does not add up: {what}", fix="report it with the log: it is our mistake"
    )


def _no_mark(step: int) -> CheckpointError:
    return CheckpointError(
        f"the ledger's log has no mark of the checkpoint of step {step}",
        fix="resume from a checkpoint of this log, or move the log away to go on without",
    )


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
