"""The schema: documented, closed to unknown keys, consistent with the table of names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from rollick.config import schema
from rollick.config.load import recipe_schema
from rollick.config.names import NAMES
from rollick.config.schema import RECIPES, RolloutConfig
from rollick.config.schema.section import Section, union_tags


def iterate_subclasses(section: type[Section]) -> Iterator[type[Section]]:
    for subclass in section.__subclasses__():
        if subclass.__module__.startswith("rollick.config.schema."):
            yield subclass
            yield from iterate_subclasses(subclass)


SECTIONS = [s for s in dict.fromkeys(iterate_subclasses(Section)) if "[" not in s.__name__]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_section_and_every_field_is_described(section: type[Section]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        if name == "name" and get_origin(field.annotation) is Literal:
            continue  # The name of a part of the algorithm, which its docstring describes.
        assert field.description, f"{section.__name__}.{name}"
        assert field.description.endswith("."), f"{section.__name__}.{name}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_section_is_frozen_and_closed(section: type[Section]) -> None:
    assert section.model_config["frozen"]
    assert section.model_config["extra"] == "forbid"


def test_a_recipe_cannot_be_rewritten() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RolloutConfig().group_size = 3  # pyright: ignore[reportAttributeAccessIssue]


def iterate_tags(part: str) -> Iterator[tuple[str, Any]]:
    union = schema.AlgorithmConfig.model_fields[part].annotation
    for section in get_args(union):
        for tag in union_tags(section):
            yield tag, section


@pytest.mark.parametrize(
    ("part", "kind"),
    [("advantage", "advantages"), ("loss", "losses"), ("correction", "corrections")],
)
def test_the_parts_of_the_schema_are_those_of_the_table(part: str, kind: str) -> None:
    sections = dict(iterate_tags(part))
    assert set(sections) == {*NAMES[kind], "custom"}
    for name in NAMES[kind]:
        assert sections[name].model_validate({"name": name}).name == name


@pytest.mark.parametrize("part", ["advantage", "loss", "correction"])
def test_options_without_a_name_are_those_of_the_default(part: str) -> None:
    default = getattr(schema.AlgorithmConfig(), part)
    built = schema.AlgorithmConfig.model_validate({part: {}})
    assert getattr(built, part) == default


def test_the_defaults_are_in_the_tables() -> None:
    recipe = schema.parse_recipe({"model": {"path": "tiny"}, "data": {"domains": {}}})
    assert recipe.pipeline in NAMES["pipelines"]
    assert recipe.infer.engine in NAMES["engines"]
    assert recipe.train.strategy in NAMES["train_strategies"]
    assert recipe.algorithm.aggregation in NAMES["aggregations"]
    assert set(recipe.observe.sinks) <= set(NAMES["sinks"])


def test_the_json_schema_knows_every_section_and_the_short_forms() -> None:
    document = json.loads(json.dumps(recipe_schema()))
    references = [f"#/$defs/{recipe.__name__}" for recipe in RECIPES.values()]
    assert document["anyOf"] == [{"$ref": reference} for reference in references]
    for recipe in RECIPES.values():
        alternative = document["$defs"][recipe.__name__]
        assert list(alternative["properties"]) == ["extends", *recipe.model_fields]
        assert alternative["additionalProperties"] is False
        assert set(alternative["required"]) >= {"model", "data"}
    algorithm = document["$defs"]["AlgorithmConfig"]["properties"]
    assert {"type": "string"} in algorithm["loss"]["anyOf"]
    rollout = document["$defs"]["RolloutConfig"]["properties"]
    assert rollout["group_size"]["description"] == "Samples of each prompt."
    assert rollout["group_size"]["exclusiveMinimum"] == 0
