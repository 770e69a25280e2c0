"""Names that installed packages register: found without an import; an error if registered twice."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollick.cli import main
from rollick.config.load import (
    LoadedRecipe,
    check_recipe,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
)
from rollick.config.names import CLOSED, NAMES, find_target, names_of, resolve
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.section import CustomPart
from rollick.errors import ConfigError

if TYPE_CHECKING:
    from rollick import RunResult

Install = Callable[..., Path]

MODULE = """
import numpy as np

IMPORTED = True


def squared(inputs, options):
    from rollick.algorithms.losses import TokenLoss
    return TokenLoss(options["by"] * inputs.logprobs_T ** 2)


def climb(inputs, options):
    from rollick.algorithms.losses import TokenLoss
    return TokenLoss(-options["by"] * inputs.advantages_T * inputs.logprobs_T)


def above_zero(groups, options):
    return [[member.score.value - options["zero"] for member in g.members] for g in groups]


def every_sample(counts_B, group_B, *, max_tokens):
    return np.ones(len(counts_B))


def shout(completion):
    return float(completion.isupper())
"""
ENTRIES = """
[rollick.losses]
squared = PACKAGE.parts:squared
climb = PACKAGE.parts:climb
gone = PACKAGE.parts:gone
whole_module = PACKAGE.parts

[rollick.advantages]
above_zero = PACKAGE.parts:above_zero

[rollick.aggregations]
every_sample = PACKAGE.parts:every_sample

[rollick.rewards]
shout = PACKAGE.parts:shout

[rollick.sinks]
paper = PACKAGE.parts:Paper

[rollick.kl_forms]
k9 = PACKAGE.parts:k9

[console_scripts]
other = PACKAGE.parts:shout
"""
RECIPE = """\
model: {path: tiny}
data:
  domains:
    sums: {source: sums.jsonl, rewards: [%s]}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Install]:
    """A function that writes a package with its metadata and adds its folder to sys.path."""

    def install_package(name: str = "acme_parts", entries: str = ENTRIES) -> Path:
        site = tmp_path / f"site_{name}"
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
        (site / name / "parts.py").write_text(MODULE)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        dashed = name.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entries.replace("PACKAGE", name))
        monkeypatch.syspath_prepend(site)
        return site

    yield install_package
    for module in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[module]


def load(folder: Path, text: str = "", *, reward: str = "exact_match") -> LoadedRecipe:
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (folder / "recipe.yaml").write_text(text + RECIPE % reward)
    return load_recipe(folder / "recipe.yaml")


def find_problems(folder: Path, text: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **options)
    return [line.strip().removeprefix(f"{folder}/") for line in str(caught.value).splitlines()[1:]]


def test_a_package_adds_names_that_resolve_to_its_functions(install: Install) -> None:
    install()
    assert resolve("rewards", "shout")("LOUD") == 1
    assert resolve("aggregations", "every_sample")([3, 4], [0, 0], max_tokens=9).tolist() == [1, 1]
    assert names_of("losses")[-4:] == ["climb", "gone", "squared", "whole_module"]
    assert names_of("losses")[:-4] == list(NAMES["losses"])


def test_a_package_that_is_not_there_adds_nothing(install: Install) -> None:
    site = install()
    assert find_target("rewards", "shout") == "acme_parts.parts:shout"
    sys.path.remove(str(site))
    assert find_target("rewards", "shout") is None


def test_a_recipe_names_a_part_of_a_package_plainly_and_with_options(
    install: Install, tmp_path: Path
) -> None:
    install()
    text = "algorithm: {loss: {name: squared, options: {by: 3}}, advantage: above_zero}\n"
    loaded = load(tmp_path, text)
    assert loaded.recipe.algorithm.loss == CustomPart(name="squared", options={"by": 3})
    assert loaded.recipe.algorithm.advantage == CustomPart(name="above_zero")
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded.recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == loaded.recipe


def test_a_check_imports_nothing_of_a_package_and_a_deep_one_does(
    install: Install, tmp_path: Path
) -> None:
    install()
    text = "algorithm: {loss: climb, aggregation: every_sample}\nobserve: {sinks: [paper]}\n"
    loaded = load(tmp_path, text, reward="shout")
    assert "acme_parts" not in sys.modules
    actual = check_recipe(loaded, deep=True)
    assert "acme_parts.parts" in sys.modules
    assert [(problem.path, problem.message) for problem in actual] == [
        ("observe.sinks.0", "acme_parts.parts has no 'Paper'")
    ]


def test_a_misspelt_name_gets_a_message_with_that_of_a_package(
    install: Install, tmp_path: Path
) -> None:
    install()
    known = ", ".join([*NAMES["losses"], "climb", "gone", "squared", "whole_module"])
    assert find_problems(tmp_path, "algorithm: {loss: squarred}\n") == [
        f"recipe.yaml:1:19: algorithm.loss: 'squarred' is not one of the losses ({known}); "
        "did you mean 'squared'?"
    ]
    with pytest.raises(ConfigError, match="did you mean squared"):
        resolve("losses", "squarred")


def test_options_of_a_package_part_go_into_options(install: Install, tmp_path: Path) -> None:
    install()
    assert find_problems(tmp_path, "algorithm: {loss: {name: squared, by: 3}}\n") == [
        "recipe.yaml:1:35: algorithm.loss.by: unknown key 'by'; "
        "the keys here are name, options, needs"
    ]


