"""Commands that must start fast load no heavy package.

benchmarks/start_up.py measures their start-up time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rollick
from rollick.config.names import NAMES

RECIPE = """\
model: {path: tiny}
data:
  domains:
    sums: {source: sums.jsonl, rewards: [exact_match], share: 3}
    more: {source: sums.jsonl, rewards: [last_number]}
rollout: {group_size: 4}
"""
HEAVY = "{'torch', 'ray', 'transformers', 'datasets'}"
LIGHT = {
    *(
        "annotated_doc",
        "annotated_types",
        "attr",
        "cython_runtime",
        "markdown_it",
        "mdurl",
        "numpy",
    ),
    *("pydantic", "pydantic_core", "pygments", "rich", "rollick", "shellingham", "typer"),
    *("typing_extensions", "typing_inspection", "yaml"),
}
"""Packages that load in a few tens of milliseconds each."""
ARGUMENTS = {
    "import": "import rollick",
    "help": "sys.argv = ['rollick', '--help']; from rollick.cli import main; main()",
    "check": "sys.argv = ['rollick', 'check', 'recipe.yaml']; from rollick.cli import main; main()",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(
        json.dumps({**sizes, "intermediate_size": 16, "vocab_size": 100})
    )
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollick.cli", *arguments]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.mark.parametrize("command", list(ARGUMENTS))
def test_it_loads_neither_torch_nor_ray(folder: Path, command: str) -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print(sorted({HEAVY} & {{*sys.modules}})))
{ARGUMENTS[command]}
"""
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", list(ARGUMENTS))
def test_it_loads_only_light_packages(folder: Path, command: str) -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print(*{{name.partition(".")[0] for name in sys.modules}}))
{ARGUMENTS[command]}
"""
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    loaded = {name for name in child.stdout.splitlines()[-1].split() if not name.startswith("_")}
    assert loaded - sys.stdlib_module_names <= LIGHT


def test_check_summarises_what_a_recipe_will_do(folder: Path) -> None:
    child = run(folder, "check", "recipe.yaml", "run.steps=7")
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[:5] == [
        "OK recipe.yaml",
        "  pipeline    rlvr, 7 steps of 64 groups of 4 samples",
        "  model       tiny (auto)",
        "  data        sums 75%, more 25%",
        "  validation  none",
    ]
    assert "cpu:0" in child.stdout


def test_check_prints_every_problem_and_fails(folder: Path) -> None:
    child = run(folder, "check", "recipe.yaml", "run.stepz=7", "rollout.group_size=[x]")
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr.splitlines() == [
        "recipe.yaml has 2 problems:",
        "  override rollout.group_size=[x]: rollout.group_size: must be a whole number, "
        "but is a list",
        "  override run.stepz=7: run.stepz: unknown key 'stepz'; did you mean 'steps'?",
    ]


def test_config_show_prints_a_recipe_that_loads_again(folder: Path) -> None:
    first = run(folder, "config", "show", "recipe.yaml", "run.name=again")
    assert first.returncode == 0, first.stderr
    (folder / "again.yaml").write_text(first.stdout)
    assert run(folder, "config", "show", "again.yaml").stdout == first.stdout
    assert "name: again" in first.stdout


def test_config_schema_prints_json_schema(folder: Path) -> None:
    child = run(folder, "config", "schema")
    schema = json.loads(child.stdout)
    recipes = {option["$ref"].rpartition("/")[2] for option in schema["anyOf"]}
    assert recipes == {f"{name}Recipe" for name in ("Rlvr", "Agentic", "Sft", "Dpo", "Distill")}
    assert schema["$defs"]["RlvrRecipe"]["properties"]["rollout"]["description"]
    assert "rollout" not in schema["$defs"]["SftRecipe"]["properties"]


def test_list_prints_the_table_as_one_line_of_json(folder: Path) -> None:
    child = run(folder, "list", "--json")
    assert len(child.stdout.splitlines()) == 1
    assert json.loads(child.stdout) == {kind: list(table) for kind, table in NAMES.items()}


def test_list_prints_every_name_for_people(folder: Path) -> None:
    output = run(folder, "list").stdout
    assert all(name in output for table in NAMES.values() for name in table)


@pytest.mark.parametrize("module", ["rollick", "rollick.cli"])
def test_every_way_to_start_it_prints_the_version(folder: Path, module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stdout) == (0, f"rollick {rollick.__version__}\n")


def test_the_package_declares_its_types() -> None:
    assert (Path(rollick.__file__).parent / "py.typed").is_file()


def test_check_for_eight_gpus_fits_a_terminal(folder: Path) -> None:
    devices = ["devices.policy=0-7", "devices.generators=0-7", "train.strategy=fsdp"]
    command = [sys.executable, "-m", "rollick", "check", "--recipe-only", "recipe.yaml", *devices]
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    child = subprocess.run(
        [*command, "algorithm.kl={coefficient: 0.1}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 36
