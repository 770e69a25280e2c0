"""Deterministic mode: a recipe and a seed give the same weights on any backend, also resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_runs import DROPS, Run, learner_state, toy

from rollick import RunResult, run_recipe
from rollick.config.load import dump_recipe
from rollick.rollout.relative_speeds import RelativeSpeeds

DETERMINISTIC = "run.deterministic=true"
CLOCKED = ("time/", "speed/", "controller/event_loop_lag", "memory/")
"""Metrics that depend on the clock."""


def test_one_process_and_ray_train_to_the_same_weights_bit_for_bit(run_toy: Run) -> None:
    inline = run_toy(DETERMINISTIC, name="inline")
    ray = run_toy(DETERMINISTIC, "cluster.backend=ray", name="ray")
    assert learner_state(inline) == learner_state(ray)


def test_separate_engines_train_to_the_same_weights_bit_for_bit(run_toy: Run) -> None:
    colocated = run_toy(DETERMINISTIC, DROPS, name="together", steps=3)
    separate = run_toy(DETERMINISTIC, DROPS, "devices.generators=cpu:1-2", name="separate", steps=3)
    assert learner_state(colocated) == learner_state(separate)
    assert _count_dropped(colocated.folder) > 0


def test_less_work_for_a_slow_engine_does_not_change_the_weights(
    run_toy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (DETERMINISTIC, "devices.generators=cpu:1-2", "infer.slots=4")
    even = run_toy(*options, name="even", steps=3)
    monkeypatch.setattr(RelativeSpeeds, "weight", lambda self, worker: 0.2 if worker else 1.0)
    uneven = run_toy(*options, name="uneven", steps=3)
    assert learner_state(even) == learner_state(uneven)


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(run_toy: Run) -> None:
    uninterrupted = run_toy(DETERMINISTIC, DROPS, name="full_run", steps=4)
    run_toy(DETERMINISTIC, DROPS, name="halved", steps=2)
    resumed = run_toy(DETERMINISTIC, DROPS, name="halved", steps=4, resume=True)
    assert learner_state(uninterrupted) == learner_state(resumed)
    assert _read_metrics(uninterrupted.folder) == _read_metrics(resumed.folder)
    assert _count_dropped(uninterrupted.folder) > 0


def test_another_seed_gives_other_weights(run_toy: Run) -> None:
    first = run_toy(DETERMINISTIC, name="first", steps=2)
    second = run_toy(DETERMINISTIC, "run.seed=1", name="second", steps=2)
    assert learner_state(first) != learner_state(second)


@pytest.fixture(scope="module")
def twelve_steps(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """An uninterrupted run of twelve steps."""
    runs = tmp_path_factory.mktemp("twelve")
    return run_recipe(toy(tiny_folder, runs, DETERMINISTIC, "checkpoint.every=1", steps=12))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_run_stopped_by_a_signal_and_resumed_equals_an_uninterrupted_one(
    twelve_steps: RunResult, tiny_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    options = (DETERMINISTIC, "checkpoint.every=1")
    loaded = toy(tiny_folder, tmp_path, *options, name="stopped", steps=12)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    code = _run_until_step(3, file, tmp_path / "stopped", number)
    assert code == (75 if number == signal.SIGTERM else -number)
    assert len(_read_metrics(tmp_path / "stopped")) < 12
    stopped = run_recipe(loaded, resume=True)
    assert learner_state(twelve_steps) == learner_state(stopped)
    assert _read_metrics(twelve_steps.folder) == _read_metrics(stopped.folder)


def _run_until_step(step: int, recipe: Path, folder: Path, number: signal.Signals) -> int:
    """Train in a subprocess, send the signal once `step` is logged, and return the exit code."""
    command = [sys.executable, "-m", "rollick.cli", "train", str(recipe)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    try:
        while len(_read_metrics(folder)) < step:
            assert time.monotonic() < deadline, "the run made no step in time"
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.01)
        process.send_signal(number)
        return process.wait(60)
    finally:
        process.kill()


def _read_metrics(folder: Path) -> list[dict[str, float]]:
    """The logged metrics of each step, without those in CLOCKED."""
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows]


def _count_dropped(folder: Path) -> float:
    return sum(row.get("rollout/dropped/no_signal", 0) for row in _read_metrics(folder))
