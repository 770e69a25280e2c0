"""The ledger's log: every transition on disk, so that a crash neither loses nor repeats a group.

    Ledger -> Journal --once in each iteration of the event loop--> ledger.jsonl
    resume:  read_log -> started_since -> Ledger.restore(state, started=...)

Flushed bytes belong to the operating system and survive a kill -9. A checkpoint mark makes the
flush wait for the disk, so that a checkpoint never contains events that the log lacks.

The mark is appended at the moment when the ledger's state is copied for the checkpoint. A run that
resumes from a checkpoint appends `RunRestored` first: the events after that mark no longer count,
except that a group keeps its prompt. Step 0 is the beginning of the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from rollick.errors import CheckpointError, DiskError
from rollick.rollout.ledger import events as ledger_events
from rollick.rollout.ledger.events import CheckpointMarked, Event, GroupStarted, RunRestored

LOG = logging.getLogger("rollick")

BEGINNING = 0
"""The step of a run that has no checkpoint yet."""
StartedGroups = tuple[tuple[int, str], ...]
"""(id, prompt uid) of groups, by id."""


@dataclass(frozen=True, slots=True)
class LogContents:
    """The events of a log file and their size in bytes, without a torn tail."""

    events: tuple[Event, ...]
    bytes: int = 0


@dataclass(slots=True)
class Journal:
    """An open log file, for the events of one event loop. Made by `open` or `open_journal`."""

    path: Path
    _file: BinaryIO
    started: StartedGroups = ()
    """The groups in a resumed log beyond its checkpoint."""
    _buffer: bytearray = field(default_factory=bytearray)
    _has_mark: bool = False
    _flush_scheduled: bool = False
    _error_logged: bool = False

    @classmethod
    def open(cls, path: Path, *, known: LogContents | None = None) -> Journal:
        """Append to the log at `path`, or create it. A torn tail is cut off. `known` are the file's
        contents, if the caller has just read them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if known is None:
            known = read_log(path) if path.exists() else LogContents(())
        file = path.open("ab", buffering=0)
        if file.tell() > known.bytes:
            file.truncate(known.bytes)
        _sync_folder(path.parent)
        return cls(path, file)

    def append(self, event: Event) -> None:
        self._buffer += ledger_events.encode(event)
        self._has_mark = self._has_mark or isinstance(event, CheckpointMarked)

    def record(self, event: Event) -> None:
        """Buffer an event; all events of one iteration of the event loop are written together."""
        self.append(event)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write the buffer. A full disk does not stop the run: the error is logged once."""
        self._flush_scheduled = False
        try:
            self.write()
            self._error_logged = False
        except CheckpointError as error:
            if not self._error_logged:
                self._error_logged = True
                LOG.error("%s", error)

    def write(self) -> None:
        """Hand the buffer to the operating system; with a checkpoint mark in it, to the disk. After
        an error (such as a full disk) the next one continues at the same byte."""
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
            if self._has_mark:
                os.fsync(self._file.fileno())
                self._has_mark = False
        except OSError as error:
            raise DiskError(
                f"the ledger's log {self.path} cannot be written: {error.strerror}; "
                f"{len(self._buffer)} bytes are buffered",
                fix="free disk space; nothing is lost while the run continues",
            ) from error

    def mark_checkpoint(self, step: int, *, started: int) -> None:
        """Called when the ledger's state is copied for a checkpoint. Returns when the mark is on
        the disk; raises if it cannot be written, since a checkpoint needs it."""
        self.append(CheckpointMarked(step, started))
        self.write()

    def close(self) -> None:
        try:
            self.write()
        finally:
            self._file.close()


def read_log(path: Path) -> LogContents:
    """Read a log. Invalid lines at its end were torn by a crash and are ignored; others raise."""
    events: list[Event] = []
    valid = position = torn_line = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            position += len(line)
            event = ledger_events.decode(line)
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
            valid = position
    return LogContents(tuple(events), valid)


def started_since(log: LogContents, step: int) -> StartedGroups:
    """The groups that any run started after the checkpoint of `step`."""
    marks = [e.started for e in log.events if isinstance(e, CheckpointMarked) and e.step == step]
    if not marks and step != BEGINNING:
        raise missing_mark(step)
    # Two marks of one step come from a save that was repeated after a kill. Either may be the one
    # on the disk, and the ledger ignores groups that its state has.
    first = min(marks, default=0)
    prompts: dict[int, str] = {}
    for event in log.events:
        if isinstance(event, GroupStarted) and event.group >= first:
            before = prompts.setdefault(event.group, event.prompt)
            if before != event.prompt:
                raise CheckpointError(
                    f"the ledger's log has group {event.group} with prompt {before} and again with "
                    f"prompt {event.prompt}",
                    fix="two runs wrote into one log; move it away to resume without it",
                )
    return tuple(sorted(prompts.items()))


def missing_mark(step: int) -> CheckpointError:
    return CheckpointError(
        f"the ledger's log has no mark of the checkpoint of step {step}",
        fix="resume from a checkpoint of this log, or move the log away to resume without",
    )


@contextmanager
def open_journal(
    path: Path, *, resume: bool, step: int | None = None, started: int = 0
) -> Generator[Journal]:
    """The journal at `path`. A resumed run continues from the checkpoint of `step`, before which
    `started` groups had started; without one (None) it begins again with the same groups."""
    known = read_log(path) if resume and path.exists() else LogContents(())
    replayed = _groups_to_replay(known, step)
    has_mark = any(isinstance(e, CheckpointMarked) and e.step == BEGINNING for e in known.events)
    continues = bool(known.events) and (step is not None or not has_mark)
    if not continues:
        path.unlink(missing_ok=True)
    journal = Journal.open(path, known=known if continues else LogContents(()))
    journal.started = replayed
    if continues:
        journal.append(RunRestored(step or BEGINNING))
    elif step is not None:
        # The log was moved away: this mark relates what follows to the checkpoint.
        journal.append(CheckpointMarked(step, started))
    try:
        yield journal
    except BaseException:
        # The error of the block matters more than that of a log that cannot be closed.
        with suppress(CheckpointError):
            journal.close()
        raise
    journal.close()


def _groups_to_replay(log: LogContents, step: int | None) -> StartedGroups:
    if step is not None and log.events:
        return started_since(log, step)
    # A checkpoint of step 0 that was not completed has left a mark, which means nothing here.
    unmarked = tuple(event for event in log.events if not isinstance(event, CheckpointMarked))
    return started_since(LogContents(unmarked), BEGINNING)


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
