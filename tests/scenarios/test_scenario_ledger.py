"""A run that is killed during a step resumes with the same groups; its ledger is consistent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger_audit import audit, effective_events
from toy_runs import Run

from rollick import load_recipe, run_recipe
from rollick.config.load import dump_recipe, recipe_from_dict
from rollick.rollout.ledger.events import (
    BatchTrained,
    CheckpointMarked,
    GroupDropped,
    GroupStarted,
    RunRestored,
)
from rollick.rollout.ledger.log import LogContents, read_log
from rollick.testing.toys import toy_recipe

REWARD = """
import time
def slow(completion, answer):
    time.sleep(0.02)
    return sum(map(ord, completion)) % 5
"""


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_killed_run_starts_the_same_groups_again_with_the_same_prompts(
    tiny_folder: Path, tmp_path: Path, staleness: int
) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    domain = {
        "source": "rollick.testing.toys:letter_rows",
        "rewards": [f"{tmp_path / 'own.py'}:slow"],
    }
    sections = toy_recipe(tiny_folder, tmp_path, name="killed", steps=6)
    sections["data"] = {"domains": {"letters": domain}, "selection": {"near_half_window": 64}}
    options = [f"rollout.max_staleness={staleness}", "checkpoint.every=2"]
    recipe = recipe_from_dict(sections, overrides=options).recipe
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    path = tmp_path / "killed" / "ledger.jsonl"

    before = _kill_in_the_step_after_a_checkpoint(file, path)
    assert sum(isinstance(event, BatchTrained) for event in before.events) < 6
    complete_checkpoints = {
        folder.name for folder in (tmp_path / "killed" / "checkpoints").glob("step-??????")
    }
    run_recipe(load_recipe(file), resume=True)
    after = read_log(path)

    marks = [e for e in before.events if isinstance(e, CheckpointMarked)]
    checkpoint = [mark for mark in marks if f"step-{mark.step:06d}" in complete_checkpoints][-1]
    (restored,) = (e for e in after.events if isinstance(e, RunRestored))
    assert restored == RunRestored(checkpoint.step)
    prompts = {e.group: e.prompt for e in before.events if isinstance(e, GroupStarted)}
    restored_at = after.events.index(restored)
    restarted = {
        e.group: e.prompt for e in after.events[restored_at:] if isinstance(e, GroupStarted)
    }
    in_flight = {group: name for group, name in prompts.items() if group >= checkpoint.started}
    assert in_flight
    assert in_flight.items() <= restarted.items()
    assert min(restarted) == checkpoint.started

    effective = effective_events(after)
    trained = [uid for e in effective if isinstance(e, BatchTrained) for uid in e.groups]
    assert len(trained) == len(set(trained)) == 6 * 4
    counts = audit(after)
    assert counts.groups.trained == 24
    assert counts.groups.dropped == sum(isinstance(e, GroupDropped) for e in effective)
    state_file = tmp_path / "killed" / "checkpoints" / "step-000006" / "state.json"
    state = json.loads(state_file.read_text())["rollout"]["ledger"]
    assert audit(after, step=6, state=state).groups == counts.groups


def test_validation_leaves_nothing_in_the_log(run_toy: Run) -> None:
    options = ["evaluate.at_start=true", "evaluate.every=1", "rollout.drop_no_signal=false"]
    result = run_toy(*options, steps=2)
    log = read_log(result.folder / "ledger.jsonl")
    assert (result.folder / "validation.jsonl").exists()
    assert all(event.group >= 0 for event in log.events if isinstance(event, GroupStarted))
    assert audit(log).groups.trained == 2 * 4


def _start_run(recipe: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rollick.cli", "train", str(recipe)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def _kill_in_the_step_after_a_checkpoint(recipe: Path, path: Path) -> LogContents:
    """Start the run, kill it in the step after a checkpoint, and return its log at that time."""
    process = _start_run(recipe)
    deadline = time.monotonic() + 90
    try:
        while not _is_in_a_step(path):
            assert time.monotonic() < deadline, "the run did not get that far in time"
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        return read_log(path)
    finally:
        process.kill()


def _is_in_a_step(path: Path) -> bool:
    """Whether groups have started after the first complete checkpoint."""
    if not (path.parent / "checkpoints" / "step-000002").exists():
        return False
    events = read_log(path).events
    marks = [n for n, event in enumerate(events) if isinstance(event, CheckpointMarked)]
    return bool(marks) and any(isinstance(event, GroupStarted) for event in events[marks[-1] :])
