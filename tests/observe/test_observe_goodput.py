"""Goodput: every second of a run is in one state, and the states sum to the wall time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rollick.observe.diagnosis import RunSnapshot, write_run_snapshot
from rollick.observe.faults import Fault, FaultLog, LostTime
from rollick.observe.goodput import (
    GOODPUT,
    STATES,
    Goodput,
    RoleFaults,
    State,
    TimeAccount,
    TimeRow,
    fault_metrics,
    read_goodput,
    summarise_faults,
)
from rollick.observe.goodput_report import Reliability

RUN_START = 1000.0
"""Time in seconds since the epoch at which the clock reads 0."""


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def open(self, folder: Path, *, resume: bool = True) -> TimeAccount:
        return TimeAccount.open(folder, resume=resume, clock=self, now=lambda: RUN_START + self.at)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def account(tmp_path: Path, clock: Clock) -> TimeAccount:
    return clock.open(tmp_path)


def read_state_seconds(folder: Path) -> dict[State, float]:
    return {state: seconds for state, seconds in read_goodput(folder).seconds.items() if seconds}


def make_snapshot(written_at: float) -> RunSnapshot:
    return RunSnapshot(
        name="run", pipeline="rlvr", host="here", pid=1, process_start=1, written_at=written_at,
        began_at=RUN_START, step=1, steps=9, version=1, phase="train", phase_since=RUN_START,
        stuck_after_s=60,
    )  # fmt: skip


def spend(account: TimeAccount, clock: Clock, state: State, seconds: float) -> None:
    with account.during(state):
        clock.at += seconds


def test_every_second_is_in_one_state_and_the_states_sum_to_the_wall_time(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    clock.at += 7
    account.begin_steps()
    phases: dict[State, float] = {"generate": 10, "publish": 2, "validate": 5, "save": 3}
    for state, seconds in phases.items():
        spend(account, clock, state, seconds)
        clock.at += 1
    account.finish_step(1)
    clock.at += 4
    account.close(1)
    clock.at += 100  # The workers end.
    account.refresh()
    assert read_state_seconds(tmp_path) == {
        "start": 7, "generate": 10, "publish": 2, "validate": 5, "save": 3, "train": 8,
    }  # fmt: skip
    assert read_goodput(tmp_path).wall_s == 35
    assert set(read_state_seconds(tmp_path)) < set(STATES)


def test_a_wait_for_samples_is_generation_only_while_an_engine_generates(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    current_state: State = "wait"
    account.waiting_state = lambda: current_state
    account.begin_steps()
    with account.during("generate"):
        clock.at += 1
        current_state = "generate"
        account.refresh()
        clock.at += 10
        current_state = "recover"
        account.refresh()
        clock.at += 5
    with account.during("train"):
        current_state = "wait"
        account.refresh()
        clock.at += 2
    account.close(0)
    assert read_state_seconds(tmp_path) == {"wait": 1, "generate": 10, "recover": 5, "train": 2}


def test_a_repair_is_recovery_and_the_lost_part_of_the_call_is_done_again(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    account.begin_steps()
    with account.during("train"):
        clock.at += 4
        with account.recovering(lost_s=3):
            clock.at += 8
            with account.recovering(lost_s=8):
                clock.at += 1
            assert account.state == "recover"
        assert account.state == "train"
        clock.at += 3
    account.close(1)
    assert read_state_seconds(tmp_path) == {"train": 4, "redo": 3, "recover": 9}
    assert read_goodput(tmp_path).wall_s == 16


def run_three_steps(account: TimeAccount, clock: Clock) -> None:
    """Finish steps 1 to 3, of 10 s each."""
    account.begin_steps()
    for step in (1, 2, 3):
        clock.at += 10
        account.finish_step(step)


def test_the_time_of_steps_that_a_rollback_undid_is_no_progress(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    run_three_steps(account, clock)
    spend(account, clock, "generate", 4)
    clock.at += 6
    with account.recovering():
        clock.at += 2
    account.undo_steps_after(2)  # Step 3, and step 4, which is under way.
    spend(account, clock, "publish", 3)
    metrics = account.finish_step(4)
    account.close(4)
    goodput = read_goodput(tmp_path)
    assert read_state_seconds(tmp_path) == {
        "train": 20,
        "redo": 10 + 10,
        "recover": 2,
        "publish": 3,
    }
    assert goodput.wall_s == clock.at == 45
    assert (goodput.redone_steps, goodput.ettr) == (2, 23 / 45)
    assert {name.removeprefix("time/goodput/"): value for name, value in metrics.items()} == {
        "train": 0, "redo": 10, "recover": 2, "publish": 3, "ettr": 23 / 45, "redone_steps": 2,
    }  # fmt: skip


def test_a_step_that_was_under_way_after_a_rollback_is_lost_in_a_crash(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    run_three_steps(account, clock)
    account.undo_steps_after(1)
    clock.at += 5
    write_run_snapshot(tmp_path, make_snapshot(RUN_START + clock.at))
    clock.at += 7
    clock.open(tmp_path)
    assert read_state_seconds(tmp_path) == {"train": 10, "redo": 20 + 5, "recover": 7}


def test_batches_that_a_new_worker_trains_on_again_are_redone_while_the_step_waits(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    run_three_steps(account, clock)
    with account.recovering():
        clock.at += 3
        with account.redoing(2):
            clock.at += 5
        clock.at += 1
    with account.during("generate"), account.redoing(1):
        clock.at += 8
    metrics = account.finish_step(4)
    account.close(4)
    assert read_state_seconds(tmp_path) == {"train": 30, "recover": 4, "redo": 5, "generate": 8}
    assert metrics["time/goodput/redone_steps"] == read_goodput(tmp_path).redone_steps == 3


def test_each_second_that_was_lost_is_claimed_by_one_fault(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    run_three_steps(account, clock)
    with account.recovering(lost_s=0):
        clock.at += 3
        with account.redoing(1):
            clock.at += 5
        assert account.claim_lost_time() == LostTime(3, 5)
    account.undo_steps_after(2)
    account.finish_step(4)
    assert account.claim_lost_time() == LostTime(0, 10)
    assert account.claim_lost_time() == LostTime(0, 0)


def test_a_fault_of_a_resumed_run_does_not_claim_what_the_crash_cost(
    tmp_path: Path, clock: Clock
) -> None:
    crash_in_step_4(tmp_path, clock, status_after_s=6)
    clock.at += 36
    account = clock.open(tmp_path)
    assert account.claim_lost_time() == LostTime()
    clock.at += 8
    account.drop_rows_after(2)
    account.begin_steps()
    with account.recovering():
        clock.at += 1
    assert account.claim_lost_time() == LostTime(1, 0)


def test_redone_time_is_at_most_the_time_that_was_lost(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    account.begin_steps()
    clock.at += 2
    with account.recovering(lost_s=50):
        clock.at += 1
    account.close(0)
    assert read_state_seconds(tmp_path) == {"redo": 2, "recover": 1}


def test_the_metrics_of_a_step_are_its_own_and_ettr_is_of_the_run(
    clock: Clock, account: TimeAccount
) -> None:
    clock.at += 10
    account.begin_steps()
    clock.at += 20
    first = account.finish_step(1)
    spend(account, clock, "save", 5)
    clock.at += 15
    second = account.finish_step(2)
    assert first == {
        "time/goodput/start": 10,
        "time/goodput/train": 20,
        "time/goodput/ettr": 20 / 30,
        "time/goodput/redone_steps": 0,
    }
    assert second == {
        "time/goodput/start": 0,
        "time/goodput/train": 15,
        "time/goodput/save": 5,
        "time/goodput/ettr": 35 / 50,
        "time/goodput/redone_steps": 0,
    }


def crash_in_step_4(folder: Path, clock: Clock, *, status_after_s: float | None) -> None:
    """Finish three steps of 10 s after a start of 5 s, without closing the account. The
    status is dated `status_after_s` after the last step; None writes no status."""
    account = clock.open(folder)
    clock.at += 5
    account.begin_steps()
    for step in (1, 2, 3):
        clock.at += 10
        account.finish_step(step)
    if status_after_s is not None:
        write_run_snapshot(folder, make_snapshot(RUN_START + clock.at + status_after_s))


def test_after_a_crash_lost_steps_are_redone_and_the_rest_until_the_next_step_is_recovery(
    tmp_path: Path, clock: Clock
) -> None:
    crash_in_step_4(tmp_path, clock, status_after_s=6)
    clock.at += 6 + 30  # Down for 30 s.
    account = clock.open(tmp_path)
    clock.at += 8
    account.drop_rows_after(2)  # The newest checkpoint is of step 2.
    clock.at += 2
    account.begin_steps()
    for step in (3, 4):
        clock.at += 10
        metrics = account.finish_step(step)
    account.close(4)
    goodput = read_goodput(tmp_path)
    assert read_state_seconds(tmp_path) == {
        "start": 5,
        "train": 40,
        "redo": 10 + 6,
        "recover": 30 + 10,
    }
    assert goodput.wall_s == clock.at == 101
    assert (goodput.processes, goodput.redone_steps, goodput.ettr) == (2, 1, 40 / 101)
    assert metrics["time/goodput/ettr"] == 40 / 101
    assert metrics["time/goodput/redone_steps"] == 1


def test_without_a_status_the_crash_is_taken_to_follow_the_last_step(
    tmp_path: Path, clock: Clock
) -> None:
    crash_in_step_4(tmp_path, clock, status_after_s=None)
    clock.at += 36
    clock.open(tmp_path)
    assert read_state_seconds(tmp_path) == {"start": 5, "train": 30, "recover": 36}


def test_a_status_written_by_a_clock_ahead_of_ours_adds_no_time(
    tmp_path: Path, clock: Clock
) -> None:
    crash_in_step_4(tmp_path, clock, status_after_s=900)
    clock.at += 36
    clock.open(tmp_path)
    assert read_goodput(tmp_path).wall_s == clock.at


def test_a_crash_before_the_first_step_is_recovery(tmp_path: Path, clock: Clock) -> None:
    clock.open(tmp_path)
    clock.at += 12
    write_run_snapshot(tmp_path, make_snapshot(RUN_START + clock.at))
    clock.at += 3
    clock.open(tmp_path)
    assert read_state_seconds(tmp_path) == {"recover": 15}


@pytest.mark.parametrize("failed", [True, False])
def test_the_time_between_an_orderly_stop_and_a_resume_is_not_counted(
    tmp_path: Path, clock: Clock, account: TimeAccount, failed: bool
) -> None:
    account.begin_steps()
    clock.at += 10
    account.finish_step(1)
    clock.at += 2
    account.close(1, failed=failed)
    write_run_snapshot(tmp_path, replace(make_snapshot(RUN_START + clock.at), outcome="stopped"))
    clock.at += 5000
    resumed = clock.open(tmp_path)
    clock.at += 5
    resumed.drop_rows_after(1)
    resumed.begin_steps()
    resumed.close(1)
    # The step under way when a run fails is lost, and the run was down until the resume.
    stopped: dict[State, float] = {"start": 5, "train": 12}
    error: dict[State, float] = {"train": 10, "redo": 2, "recover": 5005}
    assert read_state_seconds(tmp_path) == (error if failed else stopped)
    assert read_goodput(tmp_path).redone_steps == 0


def test_steps_that_are_lost_twice_are_counted_twice(tmp_path: Path, clock: Clock) -> None:
    account = clock.open(tmp_path)
    account.begin_steps()
    for _ in range(2):
        clock.at += 10
        account.finish_step(1)
        account.drop_rows_after(0)
    clock.at += 10
    account.finish_step(1)
    account.close(1)
    assert read_state_seconds(tmp_path) == {"train": 10, "redo": 20}
    assert read_goodput(tmp_path).redone_steps == 2


def test_a_new_run_in_the_folder_of_one_that_never_began_has_its_own_time(
    tmp_path: Path, clock: Clock, account: TimeAccount
) -> None:
    clock.at += 3
    account.close(0, failed=True)
    clock.at += 1000
    second = clock.open(tmp_path, resume=False)
    clock.at += 2
    second.begin_steps()
    assert read_state_seconds(tmp_path) == {"start": 2}


def test_a_torn_line_is_skipped_and_a_resume_appends_after_it(tmp_path: Path, clock: Clock) -> None:
    crash_in_step_4(tmp_path, clock, status_after_s=None)
    with (tmp_path / GOODPUT).open("a") as file:
        file.write('{"at": 10')
    clock.at += 20
    clock.open(tmp_path).close(3)
    assert read_goodput(tmp_path).wall_s == clock.at


def test_a_time_account_that_cannot_be_written_warns_and_the_run_continues(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    account = clock.open(tmp_path / "absent")
    account.begin_steps()
    clock.at += 10
    assert account.finish_step(1)["time/goodput/train"] == 10
    assert "cannot be written" in caplog.text


def make_fault(role: str, edit: Callable[[Fault], None], **times: float) -> Fault:
    fault = Fault("id", role, 0, "killed", "signal 9", 3, times["at"], times["at"])
    edit(fault)
    return fault


def test_time_to_recover_is_from_the_fault_to_its_repair_by_role() -> None:
    def repair(after_s: float) -> Callable[[Fault], None]:
        def edit(fault: Fault) -> None:
            fault.rejoined_at = fault.failed_at + after_s

        return edit

    def cost(fault: Fault) -> None:
        repair(30)(fault)
        fault.recover_s, fault.redo_s = 4, 5

    def skip(fault: Fault) -> None:
        fault.kind, fault.rejoined_at = "not_finite", fault.failed_at

    faults = [
        make_fault("generators", repair(10), at=5),
        make_fault("policy", skip, at=6),
        make_fault("generators", cost, at=50),
        make_fault("generators", lambda fault: fault.give_up("spent"), at=90),
    ]
    generators, policy = summarise_faults(faults)
    assert (generators.role, generators.kinds, generators.gave_up) == (
        "generators", {"killed": 3}, 1,
    )  # fmt: skip
    assert (generators.median_s, generators.longest_s, generators.lost_s) == (20, 30, 9)
    assert (policy.count, policy.kinds, policy.median_s) == (1, {"not_finite": 1}, None)
    assert fault_metrics(faults) == {
        "time/goodput/faults/generators": 3,
        "time/goodput/recovery/generators": 20,
        "time/goodput/faults/policy": 1,
    }


RELIABILITY = Reliability(
    Goodput(),
    [
        RoleFaults("generators", {"killed": 2, "hung": 1}, 0, 0, [17.0, 19.0, 25.0], 41.5),
        RoleFaults("<b>policy", {"not_finite": 1}, 1, 2, []),
    ],
)
RELIABILITY.goodput.add(TimeRow(1.0, 1, {"start": 60.0, "train": 300.0, "save": 40.0}))
RELIABILITY.goodput.add(TimeRow(2.0, 2, {"train": 100.0, "recover": 99.5, "wait": 0.5}))
RELIABILITY.goodput.add(TimeRow(3.0, 1, event="restored"))


def test_time_and_faults_in_a_few_lines() -> None:
    assert RELIABILITY.lines() == [
        "time: 10 min: start 10%, train 50%, save 7%, recover 17%, redo 17%",
        "effective training time ratio (ETTR) 50.0%, 1 step done again",
        "faults of generators: 2 killed, 1 hung; repaired in 19 s (median; longest 25 s); cost "
        "41.5 s of the run",
        "faults of <b>policy: 1 not finite; 1 not repaired; 2 steps done again",
    ]
    assert Reliability(Goodput()).lines() == []


def test_the_page_has_a_bar_and_tables_of_time_and_faults() -> None:
    page = RELIABILITY.html_section()
    assert page.count("<img alt='time by state' src='data:image/png;base64,") == 1
    assert "<tr><td>train</td><td>300 s</td><td>50.0%</td></tr>" in page
    assert "<tr><td>ETTR</td><td></td><td>50.0%</td></tr>" in page
    assert "<td>3</td><td>2 killed, 1 hung</td><td>19 s</td><td>25 s</td><td>41.5 s</td>" in page
    assert "<td>&lt;b&gt;policy</td>" in page
    assert Reliability(Goodput()).html_section() == ""


def test_a_run_without_faults_has_no_metrics_of_them(tmp_path: Path) -> None:
    assert fault_metrics(FaultLog(tmp_path).faults) == {}
