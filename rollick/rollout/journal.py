"""The log of a rollout that runs: when it is flushed, and what a resumed run takes from it.

    Ledger --record--> Journal --once in a turn of the event loop--> LedgerLog
    checkpoint --mark--> LedgerLog, on the disk before the checkpoint is

Owns no file: that is log.py's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollick.errors import CheckpointError
from rollick.rollout.events import Event, Marked, Restored
from rollick.rollout.log import BEGINNING, LedgerLog, Log, read_log, since_checkpoint

LOG = logging.getLogger("rollick")

Pairs = tuple[tuple[int, str], ...]
"""Groups with the uids of their prompts."""


class Journal:
    """Writes what the ledger tells. Made by `open_journal`; belongs to one event loop."""

    def __init__(self, log: LedgerLog, *, started: Pairs = ()) -> None:
        """`started` are the groups that the log knows beyond the checkpoint of a resumed run."""
        self.started = started
        self._log = log
        self._is_due = False
        self._is_told = False

    def record(self, event: Event) -> None:
        """Keep an event; it is written together with all others of this turn of the loop."""
        self._log.append(event)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write what waits. A disk that is full does not stop the run: that is told once, and the
        next flush goes on at the same byte."""
        self._is_due = False
        try:
            self._log.flush()
            self._is_told = False
        except CheckpointError as error:
            if not self._is_told:
                self._is_told = True
                LOG.error("%s", error)

    def mark(self, step: int, *, started: int) -> None:
        """To be called in the moment in which the ledger's state is copied for a checkpoint.

        Returns when it is on the disk; without it there must be no checkpoint (CheckpointError).
        """
        self._log.append(Marked(step, started))
        self._log.flush()


@contextmanager
def open_journal(
    path: Path, *, resume: bool, step: int | None = None, started: int = 0
) -> Generator[Journal]:
    """The journal at `path`, begun anew or gone on with.

    A resumed run goes on from the checkpoint of `step`, before which `started` groups had started;
    None if there is no checkpoint, so that it begins again, with the same groups.
    """
    known = read_log(path) if resume and path.exists() else Log(())
    pairs = _pairs(known, step)
    goes_on = bool(known.events) and (step is not None or not _has_mark(known, BEGINNING))
    if not goes_on:
        path.unlink(missing_ok=True)
    log = LedgerLog.open(path, known=known if goes_on else Log(()))
    if goes_on:
        log.append(Restored(step or BEGINNING))
    elif step is not None:
        # Its log was moved away: what follows can be told from the checkpoint alone.
        log.append(Marked(step, started))
    try:
        yield Journal(log, started=pairs)
    except BaseException:
        # What went wrong is the news; a log that cannot be closed after it must not hide it.
        with suppress(CheckpointError):
            log.close()
        raise
    log.close()


def _pairs(log: Log, step: int | None) -> Pairs:
    if step is not None and log.events:
        return since_checkpoint(log, step).pairs
    # A checkpoint of step 0 that did not come about has left a mark, which says nothing here.
    unmarked = Log(tuple(event for event in log.events if not isinstance(event, Marked)))
    return since_checkpoint(unmarked, BEGINNING).pairs


def _has_mark(log: Log, step: int) -> bool:
    return any(isinstance(event, Marked) and event.step == step for event in log.events)
