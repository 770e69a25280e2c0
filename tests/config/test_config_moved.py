"""Renamed keys: the error for an old key names the new one, and the new one exists."""

from __future__ import annotations

from typing import Any

import pytest

from rollick.config.load import recipe_from_dict
from rollick.config.schema import AgenticRecipe
from rollick.config.validation_messages import RENAMED_KEYS, has_key, new_key
from rollick.errors import ConfigError


def nest_value(path: list[str], value: Any) -> dict[str, Any]:
    return {path[0]: nest_value(path[1:], value) if len(path) > 1 else value}


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_gets_a_message_with_the_new_one(old: str) -> None:
    path = old.replace("data.*.*", "data.domains.mine").split(".")
    recipe: dict[str, Any] = {"pipeline": "agentic", "model": {"path": "x"}} | nest_value(path, 1)
    if path[0] != "data":
        recipe["data"] = {"domains": {"mine": {"environment": "sokoban"}}}
    elif path[1] != "domains":
        recipe["data"]["domains"] = {"mine": {"environment": "sokoban"}}
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(recipe)
    assert f"it is now {new_key(tuple(path))}" in str(caught.value)


@pytest.mark.parametrize("new", RENAMED_KEYS.values())
def test_a_new_key_is_in_the_schema(new: str) -> None:
    key = new.partition(",")[0].replace("data.*.*", "data.domains.mine")
    assert has_key(AgenticRecipe, tuple(key.split(".")))
