"""Deterministic mode: the same recipe and seed give the same weights, whatever happens between."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Run, learner_state

from rollick.config.load import dump_recipe, recipe_from_dict
from rollick.testing.toys import toy_recipe

DETERMINISTIC = "run.deterministic=true"
CLOCKED = ("time/", "speed/", "controller/lag", "memory/")
"""Metrics that depend on the clock."""


def test_one_process_and_ray_train_to_the_same_weights_bit_for_bit(run_toy: Run) -> None:
    inline = run_toy(DETERMINISTIC, name="inline")
    ray = run_toy(DETERMINISTIC, "cluster.backend=ray", name="ray")
    assert learner_state(inline) == learner_state(ray)


def test_engines_apart_from_the_learner_train_to_the_same_weights_bit_for_bit(run_toy: Run) -> None:
    together = run_toy(DETERMINISTIC, name="together")
    apart = run_toy(DETERMINISTIC, "devices.generators=cpu:1-2", name="apart")
    assert learner_state(together) == learner_state(apart)


def test_a_resumed_run_equals_the_run_that_went_through(run_toy: Run) -> None:
    whole = run_toy(DETERMINISTIC, name="whole", steps=6)
    run_toy(DETERMINISTIC, name="halved", steps=3)
    halved = run_toy(DETERMINISTIC, name="halved", steps=6, resume=True)
    assert learner_state(whole) == learner_state(halved)
    assert _figures(whole.folder) == _figures(halved.folder)


def test_another_seed_gives_other_weights(run_toy: Run) -> None:
    first = run_toy(DETERMINISTIC, name="first", steps=2)
    second = run_toy(DETERMINISTIC, "run.seed=1", name="second", steps=2)
    assert learner_state(first) != learner_state(second)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_run_stopped_by_a_signal_and_resumed_equals_the_whole_one(
    run_toy: Run, tiny_folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    whole = run_toy(DETERMINISTIC, "checkpoint.every=1", name="whole", steps=12)
    recipe = recipe_from_dict(
        toy_recipe(tiny_folder, tmp_path, name="stopped", steps=12),
        overrides=[DETERMINISTIC, "checkpoint.every=1"],
    ).recipe
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    code = _run_until_step(3, file, tmp_path / "stopped", number)
    assert code == (75 if number == signal.SIGTERM else -number)
    assert len(_figures(tmp_path / "stopped")) < 12
    stopped = run_toy(DETERMINISTIC, "checkpoint.every=1", name="stopped", steps=12, resume=True)
    assert learner_state(whole) == learner_state(stopped)
    assert _figures(whole.folder) == _figures(stopped.folder)


def _run_until_step(step: int, recipe: Path, folder: Path, number: signal.Signals) -> int:
    """Start the recipe as a command, send the signal once `step` was logged; its exit code."""
    command = [sys.executable, "-m", "rollick.cli", "train", str(recipe)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    try:
        while len(_figures(folder)) < step:
            assert time.monotonic() < deadline, "the run made no step in time"
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.01)
        process.send_signal(number)
        return process.wait(60)
    finally:
        process.kill()


def _figures(folder: Path) -> list[dict[str, float]]:
    """The logged metrics of each step, without what depends on the clock."""
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKED)} for row in rows]
