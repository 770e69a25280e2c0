"""A run keeps the code that its recipe names: later commands do not need the user's files."""

import json
import logging
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from rollick.cli import main
from rollick.config.source import dump_yaml
from rollick.testing.toys import toy_recipe

REWARDS = """
import closeness_of_letters
def score(completion, answer):
    return closeness_of_letters.closeness(completion, answer)
"""
HELPER = """
def closeness(completion, answer):
    return sum(1 / (1 + abs(ord(character) - ord(answer))) for character in completion[:2]) / 2
"""
LOSSES = """
from rollick.algorithms.losses import reinforce
def mine(trained, options):
    return reinforce(trained, options)
"""
GAME = """
from rollick import TextEnv
class Say(TextEnv):
    def reset(self, seed):
        self.letter = "abcdefgh"[seed % 8]
        return f"say {self.letter}", {}
    def step(self, action):
        return "over", 1 / (1 + abs(ord(action[:1] or " ") - ord(self.letter))), True, False, {}
"""
Command = Callable[..., str]


@pytest.fixture
def rollick(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Generator[Command]:
    """Runs a command in this process; returns its stdout and stderr."""
    root, rollick_logger = logging.getLogger(), logging.getLogger("rollick")
    handlers, level, paths = list(root.handlers), rollick_logger.level, list(sys.path)

    def run(*arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", ["rollick", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capfd.readouterr()
        assert not exit_info.value.code, err
        return out + err

    yield run
    root.handlers[:] = handlers
    rollick_logger.setLevel(level)
    sys.path[:] = paths
    sys.modules.pop("closeness_of_letters", None)


@pytest.fixture
def project(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder: a reward that imports another module, a loss and rows; a game beside it."""
    files = {
        "project/rewards.py": REWARDS,
        "project/closeness_of_letters.py": HELPER,
        "project/losses/mine.py": LOSSES,
        "games/say.py": GAME,
        "project/rows.jsonl": "".join(
            json.dumps({"prompt": f"say {letter}", "answer": letter}) + "\n"
            for letter in "abcdefgh"
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copytree(tiny_folder, tmp_path / "project/tiny")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def write_recipe(project: Path, recipe: dict[str, Any]) -> Path:
    file = project / "recipe.yaml"
    file.write_text(dump_yaml(recipe))
    return file


@pytest.fixture
def recipe(project: Path) -> Path:
    recipe = toy_recipe(Path("tiny"), project.parent / "runs", steps=1)
    domain = {"source": "rows.jsonl", "rewards": ["rewards.py:score"]}
    recipe["data"] = {"domains": {"letters": domain}}
    recipe["algorithm"] = {"loss": "losses/mine.py:mine"}
    recipe["observe"]["dump_steps"] = [1]
    return write_recipe(project, recipe)


def remove_code(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the user's code and change to another folder."""
    monkeypatch.chdir(project.parent)
    for file in (*project.rglob("*.py"), *(project.parent / "games").glob("*.py")):
        file.unlink()
    sys.modules.pop("closeness_of_letters", None)
    sys.path[:] = [path for path in sys.path if str(project) not in path]


def test_check_and_replay_work_after_the_users_code_is_gone(
    rollick: Command, recipe: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollick("train", recipe)
    remove_code(project, monkeypatch)
    run = project.parent / "runs" / "toy"
    assert rollick("check", run / "recipe.yaml", "--deep").startswith("OK ")
    halves = ["generate", "train"]
    reports = [
        json.loads(rollick("replay", run / "dumps/step-000001", run / "recipe.yaml", *options))
        for options in (["--json", "--only", half] for half in halves)
    ]
    assert reports[0]["identical"] == 16
    assert reports[0]["score_now"] == pytest.approx(reports[0]["score_then"])
    assert reports[1]["max_ratio_error"] < 1e-5


def test_env_show_works_after_the_environment_is_gone(
    rollick: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = toy_recipe(Path("tiny"), project.parent / "runs", steps=1)
    domain = {"environment": {"name": "../games/say.py:Say", "turn_tokens": 2}}
    recipe |= {"pipeline": "agentic", "data": {"domains": {"say": domain}}}
    rollick("train", write_recipe(project, recipe))
    remove_code(project, monkeypatch)
    output = rollick("env", "show", "runs/toy", "--training")
    assert "of ../games/say.py:Say, seed" in output
    assert "over" in output


def test_a_resumed_run_logs_which_settings_and_code_changed(
    rollick: Command, recipe: Path, project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollick("train", recipe)
    rollick("train", recipe, "--resume")
    assert "other settings" not in caplog.text
    (project / "closeness_of_letters.py").write_text(HELPER + "\n# Better.\n")
    changed = ["run.steps=2", "train.optimizer.lr=0.01", "observe.dump_steps=[1,2]"]
    rollick("train", recipe, *changed, "--resume")
    assert (
        "resuming with other settings:\n"
        "  run.steps: 1 -> 2\n"
        "  train.optimizer.lr: 0.003 -> 0.01\n"
        "  observe.dump_steps: [1] -> [1, 2]\n"
        "  code/closeness_of_letters.py: the code changed\n" in caplog.text
    )
    run = project.parent / "runs" / "toy"
    assert (run / "code/closeness_of_letters.py").read_text().endswith("# Better.\n")
    caplog.clear()
    assert "toy: step 2\n" in rollick("train", run / "recipe.yaml", "--resume")
    assert "other settings" not in caplog.text


def test_exported_weights_and_checkpoints_can_be_read_by_the_group(
    rollick: Command, recipe: Path, project: Path
) -> None:
    rollick("train", recipe)
    rollick("export", "../runs/toy", "out")
    saved = [*project.glob("out/*.safetensors"), *project.parent.glob("runs/**/*.safetensors")]
    assert len(saved) == 3  # The export, the checkpoint and the dump.
    expected = (project / "out").stat().st_mode & 0o666
    assert {path.stat().st_mode & 0o777 for path in saved} == {expected}
    assert expected & 0o040
