"""Fifty kills of the controller at random moments, each with a resume: no sample is lost or
trained on twice, and the results equal those without a kill.

test_scenario_supervised.py does the same under `rollick train --restarts`, which also ends the
processes that a dead controller leaves behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from killed_run import KilledRun
from ledger_audit import audit
from marked_processes import processes_with
from toy_runs import figures, learner_state, toy

from rollick import RunResult, run_recipe
from rollick.config.load import dump_recipe
from rollick.rollout.ledger.log import read_log

OPTIONS = ("run.deterministic=true", "checkpoint.every=1", "observe.samples_per_step=1000")
STEPS, KILLS = 40, 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
    run.finish()
    killed = RunResult(run.folder, STEPS, {})
    assert learner_state(killed) == learner_state(undisturbed)
    assert figures(killed) == figures(undisturbed)
    assert read_sample_names(killed) == read_sample_names(undisturbed)
    assert audit(read_log(killed.folder / "ledger.jsonl")).groups.trained == 4 * STEPS
    assert processes_with(run.mark) == {}


def read_sample_names(result: RunResult) -> list[str]:
    """The names of the trained samples, in order. Checks that each was trained on once."""
    lines = (result.folder / "samples.jsonl").read_text("utf-8").splitlines()
    names = [json.loads(line)["sample"] for line in lines]
    assert len(names) == len(set(names)) == 16 * STEPS
    return names
