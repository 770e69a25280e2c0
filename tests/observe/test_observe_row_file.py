"""Rows of a run on a disk that is full: they wait, none is lost, torn or written twice."""

import json
import os
from pathlib import Path

import pytest

from rollick.episodes.recorded import find_episode
from rollick.errors import DataError
from rollick.observe import row_file
from rollick.observe.metrics import MetricLog, read_metrics
from rollick.observe.row_file import RowFile, read_rows

FULL = Path("/dev/full")
"""Every write to it fails with ENOSPC."""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def test_rows_on_a_full_disk_wait_and_are_written_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "samples.jsonl"
    file = RowFile(path)
    path.symlink_to(FULL)
    file.append([{"step": 1}, {"step": 2}])
    file.append([{"step": 3}])
    assert caplog.text.count("No space left on device; the run continues") == 1
    path.unlink()
    file.append([{"step": 4}])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert "can be written again; 0 rows were lost" in caplog.text


def test_a_write_that_fails_half_way_continues_at_the_same_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real_write = 0, os.write

    def write(descriptor: int, data: bytearray) -> int:
        nonlocal written
        if written >= 10:
            raise OSError(28, "No space left on device")
        written += 5
        return real_write(descriptor, data[:5])

    file = RowFile(tmp_path / "rows.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(row_file.os, "write", write)
        file.append([{"step": 1, "text": "a long row"}])
    file.append([{"step": 2}])
    rows = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert rows == [{"step": 1, "text": "a long row"}, {"step": 2}]


def test_the_queue_is_bounded_and_lost_rows_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(row_file, "MAX_WAITING_BYTES", 20)
    path = tmp_path / "rows.jsonl"
    path.symlink_to(FULL)
    file = RowFile(path)
    for step in range(5):
        file.append([{"step": step}])
    assert file.num_lost_rows == 3
    file.close()
    assert "the last 24 bytes were lost" in caplog.text


def test_metrics_on_a_full_disk_do_not_stop_the_run(tmp_path: Path) -> None:
    log = MetricLog(tmp_path, [])
    log.path.symlink_to(FULL)
    log.log(1, {"train/loss": 0.5})
    log.path.unlink()
    log.log(2, {"train/loss": 0.25})
    assert read_metrics(log.path) == log.history
    assert [row["step"] for row in log.history] == [1, 2]


def test_the_torn_last_row_of_a_killed_run_is_skipped_by_its_readers(tmp_path: Path) -> None:
    file = tmp_path / "validation.jsonl"
    file.write_text('{"step": 1, "sample": "g0.0", "episode": {}}\n{"step": 2, "sam')
    assert [row["step"] for row in read_rows(file)] == [1]
    assert find_episode(tmp_path, sample="", step=None, training=False)["sample"] == "g0.0"
    file.write_text('{"step": 1, "sample": "g0.0"}\n')
    with pytest.raises(DataError, match="has no episode of an environment"):
        find_episode(tmp_path, sample="", step=None, training=False)
