"""The preflight checks of models, packages, devices and rows, which load no model."""

from __future__ import annotations

import ast
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import rollick
from rollick.commands.recipe import check_and_describe
from rollick.config.extras import LORA, REQUIREMENTS, SERVER
from rollick.config.load import LoadedRecipe, dump_recipe, recipe_from_dict
from rollick.errors import ConfigError
from rollick.models.loading.locate import converted_folder
from rollick.pipelines.memory import plan_memory, read_shapes
from rollick.pipelines.preflight import check_machine, check_memory, check_rows
from rollick.run_folder import open_folder

Load = Callable[..., LoadedRecipe]
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
CONFIG: dict[str, Any] = {**SIZES, "intermediate_size": 16, "vocab_size": 100}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a recipe over a model folder and rows in tmp_path."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))

    def recipe(*overrides: str, rows: Any = ({"prompt": "1+1=", "answer": "2"},), **sections: Any):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        domain = {"source": "rows.jsonl", "rewards": ["exact_match"], **sections.pop("domain", {})}
        data = {"domains": {"sums": domain}}
        given = {"model": {"path": str(tmp_path / "model")}, "data": data, **sections}
        return recipe_from_dict(given, overrides=overrides, base_dir=tmp_path, origin="here")

    return recipe


def machine(loaded: LoadedRecipe) -> list[str]:
    """The problems that `check_machine` reports."""
    return [str(problem) for problem in check_machine(loaded)]


def rows(loaded: LoadedRecipe, *, deep: bool = False) -> list[str]:
    """The problems that `check_rows` reports."""
    return [str(problem) for problem in check_rows(loaded, deep=deep)]


def test_a_recipe_that_can_run_has_no_problem(load: Load) -> None:
    assert machine(load()) == rows(load()) == []


def test_a_missing_model_is_named_with_its_key(load: Load, tmp_path: Path) -> None:
    [model, tokenizer] = machine(
        load(
            "model.path=package:no_such_package/x.gguf",
            f"model.tokenizer={tmp_path / 'nowhere'}",
        )
    )
    assert "model.path" in model
    assert "the Python package 'no_such_package' is not installed; install it" in model
    assert f"model.tokenizer: model '{tmp_path / 'nowhere'}' does not exist" in tokenizer


def test_models_of_other_roles_are_looked_for_too(load: Load) -> None:
    judge = {"judge": {"path": "/nowhere/judge"}, "domain": {"rewards": ["judge"]}}
    assert any(
        "judge.path: model '/nowhere/judge' does not exist" in m for m in machine(load(**judge))
    )
    critic = {"critic": {"model": {"path": "/nowhere/c"}}, "algorithm": "ppo"}
    assert any("critic.model.path: model '/nowhere/c'" in m for m in machine(load(**critic)))


def hide_modules(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("sections", "module", "message"),
    [
        (
            {"train": {"lora": {}}},
            "peft",
            "train.lora: LoRA needs peft, which is not installed; pip install 'rollick[lora]'",
        ),
        (
            {"domain": {"rewards": ["math"]}},
            "math_verify",
            "data.domains.sums.rewards.0: math needs math_verify, which is not installed; "
            "pip install 'rollick[rewards]'",
        ),
        (
            {"observe": {"sinks": ["wandb"]}},
            "wandb",
            "observe.sinks.0: wandb needs wandb, which is not installed; "
            "pip install 'rollick[wandb]'",
        ),
        (
            {"domain": {"source": "hub:."}},
            "datasets",
            "data.domains.sums.source: hub needs datasets, which is not installed; "
            "pip install 'rollick[hub]'",
        ),
    ],
)
def test_a_missing_package_is_named_with_what_needs_it(
    load: Load, monkeypatch: pytest.MonkeyPatch, sections: Any, module: str, message: str
) -> None:
    hide_modules(monkeypatch, module)
    assert machine(load(**sections)) == [f"here: {message}"]


