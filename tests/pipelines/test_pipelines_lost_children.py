"""Environment and reward processes that are killed or stopped: the run ends with the weights of a
run without the fault."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rollick.children.process import STOP_CHECK_SECONDS
from rollick.config.load import recipe_from_dict
from rollick.errors import RewardError
from rollick.observe.faults import read_faults
from rollick.pipelines.run import run_recipe
from rollick.pipelines.state import RunResult
from rollick.testing.tiny import save_tiny
from rollick.testing.toys import toy_recipe

CHILDREN = '''
import os
from rollick import TextEnv

def signal_own_process(number, marker, times):
    """Send a signal to this process, in the first `times` calls of the run."""
    for attempt in range(times):
        try:
            os.close(os.open(f"{marker}.{attempt}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), number)

class Guess(TextEnv):
    """Wants the letter that the seed names, in two tries."""
    def __init__(self, number=0, marker="", times=1):
        self.fault, self.tries = (number, marker, times), 0
    def reset(self, seed):
        self.wanted = "abcd"[seed % 4]
        return self.wanted, {}
    def step(self, action):
        self.tries += 1
        if self.fault[0] and self.tries == 2:
            signal_own_process(*self.fault)
        won = action[:1] == self.wanted
        return "?", float(won), won, self.tries == 2 and not won, {}

def nears(completion, answer, number=0, marker="", times=1):
    if number:
        signal_own_process(number, marker, times)
    return sum(1 / (1 + abs(ord(character) - ord(answer))) for character in completion[:2]) / 2
'''

FAULTS = [
    pytest.param(signal.SIGKILL, id="killed"),
    pytest.param(signal.SIGSTOP, id="stopped"),
]


def run_environment(folder: Path, name: str, **fault: Any) -> RunResult:
    (folder / "mine.py").write_text(CHILDREN)
    model = save_tiny(folder / "model", alphabet="abcdefgh?", hidden=16, layers=1, heads=2)
    recipe = toy_recipe(model, folder / "runs", name=name, steps=2)
    environment = {"name": "mine.py:Guess", "turn_tokens": 2, "options": fault}
    recipe |= {"pipeline": "agentic", "data": {"domains": {"letters": {"limit": 8}}}}
    recipe["data"]["domains"]["letters"]["environment"] = environment
    recipe["rollout"] |= {"drop_no_signal": False}
    recipe["sampling"] = {"max_tokens": 8}
    recipe["run"] |= {"deterministic": True}
    return run_recipe(recipe_from_dict(recipe, base_dir=folder))


def run_reward(folder: Path, name: str, **fault: Any) -> RunResult:
    (folder / "mine.py").write_text(CHILDREN)
    recipe = toy_recipe(save_tiny(folder / "model"), folder / "runs", name=name, steps=2)
    reward = {"name": "mine.py:nears", "options": fault}
    recipe["data"] = {"domains": {"letters": {"source": "rollick.testing.toys:letter_rows"}}}
    recipe["data"]["domains"]["letters"]["rewards"] = [reward]
    recipe["run"] |= {"deterministic": True}
    return run_recipe(recipe_from_dict(recipe, base_dir=folder))


def read_learner_state(result: RunResult) -> dict[str, bytes]:
    newest = sorted((result.folder / "checkpoints").glob("step-*"))[-1] / "learner"
    return {str(f.relative_to(newest)): f.read_bytes() for f in newest.rglob("*") if f.is_file()}


@pytest.mark.parametrize("number", FAULTS)
def test_a_run_whose_environment_process_was_lost_ends_with_the_same_weights(
    tmp_path: Path, number: signal.Signals
) -> None:
    without_fault = run_environment(tmp_path, "full")
    with_fault = run_environment(
        tmp_path, "hurt", number=int(number), marker=str(tmp_path / "fault")
    )
    assert (tmp_path / "fault.0").exists()
    assert read_learner_state(without_fault) == read_learner_state(with_fault)
    assert with_fault.metrics["env/restarts"] == 1
    assert with_fault.metrics["env/episode_restarts"] >= 1
    [fault] = read_faults(with_fault.folder)
    assert (fault.role, fault.rank) == ("environments", 0)
    assert fault.kind == {signal.SIGKILL: "killed", signal.SIGSTOP: "hung"}[number]
    assert fault.failed_at < fault.detected_at - STOP_CHECK_SECONDS / 2 * (fault.kind == "hung")
    assert fault.rejoined_at is not None


@pytest.mark.parametrize("number", FAULTS)
def test_a_run_whose_reward_process_was_lost_ends_with_the_same_weights(
    tmp_path: Path, number: signal.Signals
) -> None:
    without_fault = run_reward(tmp_path, "full")
    with_fault = run_reward(tmp_path, "hurt", number=int(number), marker=str(tmp_path / "fault"))
    assert (tmp_path / "fault.0").exists()
    assert read_learner_state(without_fault) == read_learner_state(with_fault)
    [fault] = read_faults(with_fault.folder)
    assert (fault.role, fault.rank) == ("rewards", 0)
    assert fault.kind == {signal.SIGKILL: "killed", signal.SIGSTOP: "hung"}[number]
    assert fault.failed_at < fault.detected_at - STOP_CHECK_SECONDS / 2 * (fault.kind == "hung")
    assert fault.rejoined_at is not None


def test_an_environment_whose_process_is_always_killed_ends_the_run(tmp_path: Path) -> None:
    always = {"number": int(signal.SIGKILL), "marker": str(tmp_path / "fault"), "times": 999}
    with pytest.raises(RewardError, match=r"environment mine\.py:Guess lost: .*SIGKILL"):
        run_environment(tmp_path, "always", **always)
