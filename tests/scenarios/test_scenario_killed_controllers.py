"""Fifty kills of the controller at random moments, each with a resume: nothing is lost or trained
twice, and the runs end as those without a kill.

The processes are forked from one that has imported everything, so that a resume takes a second.
test_scenario_supervised.py kills the same under `rollick train --restarts`, which also ends what
the dead process leaves behind.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import uuid
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from conftest import figures, learner_state, toy
from ledger_audit import audit
from marked_processes import VARIABLE, processes_with

from rollick import RunResult, load_recipe, run_recipe
from rollick.commands.supervise import last_logged_step
from rollick.config.load import dump_recipe
from rollick.rollout.ledger.log import read_log

OPTIONS = ("run.deterministic=true", "checkpoint.every=1", "observe.samples_per_step=1000")
STEPS, KILLS = 40, 10
PRELOADED = ["rollick.pipelines.rl", "rollick.workers.learner", "rollick.workers.generator"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def train(recipe: str, mark: str) -> None:
    """Begin the run, or resume it."""
    os.environ[VARIABLE] = mark
    loaded = load_recipe(Path(recipe))
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    run_recipe(loaded, resume=(folder / "recipe.yaml").exists())


class KilledRun:
    """A run that is started again after each kill."""

    def __init__(self, recipe: Path, folder: Path, seed: int) -> None:
        self.recipe, self.folder = recipe, folder
        self.moments = random.Random(seed)
        self.mark = uuid.uuid4().hex
        multiprocessing.set_forkserver_preload(PRELOADED)
        self._processes = multiprocessing.get_context("forkserver")

    def start(self) -> BaseProcess:
        process = self._processes.Process(target=train, args=(str(self.recipe), self.mark))
        process.start()
        return process

    def kill_at_random(self) -> None:
        """While it starts, or some time after it has logged a step."""
        process, seen = self.start(), last_logged_step(self.folder) or 0
        if self.moments.random() < 0.3:
            time.sleep(self.moments.uniform(0, 1))
        else:
            self._wait_for_step(process, seen + 1)
            time.sleep(self.moments.uniform(0, 0.1))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended before the kill"

    def finish(self) -> RunResult:
        process = self.start()
        process.join(300)
        assert process.exitcode == 0
        return RunResult(self.folder, STEPS, {})

    def _wait_for_step(self, process: BaseProcess, step: int) -> None:
        deadline = time.monotonic() + 120
        while (last_logged_step(self.folder) or 0) < step:
            assert process.is_alive(), "the run ended by itself"
            assert time.monotonic() < deadline, "the run made no progress in time"
            time.sleep(0.005)


@pytest.mark.parametrize("seed", range(5))
def test_ten_kills_at_random_moments_lose_and_double_nothing(
    tiny_folder: Path, tmp_path: Path, seed: int
) -> None:
    options = (*OPTIONS, f"run.seed={seed}")
    undisturbed = run_recipe(toy(tiny_folder, tmp_path, *options, name="undisturbed", steps=STEPS))
    loaded = toy(tiny_folder, tmp_path, *options, name="killed", steps=STEPS)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    run = KilledRun(recipe, tmp_path / "killed", seed)
    for _ in range(KILLS):
        run.kill_at_random()
    killed = run.finish()
    assert learner_state(killed) == learner_state(undisturbed)
    assert figures(killed) == figures(undisturbed)
    assert samples(killed) == samples(undisturbed)
    assert audit(read_log(killed.folder / "ledger.jsonl")).groups.trained == 4 * STEPS
    assert processes_with(run.mark) == {}


def samples(result: RunResult) -> list[str]:
    """The samples that were trained on, in order; none twice."""
    lines = (result.folder / "samples.jsonl").read_text("utf-8").splitlines()
    names = [json.loads(line)["sample"] for line in lines]
    assert len(names) == len(set(names)) == 16 * STEPS
    return names
