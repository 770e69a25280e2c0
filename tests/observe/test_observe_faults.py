"""faults.jsonl: the rows that are written, and the faults that are read back."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from rollick.errors import EngineLost, WorkerError, WorkerHung
from rollick.observe.faults import FAULTS, FaultLog, LostTime, failure_time, read_faults


def test_a_repaired_fault_is_read_back_with_all_its_times(tmp_path: Path) -> None:
    faults = FaultLog(tmp_path, step=lambda: 7)
    fault = faults.begin("generators", 1, kind="killed", cause="signal 9", failed_at=5.0)
    fault.mark_restarted()
    fault.mark_rejoined(redone_steps=1, lost=LostTime(recover_s=3.0, redo_s=2.0))
    (loaded,) = read_faults(tmp_path)
    assert loaded == fault
    assert (loaded.recover_s, loaded.redo_s) == (3.0, 2.0)
    assert (loaded.role, loaded.rank, loaded.step, loaded.failed_at, loaded.redone_steps) == (
        "generators", 1, 7, 5.0, 1,
    )  # fmt: skip
    assert loaded.restarted_at is not None
    assert loaded.rejoined_at is not None
    assert loaded.failed_at < loaded.detected_at <= loaded.restarted_at <= loaded.rejoined_at


def test_a_fault_does_not_happen_after_it_was_noticed(tmp_path: Path) -> None:
    fault = FaultLog(tmp_path).begin("policy", 0, kind="hung", cause="no answer", failed_at=9e9)
    assert fault.failed_at == fault.detected_at


@pytest.mark.parametrize("make_copy", [WorkerHung.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_copy_of_an_error_tells_the_same_time_of_failure(
    make_copy: Callable[[WorkerHung], WorkerHung],
) -> None:
    error = make_copy(WorkerHung("no answer", fix="see the log", failed_at=5.0))
    assert (failure_time(error), error.message, error.fix) == (5.0, "no answer", "see the log")


def test_an_error_that_is_not_a_loss_of_a_worker_has_no_time_of_failure() -> None:
    assert failure_time(WorkerError("ValueError")) is failure_time(EngineLost("gone")) is None


def test_a_fault_is_on_disk_before_it_is_repaired_and_keeps_its_place(tmp_path: Path) -> None:
    faults = FaultLog(tmp_path)
    first = faults.begin("policy", 0, kind="hung", cause="no answer")
    faults.begin("critic", 0, kind="raised", cause="ValueError").give_up("the budget is spent")
    assert [fault.rejoined_at for fault in read_faults(tmp_path)] == [None, None]
    first.mark_rejoined()
    assert [(f.role, f.gave_up) for f in read_faults(tmp_path)] == [
        ("policy", None),
        ("critic", "the budget is spent"),
    ]


def test_faults_of_two_processes_of_a_run_are_separate_and_a_torn_line_is_skipped(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        FaultLog(tmp_path).begin("policy", 0, kind="killed", cause="signal 9")
    with (tmp_path / FAULTS).open("a") as file:
        file.write('{"id": "to')
    assert len(read_faults(tmp_path)) == 2
    FaultLog(tmp_path).begin("controller", 0, kind="killed", cause="signal 9").mark_rejoined()
    assert [fault.role for fault in read_faults(tmp_path)] == ["policy", "policy", "controller"]


def test_a_log_that_cannot_be_written_warns_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = FaultLog(tmp_path / "absent")
    faults.begin("policy", 0, kind="killed", cause="signal 9").mark_rejoined()
    assert len(faults.faults) == 1
    assert "cannot be written" in caplog.text
