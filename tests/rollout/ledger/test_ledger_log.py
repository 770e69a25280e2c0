"""The ledger's log: after a kill or torn write, at a resume, and under an audit."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from ledger_audit import audit, effective_events, ledger_counts

from rollick.errors import CheckpointError
from rollick.rollout.ledger.events import (
    BatchTrained,
    CheckpointMarked,
    GroupCompleted,
    GroupDeferred,
    GroupDropped,
    GroupRestarted,
    GroupStarted,
    RunRestored,
    SampleDone,
    decode,
    encode,
)
from rollick.rollout.ledger.ledger import Ledger
from rollick.rollout.ledger.log import Journal, LogContents, read_log, started_since
from rollick.rollout.ledger.staleness import StalenessPolicy
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId

ALL_EVENTS = (
    GroupStarted(0, "sums/3", "sums", 0, 2),
    SampleDone(0, 1),
    GroupCompleted(0),
    GroupDropped(1, "no_signal"),
    GroupDeferred(2),
    GroupRestarted(2, 4),
    BatchTrained((0, 3), 5),
    CheckpointMarked(2, 7),
    RunRestored(2),
)
KILLED_SCRIPT = """
import os, signal, sys
from pathlib import Path
from rollick.rollout.ledger.events import GroupDeferred
from rollick.rollout.ledger.log import Journal
log = Journal.open(Path(sys.argv[1]))
log.append(GroupDeferred(0))
log.append(GroupDeferred(1))
log.write()
log.append(GroupDeferred(2))
os.kill(os.getpid(), signal.SIGKILL)
"""


def started(uid, name="toy/0", *, version=0, size=1):
    return GroupStarted(uid, name, "toy", version, size)


def write(path, *events):
    with closing(Journal.open(path)) as log:
        for event in events:
            log.append(event)
    return path


@pytest.mark.parametrize("event", ALL_EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_is_read_as_it_was_written(event):
    line = encode(event)
    assert line.count(b"\n") == 1
    assert decode(line) == event


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[1]\n",
        b"\0\0\0\0\n",
        b"\xff\xfe\n",
        b'{"event":"unheard","group":1}\n',
        b'{"event":"deferred"}\n',
        b'{"event":"deferred","group":"1"}\n',
        b'{"event":"deferred","group":true}\n',
        b'{"event":"deferred","group":1,"more":2}\n',
        b'{"event":"trained","groups":[1,"2"],"version":1}\n',
        b'{"event":["deferred"],"group":1}\n',
        b'{"event":"deferred","group":1}',
    ],
)
def test_an_incomplete_line_is_not_an_event(line):
    assert decode(line) is None


def test_a_log_is_continued_by_the_next_run(tmp_path):
    path = tmp_path / "run" / "ledger.jsonl"
    write(path, *ALL_EVENTS[:4])
    write(path, *ALL_EVENTS[4:])
    assert read_log(path).events == ALL_EVENTS


def test_events_are_in_the_file_after_a_flush_and_not_before(tmp_path):
    with closing(Journal.open(tmp_path / "log")) as log:
        log.append(GroupDeferred(1))
        assert read_log(log.path).events == ()
        log.write()
        assert read_log(log.path).events == (GroupDeferred(1),)


def test_flushed_events_survive_a_kill(tmp_path):
    path = tmp_path / "log"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_SCRIPT, str(path)], timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert read_log(path).events == (GroupDeferred(0), GroupDeferred(1))


def test_only_a_checkpoint_mark_waits_for_the_disk(tmp_path, monkeypatch):
    with closing(Journal.open(tmp_path / "log")) as log:
        synced = []
        monkeypatch.setattr(os, "fsync", synced.append)
        log.append(GroupDeferred(1))
        log.write()
        assert not synced
        log.append(CheckpointMarked(1, 2))
        log.append(GroupDeferred(1))
        log.write()
        log.write()
        assert len(synced) == 1


def test_a_log_cut_at_any_byte_keeps_the_earlier_events_and_can_be_continued(tmp_path):
    path = write(tmp_path / "log", *ALL_EVENTS)
    full = path.read_bytes()
    for cut in range(len(full)):
        path.write_bytes(full[:cut])
        lines = full[:cut].count(b"\n")
        assert read_log(path).events == ALL_EVENTS[:lines]
        if cut % 7 == 0:  # not each time, since it syncs to disk
            write(path, GroupDeferred(9))
            assert read_log(path).events == (*ALL_EVENTS[:lines], GroupDeferred(9))


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"event":"pa\n{"ev', b"\n\n", b"\xff\n" * 5])
def test_a_torn_tail_of_several_lines_is_dropped(tmp_path, tail):
    path = write(tmp_path / "log", *ALL_EVENTS)
    path.write_bytes(path.read_bytes() + tail)
    assert read_log(path).events == ALL_EVENTS
    write(path, GroupDeferred(9))
    assert read_log(path).events == (*ALL_EVENTS, GroupDeferred(9))


def test_damage_in_the_middle_is_refused_with_its_line(tmp_path):
    path = write(tmp_path / "log", *ALL_EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"complete", b"comp\0ete")
    path.write_bytes(b"".join(lines))
    for read in (read_log, Journal.open):
        with pytest.raises(CheckpointError, match=r"line 3 of .* is damaged") as refused:
            read(path)
    assert "move the log away" in refused.value.fix
    assert path.read_bytes() == b"".join(lines), "a log that is refused is left as it is"


class FullDisk:
    """A file that accepts `room` more bytes and then raises ENOSPC."""

    def __init__(self, file):
        self.file, self.room = file, 0

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(self.room, len(data))
        self.room -= taken
        return self.file.write(data[:taken])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_loses_no_event_and_tears_no_line(tmp_path):
    with closing(Journal.open(tmp_path / "log")) as log:
        disk = log._file = FullDisk(log._file)
        for event in ALL_EVENTS:
            log.append(event)
        disk.room = 50
        with pytest.raises(CheckpointError, match="No space left") as refused:
            log.write()
        assert "free disk space" in refused.value.fix
        assert read_log(log.path).events == ALL_EVENTS[:0]
        disk.room = 10_000
        log.write()
        assert read_log(log.path).events == ALL_EVENTS


def test_a_resumed_run_learns_the_groups_started_after_its_checkpoint():
    log = LogContents(
        (started(0), started(1, "toy/5"), CheckpointMarked(1, 2), started(2, "toy/3"), started(3))
    )
    assert started_since(log, 1) == ((2, "toy/3"), (3, "toy/0"))
    assert [uid for uid, _ in started_since(log, 0)] == [0, 1, 2, 3]
    with pytest.raises(CheckpointError, match="no mark of the checkpoint of step 7"):
        started_since(log, 7)


def test_groups_that_several_killed_runs_started_are_all_started_again():
    first = (started(0), CheckpointMarked(1, 1), started(1, "a"), started(2, "b"), started(3, "c"))
    second = (RunRestored(1), started(1, "a"))
    third = (RunRestored(1), started(1, "a"), started(2, "b"), CheckpointMarked(2, 3))
    log = LogContents((*first, *second))
    assert started_since(log, 1) == ((1, "a"), (2, "b"), (3, "c"))
    log = LogContents((*first, *second, *third))
    assert started_since(log, 2) == ((3, "c"),)


def test_a_group_with_two_prompts_is_refused():
    log = LogContents((CheckpointMarked(1, 0), started(0, "a"), RunRestored(1), started(0, "b")))
    with pytest.raises(CheckpointError, match="group 0 with prompt a and again with prompt b"):
        started_since(log, 1)


def test_events_after_the_mark_of_a_resumed_checkpoint_are_void():
    mark, lost, kept = CheckpointMarked(1, 1), started(1, version=3), started(1, version=2)
    log = LogContents((started(0), mark, lost, CheckpointMarked(2, 2), RunRestored(1), kept))
    assert effective_events(log) == [started(0), mark, kept]
    with pytest.raises(CheckpointError, match="no mark of the checkpoint of step 2"):
        effective_events(LogContents((*log.events, RunRestored(2))))


def test_an_audit_reports_where_every_group_and_sample_is():
    log = LogContents(
        (
            *(started(uid, size=3) for uid in range(5)),
            *(SampleDone(uid, index) for uid in (0, 1) for index in (0, 2)),
            GroupCompleted(0),
            GroupCompleted(1),
            BatchTrained((0,), 1),
            GroupDropped(2, "stale"),
            GroupDeferred(3),
        )
    )
    counts = audit(log)
    groups, samples = counts.groups, counts.samples
    assert (groups.submitted, groups.trained, groups.dropped) == (5, 1, 1)
    assert (groups.waiting, groups.running) == (2, 1)
    # Of group 0 two are trained; two of group 1 and three each of 3 and 4 wait.
    assert (samples.submitted, samples.trained, samples.waiting) == (15, 2, 8)
    assert counts.dropped_samples == {"surplus": 2, "stale": 3}


DONE = (started(0), SampleDone(0, 0), GroupCompleted(0))


@pytest.mark.parametrize(
    ("events", "finds"),
    [
        (
            (*DONE, BatchTrained((0,), 1), BatchTrained((0,), 2)),
            "group 0 was trained, but it is not in",
        ),
        (
            (*DONE, GroupDropped(0, "stale"), BatchTrained((0,), 1)),
            "group 0 was trained, but it is not in",
        ),
        ((started(0), BatchTrained((0,), 1)), "group 0 was trained while open"),
        ((started(0), GroupDeferred(0), SampleDone(0, 0)), "given a sample while deferred"),
        ((*DONE[:2], SampleDone(0, 0)), "sample 0 of 1 of group 0 cannot be done"),
        ((started(0), GroupRestarted(0, 1)), "restarted while open"),
        ((started(0), started(0)), "group 0 started where 1 was the next"),
        ((started(0), started(2)), "group 2 started where 1 was the next"),
        ((started(0), CheckpointMarked(1, 2)), "has 2 groups started, and the log 1"),
    ],
)
def test_an_audit_finds_what_cannot_be(events, finds):
    with pytest.raises(CheckpointError, match=finds):
        audit(LogContents(events))


def test_an_audit_finds_a_checkpoint_that_belongs_to_another_log():
    ledger = Ledger(StalenessPolicy(1, 0), 1)
    ledger.start_group(prompt(), PolicyVersion(0))
    state = ledger.state() | {"trained": 3}
    with pytest.raises(CheckpointError, match="conservation is broken"):
        audit(LogContents((started(0), CheckpointMarked(1, 1))), step=1, state=state)


def test_a_kill_between_two_checkpoints_loses_no_group_and_doubles_none(tmp_path):
    path = tmp_path / "ledger.jsonl"

    def start_groups(ledger, *names):
        for name in names:
            ledger.start_group(prompt(uid=name), PolicyVersion(0))

    with closing(Journal.open(path)) as log:
        ledger = Ledger(StalenessPolicy(2, 1), 1, record=log.append)
        start_groups(ledger, "a", "b")
        state = ledger.state()
        log.append(CheckpointMarked(1, state["next"]))
        start_groups(ledger, "c", "d")
        ledger.sample_started(SampleId(2, 0))
        log.write()
    read = read_log(path)
    with closing(Journal.open(path)) as log:
        log.append(RunRestored(1))
        ledger = Ledger(StalenessPolicy(2, 1), 1, record=log.append)
        ledger.restore(state, started=started_since(read, 1))
        start_groups(ledger, "c")
        assert ledger.next_prompt_uid == "d"
        assert ledger_counts(ledger).samples.running == 0
    for counts in (audit(read_log(path)), audit(read_log(path), step=1, state=state)):
        assert counts.groups == ledger_counts(ledger).groups
        assert counts.groups.submitted == 3
