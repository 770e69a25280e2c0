"""The journal: written once per event-loop iteration, marked at checkpoints, read after a kill."""

import asyncio
import os
from pathlib import Path

import pytest
from ledger_audit import audit

from rollick.errors import CheckpointError
from rollick.rollout.ledger.events import (
    CheckpointMarked,
    GroupCompleted,
    GroupStarted,
    RunRestored,
)
from rollick.rollout.ledger.log import open_journal, read_log


def started(group, prompt=""):
    return GroupStarted(group, prompt or f"toy/{group}", "toy", version=0, size=2)


def events(path):
    return list(read_log(path).events)


async def test_events_of_one_iteration_are_written_together_at_its_end(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
        journal.record(started(1))
        assert events(path) == []
        await asyncio.sleep(0)
        assert events(path) == [started(0), started(1)]
        journal.record(started(2))
        journal.flush()
        assert len(events(path)) == 3


async def test_events_of_the_last_iteration_are_written_at_the_end(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
    assert events(path) == [started(0)]


async def test_a_mark_is_there_when_it_returns_after_all_that_came_before(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
        journal.mark_checkpoint(3, started=1)
        assert events(path) == [started(0), CheckpointMarked(3, 1)]


async def test_a_new_run_begins_a_new_log(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        with open_journal(path, resume=False) as journal:
            assert journal.started == ()
            journal.record(started(0))
    assert events(path) == [started(0)]


async def test_a_resumed_run_gets_the_groups_after_its_checkpoint(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
        journal.mark_checkpoint(1, started=1)
        journal.record(started(1))
        journal.record(started(2))
    with open_journal(path, resume=True, step=1, started=1) as journal:
        assert journal.started == ((1, "toy/1"), (2, "toy/2"))
        journal.record(started(1))
    assert events(path)[4:] == [RunRestored(1), started(1)]
    assert audit(read_log(path)).groups.submitted == 2


async def test_a_run_without_a_checkpoint_gets_all_its_groups_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
    with open_journal(path, resume=True) as journal:
        assert journal.started == ((0, "toy/0"),)
        journal.record(started(0))
    assert audit(read_log(path)).groups.submitted == 1


async def test_a_mark_of_step_0_without_its_checkpoint_is_harmless(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
        journal.mark_checkpoint(0, started=1)
        journal.record(started(1))
    with open_journal(path, resume=True) as journal:
        assert journal.started == ((0, "toy/0"), (1, "toy/1"))
        journal.record(started(0))
    assert audit(read_log(path)).groups.submitted == 1


async def test_a_run_resumes_without_a_log_that_was_moved_away(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=True, step=4, started=9) as journal:
        assert journal.started == ()
        journal.record(started(9))
    assert events(path) == [CheckpointMarked(4, 9), started(9)]


async def test_a_log_of_other_checkpoints_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        journal.record(started(0))
    with (
        pytest.raises(CheckpointError, match="no mark of the checkpoint of step 5"),
        open_journal(path, resume=True, step=5),
    ):
        pass


async def test_a_full_disk_is_logged_once_and_stops_only_the_checkpoint(tmp_path, caplog):
    path = tmp_path / "ledger.jsonl"
    with open_journal(path, resume=False) as journal:
        file = journal._file
        full_device = Path("/dev/full").open("ab", buffering=0)  # noqa: ASYNC230, SIM115
        journal._file = full_device
        for group in range(3):
            journal.record(started(group))
            await asyncio.sleep(0)
        assert len(caplog.records) == 1
        assert os.strerror(28) in caplog.text
        with pytest.raises(CheckpointError, match="cannot be written"):
            journal.mark_checkpoint(1, started=3)
        full_device.close()
        journal._file = file
        journal.record(GroupCompleted(0))
    assert [event.group for event in events(path)[:3]] == [0, 1, 2]
    assert events(path)[-1] == GroupCompleted(0)