def test_a_package_that_takes_a_name_of_ours_is_an_error_once_the_name_is_used(
    install: Install, tmp_path: Path
) -> None:
    install(entries="[rollick.losses]\nppo = PACKAGE.parts:squared\n")
    assert load(tmp_path).recipe.algorithm.loss.name == "dppo_tv"
    assert names_of("losses") == list(NAMES["losses"])
    reason = "'ppo' of the losses is registered by rollick itself and by acme-parts"
    fix = "uninstall acme-parts, or name its function as package.module:function"
    assert find_problems(tmp_path, "algorithm: {loss: {name: ppo, clip_low: 0.1}}\n") == [
        f"recipe.yaml:1:26: algorithm.loss.name: {reason}; {fix}"
    ]
    with pytest.raises(ConfigError, match=reason):
        resolve("losses", "ppo")


def test_a_name_of_two_packages_is_an_error_once_it_is_used(
    install: Install, tmp_path: Path
) -> None:
    for name in ("acme_parts", "acme_more"):
        install(name, "[rollick.rewards]\nshout = PACKAGE.parts:shout\n")
    assert load(tmp_path).recipe.data.domains
    reason = "'shout' of the rewards is registered by acme-more and by acme-parts"
    fix = "uninstall acme-more or acme-parts, or name its function as package.module:function"
    assert find_problems(tmp_path, "", reward="shout") == [
        f"recipe.yaml:4:42: data.domains.sums.rewards.0: {reason}; {fix}"
    ]
    with pytest.raises(ConfigError, match=reason):
        resolve("rewards", "shout")
    assert resolve("rewards", "acme_more.parts:shout")("LOUD") == 1


def test_a_package_installed_twice_is_one_package(install: Install, tmp_path: Path) -> None:
    site = install()
    (tmp_path / "twice").symlink_to(site)
    sys.path.insert(0, str(tmp_path / "twice"))
    try:
        assert find_target("rewards", "shout") == "acme_parts.parts:shout"
    finally:
        sys.path.remove(str(tmp_path / "twice"))


def test_an_entry_point_that_names_no_function_is_an_error(
    install: Install, tmp_path: Path
) -> None:
    install()
    assert find_problems(tmp_path, "algorithm: {loss: whole_module}\n") == [
        "recipe.yaml:1:19: algorithm.loss: 'whole_module' of the losses is registered as "
        "'acme_parts.parts'; its package must register it as module:attribute"
    ]
    with pytest.raises(ConfigError, match=r"acme_parts.parts has no 'gone'"):
        resolve("losses", "gone")


def test_kinds_that_are_settings_of_a_part_stay_closed(install: Install) -> None:
    install()
    assert set(NAMES) > set(CLOSED)
    assert names_of("kl_forms") == ["k1", "k2", "k3"]
    assert find_target("kl_forms", "k9") is None


def test_list_marks_the_package_of_a_name(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install()
    monkeypatch.setenv("COLUMNS", "250")

    def run_list(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rollick", "list", *arguments])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().out

    assert ", shout (acme-parts)" in " ".join(run_list().split())
    table = json.loads(run_list("--json"))
    assert table["rewards"] == [*NAMES["rewards"], "shout"]
    assert table["kl_forms"] == ["k1", "k2", "k3"]


def test_another_process_finds_the_same_names(install: Install) -> None:
    """A worker process gets only the recipe and resolves the names itself."""
    site = install()
    code = "from rollick.config.names import resolve; print(resolve('rewards', 'shout')('LOUD'))"
    child = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert child.stdout == "1.0\n", child.stderr


def test_the_objective_of_a_package_gets_its_options(install: Install) -> None:
    torch = pytest.importorskip("torch")
    from rollick.algorithms.losses import LossInputs
    from rollick.algorithms.objective import build_objective

    install()
    part = {"name": "squared", "options": {"by": 3}}
    objective = build_objective(AlgorithmConfig.model_validate({"loss": part}))
    log_T = torch.tensor([math.log(0.5)], requires_grad=True)
    fixed_T = log_T.detach()
    inputs = LossInputs(
        logprobs_T=log_T,
        old_T=fixed_T,
        behaviour_T=fixed_T,
        advantages_T=torch.ones(1),
        weights_T=torch.ones(1),
        sequence_T=torch.zeros(1, dtype=torch.long),
    )
    assert objective(inputs).total.item() == pytest.approx(3 * math.log(0.5) ** 2)


def test_a_loss_and_an_advantage_of_a_package_train_a_toy(
    install: Install, run_toy: Callable[..., RunResult]
) -> None:
    install()
    algorithm = {
        "advantage": {"name": "above_zero", "options": {"zero": 0.25}},
        "loss": {"name": "climb", "options": {"by": 2}},
    }
    result = run_toy(algorithm=algorithm, steps=1)
    (row,) = [json.loads(line) for line in (result.folder / "metrics.jsonl").open()]
    assert result.step == 1
    assert row["train/grad_norm"] > 0


def test_a_recipe_from_python_may_use_names_of_packages(install: Install) -> None:
    install()
    domain = {"source": "object:rows", "rewards": ["shout"]}
    recipe = {"model": {"path": "tiny"}, "data": {"domains": {"loud": domain}}}
    assert recipe_from_dict(recipe, objects={"rows"}).recipe.data.domains["loud"].rewards
