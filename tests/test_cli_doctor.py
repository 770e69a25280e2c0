"""`rollick doctor` and `rollick trace` on runs that hang, died or finished."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from plugin_package import write_plugins
from rich.console import Console

from rollick import LoadedRecipe, RunResult
from rollick.commands.doctor import diagnose_folder, environment_facts
from rollick.config.load import dump_recipe, recipe_from_dict
from rollick.errors import ConfigError, StuckError
from rollick.infer.native.engine import NativeEngine
from rollick.observe.diagnosis import (
    QUIET_AFTER_S,
    SILENT_AFTER_S,
    RunEvidence,
    RunSnapshot,
    diagnose,
    format_duration,
    read_run_snapshot,
    render_diagnosis,
    write_run_snapshot,
)
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunObjects
from rollick.run_folder import run_lock
from rollick.testing.toys import toy_recipe
from rollick.types import Completion, Request

Toy = Callable[..., LoadedRecipe]

HANGS = """
import time

def hangs(completion):
    time.sleep(300)
"""
HEAVY = "{'torch', 'ray', 'transformers', 'datasets'}"


def make_snapshot(**changes: Any) -> RunSnapshot:
    """The snapshot of a run in its third step, at second 1000."""
    default = RunSnapshot(
        name="toy",
        pipeline="rlvr",
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=1,
        written_at=1000.0,
        began_at=900.0,
        step=2,
        steps=4,
        version=2,
        phase="generate",
        phase_since=690.0,
        stuck_after_s=600.0,
        waits_for="group 37: sample 3 in tool search for 310 s",
    )
    return replace(default, **changes)


def run_cli(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollick.cli", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture(scope="module")
def hanging(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[Path, subprocess.Popen[bytes]]]:
    """The folder and the process of a run whose reward hangs."""
    base = tmp_path_factory.mktemp("hanging")
    (base / "hangs.py").write_text(HANGS)
    recipe = toy_recipe(tiny_folder, base, name="hangs", steps=2)
    recipe["data"]["domains"]["letters"]["rewards"] = ["hangs.py:hangs"]
    del recipe["data"]["validation"]
    loaded = recipe_from_dict(recipe, overrides=["rewards.timeout_s=200"], base_dir=base)
    (base / "recipe.yaml").write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    command = [sys.executable, "-m", "rollick.cli", "train", str(base / "recipe.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not is_scoring(base / "hangs"):
            assert time.monotonic() < deadline, "the run did not come to its reward"
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
        yield base / "hangs", process
    finally:
        process.kill()
        process.wait(30)


def is_scoring(folder: Path) -> bool:
    expected = read_run_snapshot(folder)
    return expected is not None and "being scored" in expected.waits_for


def test_the_doctor_names_what_a_hanging_run_waits_for(
    hanging: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    folder, process = hanging
    report = run_cli("doctor", folder)
    assert report.returncode == 0, report.stderr
    assert f"running (process {process.pid} on {socket.gethostname()})" in report.stdout
    assert "step 1 waits for group 0: sample 0 being scored for " in report.stdout
    assert "; and 12 more samples" in report.stdout
    assert "rewards: 16 in flight, 0 done" in report.stdout
    assert "no checkpoint yet" in report.stdout


def test_the_doctor_reports_the_same_as_json(
    hanging: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    report = json.loads(run_cli("doctor", hanging[0], "--json").stdout)
    assert report["state"] == "running"
    [engine] = report["snapshot"]["engines"]
    assert (engine["in_flight"], engine["limit"]) == (0, 16)
    assert 0 <= engine["last_answer_s"] < 120
    assert report["environment"]["torch"][0].isdigit()


def test_the_report_is_renewed_while_the_run_hangs(
    hanging: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    first = read_run_snapshot(hanging[0])
    deadline = time.monotonic() + 20
    while (later := read_run_snapshot(hanging[0])) == first:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert first is not None
    assert later is not None
    assert later.quiet_s > first.quiet_s
    assert later.written_at - first.written_at >= 1.9


def test_the_doctor_reports_a_killed_run_as_dead_and_how_to_resume(
    hanging: tuple[Path, subprocess.Popen[bytes]],
) -> None:
    folder, process = hanging
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    report = run_cli("doctor", folder).stdout
    assert (
        f"dead: process {process.pid} on {socket.gethostname()} exited without an outcome" in report
    )
    assert "when it last reported: step 1 waits for group 0" in report
    assert "run the same command with --resume to continue from the beginning" in report


class HangingEngine(NativeEngine):
    """Hangs in generation, which has no time limit, unlike rewards, environments and agents."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def hanging_toy(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    targets = {"hanging": f"{__name__}:HangingEngine"}
    monkeypatch.syspath_prepend(write_plugins(tmp_path / "x", "engines", targets).split(":")[0])
    return partial(toy, "infer.engine=hanging", "run.stuck_after_s=1")


