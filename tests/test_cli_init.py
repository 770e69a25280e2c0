"""`rollick init`: the project that it writes passes the check of its recipe."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollick.config.load import load_recipe
from rollick.errors import ConfigError
from rollick.starters.projects import FILES, starter_names, write_starter


@pytest.mark.parametrize("name", starter_names())
def test_a_starter_project_passes_the_check_where_it_is_written(name: str, tmp_path: Path) -> None:
    files = write_starter(name, tmp_path / "mine")
    assert [path.name for path in files] == list(FILES)
    recipe = load_recipe(tmp_path / "mine" / "recipe.yaml").recipe
    assert recipe.pipeline == name


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"tasks\.py exists already"):
        write_starter("rlvr", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.py"]


def test_an_unknown_project_gets_a_message_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no starter project 'rlvrr'") as error:
        write_starter("rlvrr", tmp_path)
    assert error.value.fix == "use rlvr"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file cannot be written: .*choose a path"):
        write_starter("rlvr", tmp_path / "file")


def test_the_command_prints_what_it_wrote_and_what_comes_next(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollick.cli", "init", "rlvr", "mine"]
    child = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == (
        "next: cd mine && rollick check recipe.yaml && rollick train recipe.yaml"
    )
