"""Presets: the values of the papers, overrides of them, and the resulting recipe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from rollick.config.load import (
    LoadedRecipe,
    dump_recipe,
    load_recipe,
    recipe_from_dict,
    recipe_schema,
)
from rollick.config.names import NAMES, find_target
from rollick.config.presets import PRESETS
from rollick.config.schema.advantages import BaselineAdvantage, NormalisedAdvantage
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.losses import CispoLoss, DppoTvLoss, PpoLoss
from rollick.errors import ConfigError

MINIMAL_RECIPE = (
    "model: {path: tiny}\ndata: {domains: {sums: {source: 'object:rows', rewards: [contains]}}}\n"
)


def algorithm(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def load(folder: Path, text: str, *overrides: str) -> LoadedRecipe:
    (folder / "recipe.yaml").write_text(text + MINIMAL_RECIPE)
    return load_recipe(folder / "recipe.yaml", overrides, objects={"rows"})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_described_and_names_parts_of_the_table(name: str) -> None:
    preset = PRESETS[name]
    assert preset.about.endswith(".")
    assert re.fullmatch(r"\d{4}\.\d{5}", preset.paper)
    assert find_target("advantages", preset.advantage)
    assert find_target("losses", preset.loss["name"])
    assert find_target("aggregations", preset.aggregation)
    assert set(preset.settings) <= set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_values_of_the_loaded_section(name: str) -> None:
    section = algorithm(preset=name).model_dump()
    assert section["preset"] == name
    for key, settings in PRESETS[name].settings.items():
        options = settings.items() if isinstance(settings, dict) else [(None, settings)]
        for option, value in options:
            assert (section[key][option] if option else section[key]) == value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_built_and_its_parts_go_together(name: str, tmp_path: Path) -> None:
    objective = pytest.importorskip("rollick.algorithms.objective")
    loaded = load(tmp_path, f"algorithm: {name}\n")
    objective.build_objective(loaded.recipe.algorithm)
    objective.resolve_advantage(loaded.recipe.algorithm)


def test_the_table_of_names_has_the_presets() -> None:
    assert list(NAMES["presets"]) == list(PRESETS)
    assert len(PRESETS) == 15


def test_a_preset_cannot_be_rewritten() -> None:
    PRESETS["dapo"].settings["loss"]["clip_high"] = 9
    assert PRESETS["dapo"].settings["loss"]["clip_high"] == 0.28
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["dapo"].aggregation = "fixed_length"  # pyright: ignore[reportAttributeAccessIssue]


def test_dapo_is_clip_higher_a_token_mean_and_a_penalty_that_follows_the_token_limit() -> None:
    dapo = algorithm(preset="dapo")
    assert dapo.advantage == NormalisedAdvantage()
    assert dapo.loss == PpoLoss(clip_low=0.2, clip_high=0.28)
    assert dapo.aggregation == "token_mean"
    assert dapo.shaping.length_limit == "max_tokens"
    assert algorithm(preset="grpo").shaping.length_limit == 0


def test_dppo_is_the_default() -> None:
    assert algorithm(preset="dppo").model_copy(update={"preset": None}) == AlgorithmConfig()


def test_given_keys_override_the_preset_one_by_one() -> None:
    merged = algorithm(
        preset="dapo",
        loss={"clip_high": 0.3},
        shaping={"length_weight": 0.5},
        kl={"coefficient": 0.1},
        aggregation="prompt_mean",
    )
    assert merged.loss == PpoLoss(clip_low=0.2, clip_high=0.3)
    assert (merged.shaping.length_limit, merged.shaping.length_weight) == ("max_tokens", 0.5)
    assert (merged.kl.coefficient, merged.aggregation) == (0.1, "prompt_mean")
    assert merged.advantage == NormalisedAdvantage()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("cispo", CispoLoss()),
        ({"name": "cispo", "clip_high": 2.0}, CispoLoss(clip_high=2)),
        ({"name": "ppo", "clip_low": 0.1}, PpoLoss(clip_low=0.1, clip_high=0.28)),
        ("ppo", PpoLoss(clip_high=0.28)),
        ({}, PpoLoss(clip_high=0.28)),
        (DppoTvLoss(delta=0.1), DppoTvLoss(delta=0.1)),
    ],
)
def test_a_part_with_another_name_is_the_users_alone(loss: Any, expected: Any) -> None:
    assert algorithm(preset="dapo", loss=loss).loss == expected


def test_the_short_form_is_the_preset(tmp_path: Path) -> None:
    short = load(tmp_path, "algorithm: dapo\n").recipe.algorithm
    assert short == load(tmp_path, "algorithm: {preset: dapo}\n").recipe.algorithm
    assert short == algorithm(preset="dapo")


@pytest.mark.parametrize("name", PRESETS)
def test_the_dumped_recipe_has_every_value_and_loads_to_an_equal_one(
    name: str, tmp_path: Path
) -> None:
    text = f"algorithm: {{preset: {name}, advantage: rloo, kl: {{coefficient: 0.1}}}}\n"
    loaded = load(tmp_path, text)
    assert "max_ratio: 5.0" in dump_recipe(loaded.recipe)
    (tmp_path / "again.yaml").write_text(dump_recipe(loaded.recipe))
    reloaded = load_recipe(tmp_path / "again.yaml", objects={"rows"})
    assert reloaded.recipe == loaded.recipe
    assert dump_recipe(reloaded.recipe) == dump_recipe(loaded.recipe)


def test_a_domain_can_have_a_preset_of_its_own(tmp_path: Path) -> None:
    key = "data.domains.sums.algorithm"
    loaded_recipe = load(
        tmp_path, "algorithm: grpo\n", f"{key}=dapo", f"{key}.loss.clip_high=0.4"
    ).recipe
    assert loaded_recipe.algorithm.preset == "grpo"
    domain_algorithm = loaded_recipe.data.domains["sums"].algorithm
    assert domain_algorithm == algorithm(preset="dapo", loss={"clip_high": 0.4})


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("algorithm: dapo\n", ["algorithm.loss.clip_high=0.4"], PpoLoss(clip_high=0.4)),
        ("algorithm: dapo\n", ["algorithm.loss=cispo"], CispoLoss()),
        ("algorithm: dapo\n", ["algorithm=cispo"], CispoLoss()),
        ("algorithm: {loss: {clip_low: 0.1}, preset: grpo}\n", ["algorithm=dapo"], None),
        ("algorithm: {loss: {clip_low: 0.1}, preset: grpo}\n", ["algorithm.preset=dapo"], None),
        ("algorithm: {loss: dppo_tv}\n", ["algorithm.preset=dapo"], None),
        (
            "algorithm: {loss: {clip_low: 0.1}, preset: dapo}\n",
            ["algorithm.preset=dapo"],
            PpoLoss(clip_low=0.1, clip_high=0.28),
        ),
    ],
)
def test_naming_another_preset_drops_the_overrides_of_the_previous_one(
    tmp_path: Path, text: str, overrides: list[str], expected: Any
) -> None:
    loaded = load(tmp_path, text, *overrides)
    assert loaded.recipe.algorithm.loss == (expected or PpoLoss(clip_high=0.28))


def test_a_recipe_overrides_the_preset_of_the_recipe_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL_RECIPE + "algorithm: dapo\n")
    for settings, expected in (
        ("{loss: {clip_low: 0.1}}", algorithm(preset="dapo", loss={"clip_low": 0.1})),
        ("{advantage: dr_grpo}", algorithm(preset="dapo", advantage="dr_grpo")),
        ("gspo", algorithm(preset="gspo")),
    ):
        (tmp_path / "top.yaml").write_text(f"extends: base.yaml\nalgorithm: {settings}\n")
        actual = load_recipe(tmp_path / "top.yaml", objects={"rows"}).recipe.algorithm
        assert actual == expected
    assert algorithm(preset="dapo", advantage="dr_grpo").advantage == BaselineAdvantage()


def test_rloo_is_on_policy_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a loss with a trust region, and reinforce has"):
        load(tmp_path, "algorithm: rloo\nrollout: {max_staleness: 1}\n")
    assert load(tmp_path, "algorithm: rloo\n").recipe.algorithm.loss.name == "reinforce"


def test_an_unknown_preset_of_a_domain_is_reported_at_its_line() -> None:
    domain = {"source": "object:rows", "rewards": ["contains"], "algorithm": "dapoo"}
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(
            {"model": {"path": "tiny"}, "data": {"domains": {"sums": domain}}}, objects={"rows"}
        )
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith("  <train>: data.domains.sums.algorithm: 'dapoo' is not one of the pres")
    assert line.endswith("; did you mean 'dapo'?")


def test_the_json_schema_knows_the_short_form() -> None:
    document = recipe_schema()
    assert {"type": "string"} in document["$defs"]["RlvrRecipe"]["properties"]["algorithm"]["anyOf"]
    domain = document["$defs"]["RlvrDomain"]["properties"]["algorithm"]
    assert {"type": "string"} in domain["anyOf"]
