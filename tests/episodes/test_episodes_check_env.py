"""Checks of environments: each mistake is reported, within a process and across processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollick import TextEnv
from rollick.config.names import NAMES
from rollick.data.sources import task_seed
from rollick.envs.base import (
    InvalidEnvResponse,
    find_env,
    make_env,
    read_reset,
    read_step,
    to_json_value,
)
from rollick.episodes.check_env import check_across_processes, check_env
from rollick.episodes.in_process import find_policy, random_policy, run_episode
from rollick.errors import ConfigError, EnvError
from rollick.types import Turn

MAPS = """
import json, sys
from rollick.data.sources import task_seed
from rollick.envs.base import find_env
seeds = [task_seed(7, "train", "lake", group) for group in range(5)]
names = {"frozen_lake": {}, "sokoban": {"size": 8, "boxes": 2}}
print(json.dumps([[find_env(n)(**o).reset(s)[0] for s in seeds] for n, o in names.items()]))
"""
SETS = """
from rollick import TextEnv
class Unsorted(TextEnv):
    def reset(self, seed):
        self.words = list({f"word{seed}{n}" for n in range(20)})
        return " ".join(self.words), {}
    def step(self, action):
        return "over", 0.0, True, False, {}
"""


class Good(TextEnv):
    """Guess a number; three tries."""

    shared: list[int] = []  # noqa: RUF012 - the mistake of `Sharing`

    def reset(self, seed: int) -> Any:
        self.number = random.Random(seed).randrange(100)
        self.tries = 0
        return f"Guess {seed}", {}

    def step(self, action: str) -> Any:
        self.tries += 1
        won = action.strip() == str(self.number)
        return f"no {self.tries}", float(won), won, not won and self.tries == 3, {}

    def legal_actions(self) -> Any:
        return [str(number) for number in range(100)]


class Raising(Good):
    def step(self, action: str) -> Any:
        return super().step(str(int(action or "1")))


class Unseeded(Good):
    def reset(self, seed: int) -> Any:
        return f"Guess {random.SystemRandom().random()}", super().reset(seed)[1]


class OnePuzzle(Good):
    def reset(self, seed: int) -> Any:
        return "Guess", super().reset(3)[1]


class Global(Good):
    def reset(self, seed: int) -> Any:
        random.random()
        return super().reset(seed)


class Sharing(Good):
    def step(self, action: str) -> Any:
        text, *rest = super().step(action)
        self.shared.append(1)
        if self.tries == 1:
            del self.shared[:-1]
        return f"{text} {len(self.shared)}", *rest


class Endless(Good):
    def step(self, action: str) -> Any:
        return "on", 0.0, False, False, {}


class Silent(Good):
    def step(self, action: str) -> Any:
        _, *rest = super().step(action)
        return "", *rest


class Waiting(Good):
    async def step(self, action: str) -> Any:
        return super().step(action)


class OldSignature(Good):
    def step(self, action: str) -> Any:
        return super().step(action)[:4]


class Misled(Good):
    def step(self, action: str) -> Any:
        *rest, _ = super().step(action)
        return *rest, {"valid": action.isdecimal()}

    def solve(self) -> str | None:
        return "the number"


class NoSeed(Good):
    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(0)


def test_a_correct_environment_has_no_problems() -> None:
    assert check_env(Good) == []


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Raising, "step('   ') raises ValueError"),
        (Unseeded, "seed 0 gives different episodes"),
        (OnePuzzle, "8 seeds give the same puzzle"),
        (Global, "it uses the global random state"),
        (Sharing, "two concurrent episodes affect each other"),
        (Endless, "it did not end within 2000 steps"),
        (Silent, "an observation is empty"),
        (Waiting, "step() is a coroutine"),
        (OldSignature, "step() must return (observation, reward, terminated, truncated, info), "
         "not 4 values"),
        (Misled, "its solver writes an action that the environment reports as invalid"),
        (NoSeed, "reset() must take one argument, seed"),
        (dict, "created a dict, which has no reset()"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(env: Any, message: str) -> None:
    assert message in "\n".join(check_env(env))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("text", "reset() must return (observation, info), not str 'text'"),
        ((1, {}), "the observation must be text or messages, not int 1"),
        (([], {}), "the observation must be text or messages, not list []"),
        (([{"role": "user"}], {}), "a message must have role and content, both text"),
        (("text", None), "info must be a mapping, not NoneType None"),
    ],
)
def test_an_invalid_response_of_reset_is_described(response: Any, message: str) -> None:
    with pytest.raises(InvalidEnvResponse) as error:
        read_reset(response)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (("t", "1", False, False, {}), "the reward must be a finite number, not str '1'"),
        (("t", True, False, False, {}), "the reward must be a finite number, not bool True"),
        (("t", 1, 0, False, {}), "terminated must be True or False, not int 0"),
        (("t", 1, False, None, {}), "truncated must be True or False, not NoneType None"),
    ],
)
def test_an_invalid_response_of_step_is_described(response: Any, message: str) -> None:
    with pytest.raises(InvalidEnvResponse) as error:
        read_step(response)
    assert message in str(error.value)


def test_messages_become_turns_and_info_becomes_json_values() -> None:
    import numpy as np

    response = read_reset(
        ([{"role": "user", "content": "hi"}, Turn("user", "ho")], {"a": np.ones(2)})
    )
    assert response.observation == (Turn("user", "hi"), Turn("user", "ho"))
    assert response.info == {"a": [1.0, 1.0]}
    assert response.text == "hi\nho"
    assert to_json_value({1: (float("inf"), {2})}) == {"1": ["inf", "{2}"]}


def test_each_group_has_a_task_seed_of_its_own() -> None:
    assert task_seed(0, "train", "lake", 3) == task_seed(0, "train", "lake", 3)
    others = {task_seed(0, "train", "lake", n) for n in range(9)} | {
        task_seed(1, "train", "lake", 3), task_seed(0, "validation", "lake", 3),
    }  # fmt: skip
    assert len(others) == 11


def test_processes_with_different_hash_seeds_see_the_same_puzzles() -> None:
    def generate_puzzles(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", MAPS]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    first = generate_puzzles("1")
    assert first.count("#") > 100
    assert {generate_puzzles("2"), generate_puzzles("random")} == {first}


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_complete_episodes_do_not_depend_on_the_hash_seed(name: str) -> None:
    assert check_across_processes(name) == []


def test_an_environment_that_depends_on_the_order_of_a_set_is_detected(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SETS)
    [problem] = check_across_processes("mine.py:Unsorted", base=tmp_path)
    assert "the same seed gives another puzzle in another process" in problem


def test_a_hang_is_an_error_of_the_episode() -> None:
    class Hanging(Good):
        def step(self, action: str) -> Any:
            while True:
                pass

    episode = run_episode(Hanging(), 0, random_policy, timeout_s=0.2)
    assert "it took more than 0.2 s" in episode.error
    assert not episode.success


def test_an_unknown_policy_raises_an_error() -> None:
    with pytest.raises(EnvError, match="no such model exists"):
        find_policy("my-model")


def test_environments_are_resolved_by_name_and_file_and_wrong_names_raise(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SETS + "number = 3\n")
    assert find_env("frozen_lake").__name__ == "FrozenLake"
    assert find_env("mine.py:Unsorted", base=tmp_path)().reset(0)
    with pytest.raises(EnvError, match="is a int"):
        find_env("mine.py:number", base=tmp_path)
    with pytest.raises(ConfigError, match="did you mean sokoban"):
        find_env("sokoben")
    with pytest.raises(EnvError, match="cannot be created with"):
        make_env(find_env("sokoban"), {"rooms": 3}, name="sokoban")


def test_environments_of_installed_packages_are_resolved_by_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_envs.py").write_text(SETS)
    info = tmp_path / "their_envs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-envs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollick.environments]\nwords = their_envs:Unsorted\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_env("words").__name__ == "Unsorted"


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "rollick.cli", "env", "test", *arguments]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_command_runs_episodes_and_ends_with_one_line_of_json(tmp_path: Path) -> None:
    completed = command(
        tmp_path, "frozen_lake", "--episodes", "20", "--policy", "solver", "-o", "size=5",
        "--picture", "lake.gif", "--json",
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    assert (report["success"], report["errors"], report["problems"]) == (1.0, 0, [])
    assert report["steps_per_s"] > 0
    assert (tmp_path / "lake.gif").stat().st_size > 100


def test_the_command_prints_problems_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SETS)
    completed = command(tmp_path, "mine.py:Unsorted", "--episodes", "2")
    assert completed.returncode == 1
    assert completed.stdout.startswith("problem: the same seed gives another puzzle")
    assert "errors        0" in completed.stdout
    wrong = command(tmp_path, "mine.py:Unsorted", "--policy", "gpt")
    assert wrong.returncode == 2
    assert "the policy 'gpt' is not one of random, solver" in wrong.stderr


def test_the_built_in_environments_have_names() -> None:
    assert set(NAMES["environments"]) >= {"frozen_lake", "sokoban", "webshop", "gymnasium"}