def test_a_gguf_file_needs_its_package_until_it_is_converted(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_modules(monkeypatch, "gguf")
    monkeypatch.setenv("ROLLICK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"GGUF and more")
    loaded = load(f"model.path={tmp_path / 'x.gguf'}")
    [problem] = machine(loaded)
    assert "gguf is not installed; install it with: pip install 'rollick[gguf]'" in problem
    converted = converted_folder(tmp_path / "x.gguf")
    converted.mkdir(parents=True)
    (converted / "config.json").write_text(json.dumps(CONFIG))
    assert machine(loaded) == []


def test_every_extra_that_the_code_needs_is_in_the_table() -> None:
    """Except gguf: it depends on the model's file, not on a key of the recipe."""
    package = Path(rollick.__file__).parent
    needed_extras: set[str] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "MissingExtra.of":
                needed_extras |= {
                    arg.value for arg in node.args[1:] if isinstance(arg, ast.Constant)
                }
    known = [
        LORA,
        SERVER,
        *(requirement for table in REQUIREMENTS.values() for requirement in table.values()),
    ]
    assert needed_extras - {"gguf"} <= {
        requirement.install.partition("[")[2].rstrip("]'") for requirement in known
    }


def test_a_missing_gpu_is_refused_before_torch_is_loaded(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices = {"devices": {"policy": "0", "generators": "0"}}
    for backend in ("ray", "inline"):
        problems = machine(load(f"cluster.backend={backend}", **devices))
        assert [problem.split(":")[1] for problem in problems] == [
            " devices.policy",
            " devices.generators",
        ]
        assert all("GPU 0: " in problem and "use cpu" in problem for problem in problems)
    remote = load(**devices, cluster={"address": "ray://other:10001"})
    assert machine(remote) == []


def test_a_run_that_cannot_start_here_fails_before_it_leaves_anything(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = {"folder": str(tmp_path / "runs"), "name": "none"}
    loaded = load("cluster.backend=inline", run=run, devices={"policy": "0", "generators": "0"})
    with pytest.raises(ConfigError, match=r"devices\.policy: GPU 0"):
        rollick.run_recipe(loaded)
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_that_cannot_be_made_is_told_first(load: Load, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loaded = load("cluster.backend=inline", run={"folder": str(tmp_path / "file/runs")})
    assert machine(loaded) == [
        f"here: run.folder: {tmp_path / 'file'} is a file; choose a folder",
    ]
    with (
        pytest.raises(ConfigError, match=r"file/runs/\S+ cannot be written: .*choose a path"),
        open_folder(loaded, resume=False),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "domain", "message"),
    [
        (
            [{"question": "1+1="}],
            {},
            "sums.prompt: none of the first 1 rows is usable: rows.jsonl:1: missing_column "
            "(no 'prompt' among question)",
        ),
        (["not json"], {}, "none of the first 1 rows is usable: rows.jsonl:1: not_json"),
        ([], {}, "sums.source: has no rows; add rows"),
        (
            [{"prompt": "1+1=", "solution": "2"}],
            {},
            "rewards.0: exact_match needs 'answer', and the rows have prompt, solution; "
            "add the column, set options.answer, or give it a default",
        ),
        (
            [{"prompt": "1+1=", "answers": "2"}],
            {},
            "rewards.0: exact_match needs 'answer', and the rows have prompt, answers; "
            "did you mean 'answers'?",
        ),
    ],
)
def test_the_first_rows_show_what_does_not_fit(
    load: Load, given: list[Any], domain: dict[str, Any], message: str
) -> None:
    [problem] = rows(load(rows=given, domain=domain))
    assert message in problem


def test_a_few_bad_rows_are_left_to_the_run(load: Load) -> None:
    assert rows(load(rows=["not json", {"prompt": "1+1=", "answer": "2"}])) == []


def test_a_column_that_only_some_rows_have_is_enough(load: Load) -> None:
    assert rows(load(rows=[{"prompt": "a"}, {"prompt": "b", "answer": "2"}])) == []


OWN_CODE = """
from rollick.rewards.base import declare

class Options:
    scale: float
    offset: float = 0.0

def scaled(completion, answer, **options):
    return 1.0

declare(scaled, options=Options)

def by_name(completion, *, truth, bonus=0):
    return 1.0

def training():
    return [{"prompt": "1+1=", "truth": "2"}]

def broken():
    raise RuntimeError("no such table")
"""


def test_the_arguments_of_own_rewards_are_read_and_never_run(load: Load, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_CODE)
    named = load(domain={"rewards": ["own.py:by_name"]})
    assert rows(named) == [
        "here: data.domains.sums.rewards.0: own.py:by_name needs 'truth', and the rows have "
        "prompt, answer; add the column, set options.truth, or give it a default"
    ]
    [scaled] = rows(load(domain={"rewards": ["own.py:scaled"]}))
    assert "own.py:scaled needs 'scale'" in scaled
    given = {"name": "own.py:scaled", "options": {"scale": 2.0}}
    assert rows(load(domain={"rewards": [given]})) == []


def test_sources_that_are_code_are_read_with_deep_only(load: Load, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_CODE)
    loaded = load(domain={"source": "own.py:training"})
    assert rows(loaded) == []
    assert "exact_match needs 'answer'" in rows(loaded, deep=True)[0]
    broken = load(domain={"source": "own.py:broken"})
    assert "reading its rows failed: RuntimeError: no such table" in rows(broken, deep=True)[0]


def test_a_model_that_cannot_fit_is_refused(load: Load, tmp_path: Path) -> None:
    wide = {**CONFIG, "hidden_size": 1 << 20, "intermediate_size": 1 << 22}
    (tmp_path / "model" / "config.json").write_text(json.dumps(wide))
    loaded = load()
    shapes = read_shapes(loaded.recipe)
    assert shapes is not None
    [problem] = check_memory(loaded, plan_memory(loaded.recipe, shapes))
    assert "model.path: CPU workers and snapshots need at least" in str(problem)
    assert "train.lora" in str(problem)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(loaded.recipe))
    description = check_and_describe(file, (), deep=False, recipe_only=True)
    assert re.search(
        r"\nmachine .* if it runs out, .*set checkpoint\.snapshot=false \(", description
    )
    assert re.search(r"or checkpoint\.snapshot=false, which saves \S+ GB", str(problem))


class _EmptyHub(BaseHTTPRequestHandler):
    """A hub without models."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def empty_hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _EmptyHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def find_closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_cli(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "rollick.cli", *arguments]
    caches = {"HF_HUB_CACHE": str(folder / "hub"), "HF_DATASETS_CACHE": str(folder / "datasets")}
    env = {**os.environ, **caches, "NO_COLOR": "1", **environment}
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, timeout=60, env=env)


def test_an_unavailable_model_or_dataset_is_reported_at_once(
    tmp_path: Path, empty_hub: str
) -> None:
    recipe = (
        "model: {path: org/none}\ndata: {domains: {a: {source: 'hub:org/rows', rewards: [f1]}}}\n"
    )
    (tmp_path / "recipe.yaml").write_text(recipe)
    closed = f"http://127.0.0.1:{find_closed_port()}"
    for endpoint, message in (
        (empty_hub, "the hub does not have it, or requires an access token"),
        (closed, "the hub cannot be reached"),
    ):
        child = run_cli(tmp_path, "check", "recipe.yaml", HF_ENDPOINT=endpoint)
        assert child.returncode == 2, child.stderr
        assert "recipe.yaml:1:15: model.path: there is no folder 'org/none' here" in child.stderr
        assert "data.domains.a.source: dataset 'org/rows': it is not in the" in child.stderr
        assert child.stderr.count(message) == 2
        assert "Traceback" not in child.stderr
    recipe_check = run_cli(tmp_path, "check", "--recipe-only", "recipe.yaml", HF_ENDPOINT=closed)
    assert recipe_check.returncode == 0, recipe_check.stderr


def test_what_is_in_the_hubs_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--cached" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "datasets" / "org___rows").mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    recipe = (
        "model: {path: org/cached}\ndata: {domains: {a: {source: 'hub:org/rows', rewards: [f1]}}}\n"
    )
    (tmp_path / "recipe.yaml").write_text(recipe)
    closed = f"http://127.0.0.1:{find_closed_port()}"
    child = run_cli(tmp_path, "check", "recipe.yaml", HF_ENDPOINT=closed)
    assert child.returncode == 0, child.stderr
    assert "host 0" in child.stdout