def test_a_run_that_hangs_too_long_ends_and_leaves_its_stacks(
    hanging_toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = hanging_toy()
    with caplog.at_level(logging.ERROR, "rollick"), pytest.raises(StuckError, match="step 1 waits"):
        run_recipe(loaded)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    stacks = (folder / "stuck.txt").read_text()
    assert "step 1 waits for group 0: sample 0 generating on engine 0 for 1" in stacks
    tasks, threads = stacks.split("\nthreads\n")
    assert "\ng0.0\n" in tasks
    assert "RemoteEngine.generate" in tasks.split("\ng0.0\n")[1].split("\ng0.1\n")[0]
    assert "most recent call first" in threads
    assert "step 1 waits for group 0: sample 0 generating" in caplog.text
    diagnosis = diagnose_folder(folder)
    assert diagnosis.state == "failed"
    assert "step 1 waits for group 0" in diagnosis.headline
    assert "stuck.txt" in diagnosis.advice


def test_a_hang_in_validation_is_reported_while_its_samples_still_hang(hanging_toy: Toy) -> None:
    loaded = hanging_toy("evaluate.at_start=true")
    with pytest.raises(StuckError):
        run_recipe(loaded)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    stacks = (folder / "stuck.txt").read_text()
    assert "the validation of step 0 waits for group -1: sample 0 generating" in stacks
    assert "\ng-1.0\n" in stacks


def test_a_run_that_finds_no_signal_does_not_hang_and_leaves_no_stacks(toy: Toy) -> None:
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": ["object:reward"]}
    loaded = toy("rollout.max_drops_per_step=2", data={"domains": {"letters": domain}})
    with pytest.raises(StuckError, match="scored the same"):
        run_recipe(loaded, objects=RunObjects(rewards={"reward": lambda completion: 1.0}))
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    assert not (folder / "stuck.txt").exists()
    assert diagnose_folder(folder).state == "failed"


def test_a_finished_run_is_reported_and_not_changed(run_toy: Callable[..., RunResult]) -> None:
    folder = run_toy(steps=1).folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with run_lock(folder):
        report = run_cli("doctor", folder).stdout
    assert "finished " in report
    assert "step 1 of 1 done, version 1" in report
    assert "last checkpoint: step 1, " in report
    lock = folder / "run.lock"
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert {k: v for k, v in after.items() if k != lock} == {
        k: v for k, v in before.items() if k != lock
    }


def test_the_trace_of_a_run_is_written_to_the_given_path(
    run_toy: Callable[..., RunResult], tmp_path: Path
) -> None:
    folder = run_toy(steps=1).folder
    report = run_cli("trace", folder, "--out", tmp_path / "out.json")
    assert report.returncode == 0, report.stderr
    assert report.stdout.startswith(f"{tmp_path / 'out.json'}: ")
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_a_report_that_cannot_be_written_does_not_stop_a_run(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = toy(steps=1)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    (folder / "waits.json.new").mkdir(parents=True)
    assert run_recipe(loaded).step == 1
    assert "waits.json could not be updated" in caplog.text
    diagnosis = diagnose_folder(folder)
    assert diagnosis.state == "unknown"
    assert "step 1 was logged" in diagnosis.headline


def test_a_folder_that_is_no_run_is_refused_with_a_clear_message(tmp_path: Path) -> None:
    report = run_cli("doctor", tmp_path / "nothing")
    assert report.returncode == 2
    assert "nothing is not a run's folder" in report.stderr
    assert "Traceback" not in report.stderr
    with pytest.raises(ConfigError, match="is not a run's folder"):
        diagnose_folder(tmp_path)


def test_the_doctor_loads_neither_torch_nor_ray(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    code = f"""
import atexit, sys
atexit.register(lambda: print(sorted({HEAVY} & {{*sys.modules}})))
sys.argv = ['rollick', 'doctor', {str(tmp_path)!r}]
from rollick.cli import main
main()
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("changes", "alive", "later", "state", "expected"),
    [
        ({}, True, 1, "running", "step 3 waits for group 37: sample 3 in tool search for 310 s"),
        ({"phase": "start"}, True, 1, "starting", "starting workers and models"),
        ({"phase": "train"}, True, 1, "running", "step 3 is in phase train for 310 s"),
        ({"quiet_s": QUIET_AFTER_S + 1}, True, 1, "quiet", "stops after 10 min without progress"),
        ({}, True, SILENT_AFTER_S + 1, "silent", "its event loop is blocked"),
        ({}, None, SILENT_AFTER_S + 1, "silent", "has not reported for 16 s"),
        ({}, False, 3, "died", "it last reported 3 s ago, step 2 of 4 done"),
        ({"outcome": "interrupted"}, False, 3, "interrupted", "continue from that checkpoint"),
        ({"outcome": "failed", "error": "no space"}, False, 3, "failed", "no space"),
        (
            {"outcome": "finished", "step": 3},
            False,
            3,
            "finished",
            "(run.max_minutes); run the same",
        ),
        ({"outcome": "finished", "step": 4}, False, 7200, "finished", "finished 120 min ago"),
    ],
)
def test_a_runs_own_report_is_checked(
    changes: dict[str, Any], alive: bool | None, later: float, state: str, expected: str
) -> None:
    evidence = RunEvidence(Path("runs/toy"), alive=alive, checkpoint=2, checkpoint_at=990.0)
    diagnosis = diagnose(make_snapshot(**changes), evidence, now=1000.0 + later)
    assert diagnosis.state == state
    assert expected in "\n".join(diagnosis.lines())


def test_a_process_that_has_only_the_number_of_the_run_is_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    write_run_snapshot(tmp_path, make_snapshot(written_at=time.time()))
    assert diagnose_folder(tmp_path).state == "died"


def test_the_state_of_a_run_on_another_machine_comes_from_its_reports(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    for written_at, state in ((time.time(), "running"), (time.time() - 60, "silent")):
        write_run_snapshot(tmp_path, make_snapshot(host="elsewhere", written_at=written_at))
        assert diagnose_folder(tmp_path).state == state


def test_a_status_file_is_read_as_written_and_an_invalid_one_is_none(tmp_path: Path) -> None:
    write_run_snapshot(tmp_path, make_snapshot())
    assert read_run_snapshot(tmp_path) == make_snapshot()
    (tmp_path / "waits.json").write_text('{"name": "toy"}')
    assert read_run_snapshot(tmp_path) is None


def test_the_doctor_names_the_worker_processes() -> None:
    output, running = StringIO(), make_snapshot(processes={"policy 0": 12, "generators 0": 13})
    diagnosis = diagnose(running, RunEvidence(Path("runs/toy"), alive=True), now=1001.0)
    Console(file=output, width=200).print(render_diagnosis(diagnosis))
    assert "worker processes: policy 0 12, generators 0 13" in output.getvalue()


def test_the_facts_of_the_machine_are_printed_at_once() -> None:
    facts = environment_facts()
    assert set(facts) >= {"python", "torch", "ray", "transformers", "cpus", "gpus"}
    assert all(facts.values())


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.25, "0.25 s"), (310, "310 s"), (1200, "20 min"), (86_400, "24 h"), (259_200, "3 days")],
)
def test_a_duration_is_printed_in_a_readable_unit(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
