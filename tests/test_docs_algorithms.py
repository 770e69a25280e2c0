"""docs/algorithms/ is generated from the schema, up to date, complete and runnable."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rollick.cli import app
from rollick.config.load import recipe_from_dict
from rollick.config.names import CLOSED, NAMES
from rollick.config.presets import PRESETS
from rollick.config.schema.losses import WITHOUT_TRUST_REGION

DOCS = Path(__file__).parent.parent / "docs"
PAGES = DOCS / "algorithms"
BY_HAND = {"your_own.md"}
KINDS = (set(CLOSED) - {"gym_tasks"}) | {"advantages", "losses", "corrections", "aggregations"}
BLOCK = re.compile(
    r"(?:\*\*`(?P<file>[^`]+)`\*\*\n\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.S
)


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("make_algorithms")
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def generated(generator: ModuleType) -> dict[str, str]:
    return generator.all_pages()


def read_curves() -> dict[str, Any]:
    return json.loads((DOCS / "results" / "algorithms_toy.json").read_text("utf-8"))


def test_the_pages_are_those_that_the_generator_writes(generated: dict[str, str]) -> None:
    stale = [path for path, page in generated.items() if (PAGES / path).read_text("utf-8") != page]
    assert stale == [], "run python docs/make_algorithms.py"


def test_every_page_is_generated_or_listed_as_handwritten(generated: dict[str, str]) -> None:
    existing = {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")}
    assert existing == generated.keys() | BY_HAND


def test_every_name_that_an_algorithm_is_made_of_has_a_page(
    generator: ModuleType, generated: dict[str, str]
) -> None:
    for kind in KINDS:
        for name in NAMES[kind]:
            page = generator.page_of(kind, name)
            assert page in generated, (kind, name)
            assert f"[{name}]({page})" in generated["README.md"], (kind, name)


def test_the_table_of_papers_has_every_preset(generated: dict[str, str]) -> None:
    rows = [line for line in generated["README.md"].splitlines() if "`algorithm: " in line]
    for name, preset in PRESETS.items():
        assert any(f"`algorithm: {name}`" in row and preset.paper in row for row in rows), name


def test_every_page_has_a_small_picture_that_was_measured(generated: dict[str, str]) -> None:
    used = {
        (PAGES / path).parent.joinpath(picture).resolve()
        for path, page in generated.items()
        for picture in re.findall(r"!\[[^]]*]\(([^)]+)\)", page)
    }
    assert used == {path.resolve() for path in (PAGES / "pictures").iterdir()}
    assert all(0 < path.stat().st_size < 20_000 for path in used if path.name != "presets.png")
    assert read_curves().keys() == generated.keys() - {"README.md"}


def test_links_lead_somewhere(generated: dict[str, str]) -> None:
    pages = generated | {name: (PAGES / name).read_text("utf-8") for name in BY_HAND}
    broken = [
        (path, link)
        for path, page in pages.items()
        for link in re.findall(r"]\(([^)#]+)[^)]*\)", page)
        if "://" not in link and not (PAGES / path).parent.joinpath(link).exists()
    ]
    assert broken == []


def test_the_recorded_curves_learn_and_their_controls_do_not() -> None:
    recorded = read_curves()
    for name, preset in PRESETS.items():
        lines = recorded[f"presets/{name.replace('++', '_pp')}.md"]["lines"]
        last = {label: sum(values[-5:]) / 5 for label, values in lines.items()}
        assert len(last) == (2 if preset.loss["name"] in WITHOUT_TRUST_REGION else 4), name
        for label, score in last.items():
            assert score < 0.5 if "shuffled" in label else score >= 0.9, (name, label, score)


def find_recipes() -> Iterator[tuple[str, str]]:
    for path in sorted(PAGES.rglob("*.md")):
        if path.name not in BY_HAND:
            for block in BLOCK.finditer(path.read_text("utf-8")):
                yield str(path.relative_to(PAGES)), block["code"]


def test_every_recipe_on_a_page_is_accepted(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "answer": "2", "good": "2", "bad": "3"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    count = 0
    for path, text in find_recipes():
        recipe = yaml.safe_load(text)
        rewards = [] if "pipeline" in recipe or "opd" in text else ["exact_match"]
        plain = {"domains": {"mine": {"source": "mine.jsonl", "rewards": rewards}}}
        recipe["data"] = {**plain, **recipe.get("data", {})}
        recipe_from_dict({"model": {"path": "tiny"}, **recipe}, origin=path, base_dir=tmp_path)
        count += 1
    assert count == len(read_curves())


@pytest.fixture
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Writes the files of your_own.md into an empty folder; gives its commands in their order."""
    commands: list[str] = []
    for block in BLOCK.finditer((PAGES / "your_own.md").read_text("utf-8")):
        if block["file"]:
            file = tmp_path / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["code"], "utf-8")
        else:
            assert block["language"] == "console"
            commands += block["code"].splitlines()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield commands
    for name in ("my_parts", "test_my_parts", "acme_parts"):
        sys.modules.pop(name, None)


def run_rollick(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def install_acme(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as `pip install ./acme`: put the package on the path, with its metadata beside it."""
    project = tomllib.loads((folder / "acme" / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "acme" / "acme_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
    monkeypatch.syspath_prepend(folder / "acme")


def test_everything_on_the_page_of_own_parts_runs(
    own_parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for command in own_parts:
        program, *arguments = command.split()
        if command == "rollick list":
            install_acme(tmp_path, monkeypatch)
            assert "soft_clip (acme-parts)" in " ".join(run_rollick("list").split())
        elif program == "rollick":
            run_rollick(*arguments)
        elif arguments[:2] == ["-m", "pytest"]:
            module = importlib.import_module(Path(arguments[-1]).stem)
            module.test_the_loss_keeps_to_the_contract()
            module.test_the_advantage_keeps_to_the_contract()
            module.test_it_learns_from_true_scores_and_from_nothing_else(tmp_path / "toy")
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        ran.append(command)
    assert len(ran) == 8
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").open()]
    assert len(rows) == 3
    assert all(0 < row["train/mean/fade"] <= 1 for row in rows)
    assert (tmp_path / "runs/packaged/metrics.jsonl").exists()


def test_the_page_lists_every_field_that_a_custom_loss_can_get() -> None:
    """Fields that only other pipelines, or the objective itself, use are excluded by name."""
    from dataclasses import fields

    from rollick.algorithms.losses import LossInputs

    page = (PAGES / "your_own.md").read_text("utf-8")
    internal = {"pair_T", "teacher_TK", "student_TK", "entropy_T", "component_T"}
    internal |= {"kl_weights_T", "entropy_weights_T"}
    missing = [f.name for f in fields(LossInputs) if f"`{f.name}`" not in page]
    assert set(missing) == internal
