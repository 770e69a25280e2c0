"""The accounting of benchmarks/chaos.py: which processes its faults hit, and its figures."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CONTROLLER = 4242
"""Process id of the controller; signals to it are recorded, not sent."""

StartRun = Callable[..., Any]


@pytest.fixture
def chaos() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("chaos")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def sent(chaos: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, signal.Signals]]:
    """Records signals instead of sending them; each is a process id and a signal."""
    sent: list[tuple[int, signal.Signals]] = []

    def send(pid: int, number: signal.Signals) -> bool:
        sent.append((pid, number))
        return True

    monkeypatch.setattr(chaos, "_send", send)
    return sent


@pytest.fixture
def start_run(chaos: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartRun]:
    """Starts a ChaosRun, as if `elapsed_s` ago; its run is a process that sleeps."""
    started: list[subprocess.Popen[bytes]] = []

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], **options))
        return started[-1]

    def start(*, restart_all: bool, elapsed_s: float, faults: list[Any]) -> Any:
        name = "restart_all" if restart_all else "recovery"
        run = chaos.ChaosRun(
            tmp_path / "recipe.yaml", name, faults, restart_all=restart_all, standby=False
        )
        run._begun = time.monotonic() - elapsed_s
        run._controller = lambda: CONTROLLER
        return run

    monkeypatch.setattr(chaos, "subprocess", SimpleNamespace(Popen=popen))
    yield start
    for process in started:
        process.kill()
        process.wait()


def make_outcome(chaos: Any, **values: Any) -> Any:
    defaults = {"exit_code": 0, "wall_s": 180, "steps": 72, "ettr": 0.9, "shares": {}, "faults": {}}
    return chaos.Outcome(**{**defaults, **values})


def write_goodput(folder: Path, *rows: Mapping[str, Any]) -> None:
    folder.mkdir()
    lines = [json.dumps({"at": 0, **row}) + "\n" for row in rows]
    (folder / "goodput.jsonl").write_text("".join(lines))


def test_each_round_of_faults_has_every_role_with_both_signals(chaos: Any) -> None:
    faults = chaos.plan_faults(0, every_s=30, hours=0.1)
    assert [fault.at_s for fault in faults[:3]] == [30, 60, 90]
    kinds = {(role, sent) for role in chaos.ROLES for sent in (signal.SIGKILL, signal.SIGSTOP)}
    assert Counter((fault.role, fault.signal) for fault in faults) == dict.fromkeys(kinds, 1)
    assert faults != chaos.plan_faults(1, every_s=30, hours=0.1)


def test_in_the_other_arm_every_fault_kills_the_controller_and_counts_for_its_role(
    chaos: Any, start_run: StartRun, sent: list[tuple[int, signal.Signals]]
) -> None:
    faults = chaos.plan_faults(0, every_s=10)
    run = start_run(restart_all=True, elapsed_s=35, faults=faults)
    for _ in range(5):
        run.inject_due()
    assert sent == [(CONTROLLER, signal.SIGKILL)] * 3
    assert run.injected == Counter(fault.role for fault in faults[:3])


def test_in_our_arm_a_fault_sends_its_signal_to_its_role(
    chaos: Any, start_run: StartRun, sent: list[tuple[int, signal.Signals]]
) -> None:
    faults = chaos.plan_faults(0, every_s=10)
    run = start_run(restart_all=False, elapsed_s=15, faults=faults)
    run._process_of = lambda role, controller: chaos.ROLES.index(role)
    run.inject_due()
    assert sent == [(chaos.ROLES.index(faults[0].role), faults[0].signal)]


def test_a_fault_without_a_process_waits_until_the_next_is_due_and_is_not_counted(
    chaos: Any, start_run: StartRun, sent: list[tuple[int, signal.Signals]]
) -> None:
    run = start_run(restart_all=True, elapsed_s=15, faults=chaos.plan_faults(0, every_s=10))
    run._controller = lambda: None
    run.inject_due()
    assert run._faults[0].at_s == 10
    run._begun -= 10
    run.inject_due()
    assert run._faults[0].at_s == 20
    assert (sent, run.injected.total()) == ([], 0)


def test_the_other_arm_ends_at_its_time_and_lost_steps_are_no_progress(
    chaos: Any, start_run: StartRun
) -> None:
    run = start_run(restart_all=True, elapsed_s=100, faults=chaos.plan_faults(0, every_s=1000))
    write_goodput(
        run.folder,
        {"event": "opened", "seconds": {"start": 10}},
        {"step": 1, "seconds": {"train": 30}},
        {"step": 2, "seconds": {"train": 20}},
        {"event": "opened", "seconds": {"recover": 25, "redo": 5}},
        {"step": 1, "event": "restored"},
        {"step": 2, "seconds": {"generate": 10}},
    )
    [outcome] = chaos.watch([run], until_s=100)
    assert outcome.exit_code == -signal.SIGTERM
    assert outcome.wall_s == pytest.approx(100, abs=10)
    assert outcome.ettr == 0.4  # 30 s of step 1 and 10 s of step 2, of 100 s.
    assert outcome.shares == {
        "start": 0.1, "train": 0.3, "generate": 0.1, "recover": 0.25, "redo": 0.25,
    }  # fmt: skip
    assert (outcome.lost, outcome.doubled, outcome.leftovers, outcome.score) == (0, 0, [], None)


def test_the_figures_have_the_ratio_of_each_arm_and_count_over_all_runs(chaos: Any) -> None:
    runs = {
        "recovery": [make_outcome(chaos, ettr=0.93, score=0.91, lost=1, leftovers=["port 80"])],
        "restart_all": [make_outcome(chaos, exit_code=75, ettr=0.41, score=0.5, doubled=2)],
        "without_faults": [make_outcome(chaos, score=score, lost=3) for score in (0.8, 0.9, 1.0)],
    }
    figures = chaos.summarise(runs)
    assert figures.pop("runs").keys() == runs.keys()
    # 4.303 standard errors of 0.1 / sqrt(3).
    interval = {"seeds": [0.8, 0.9, 1.0], "interval": [0.6516, 1.1484]}
    assert figures == {
        "all_finished": True,  # restart_all is stopped at the wall time of recovery.
        "lost": 1 + 3 * 3,
        "doubled": 2,
        "leftovers": 1,
        "ettr": 0.93,
        "score": 0.91,
        "ettr_restart_all": 0.41,
        "score_without_faults": interval,
    }


@pytest.mark.parametrize("arm", ["recovery", "without_faults"])
def test_a_run_that_did_not_finish_is_reported(chaos: Any, arm: str) -> None:
    runs = {"recovery": [make_outcome(chaos)], "without_faults": [make_outcome(chaos)] * 3}
    runs[arm] = [*runs[arm][1:], make_outcome(chaos, exit_code=69)]
    assert not chaos.summarise(runs)["all_finished"]


def test_arms_that_were_left_out_have_no_figures(chaos: Any) -> None:
    assert chaos.summarise({"recovery": [make_outcome(chaos)]}).keys() == {
        "all_finished", "lost", "doubled", "leftovers", "ettr", "score", "runs",
    }  # fmt: skip


def test_a_score_of_zero_is_a_score(chaos: Any) -> None:
    runs = {"without_faults": [make_outcome(chaos, score=score) for score in (0.0, 0.1, 0.2)]}
    assert chaos.summarise(runs)["score_without_faults"]["seeds"] == [0.0, 0.1, 0.2]
    runs["without_faults"][0].score = None
    assert "score_without_faults" not in chaos.summarise(runs)


def test_failed_scores_are_counted_over_all_samples_that_ended_not_over_the_batch(
    chaos: Any,
) -> None:
    row = {
        "rollout/samples": 8,
        "rollout/failed_scores": 3 / 40,
        "rollout/domain/turns/samples": 30,
        "rollout/domain/turns/failed_scores": 2 / 30,
        "rollout/domain/answers/samples": 10,
        "rollout/domain/answers/failed_scores": 1 / 10,
    }
    assert chaos.count_failed_scores(row) == 3


def test_the_failed_scores_of_a_run_are_lost_samples(chaos: Any, start_run: StartRun) -> None:
    run = start_run(restart_all=False, elapsed_s=100, faults=[])
    run.folder.mkdir()
    row = {"step": 1, "rollout/samples": 8, "rollout/failed_scores": 1 / 40}
    domain = {"rollout/domain/turns/samples": 40, "rollout/domain/turns/failed_scores": 1 / 40}
    (run.folder / "metrics.jsonl").write_text(json.dumps(row | domain) + "\n")
    [outcome] = chaos.watch([run], until_s=100)
    assert outcome.lost == 1
