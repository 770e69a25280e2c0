"""A setting with another library's name gets an error that names rollick's key."""

from __future__ import annotations

from typing import Any

import pytest

from rollick.config.foreign_names import FOREIGN_NAMES
from rollick.config.load import recipe_from_dict
from rollick.config.schema import RECIPES
from rollick.config.validation_messages import has_key
from rollick.errors import ConfigError

RLVR: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"domains": {"sums": {"source": "hub:sums", "rewards": ["exact_match"]}}},
}
SFT: dict[str, Any] = {
    "pipeline": "sft",
    "model": {"path": "m"},
    "data": {"domains": {"sums": {"source": "hub:sums", "completion": "answer"}}},
}


def get_error(recipe: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        recipe_from_dict(recipe)
    return str(raised.value)


@pytest.mark.parametrize(
    ("recipe", "ours"),
    [
        ({**RLVR, "num_generations": 8}, "num_generations'; rollick calls it rollout.group_size"),
        (
            {**RLVR, "rollout": {"num_generations": 8}},
            "num_generations'; rollick calls it rollout.group_size",
        ),
        (
            {**RLVR, "train": {"learning_rate": 1}},
            "learning_rate'; rollick calls it train.optimizer.lr",
        ),
        (
            {**RLVR, "per_device_train_batch_size": 1},
            "per_device_train_batch_size'; rollick calls it rollout.groups_per_step",
        ),
        (
            {**SFT, "per_device_train_batch_size": 1},
            "per_device_train_batch_size'; rollick calls it train.batch_size",
        ),
        ({**RLVR, "beta": 0.1}, "beta'; rollick calls it algorithm.kl.coefficient"),
    ],
)
def test_the_name_of_another_library_gets_a_message_with_ours(
    recipe: dict[str, Any], ours: str
) -> None:
    assert f"unknown key '{ours}" in get_error(recipe)


def test_a_setting_that_the_pipeline_lacks_is_not_advised() -> None:
    assert "group_size" not in get_error({**SFT, "num_generations": 8})


@pytest.mark.parametrize(("name", "ours"), FOREIGN_NAMES.items())
def test_every_answer_is_a_key_of_a_recipe(name: str, ours: tuple[str, ...]) -> None:
    for key in ours:
        path = tuple(key.split("."))
        assert any(has_key(recipe, path) for recipe in RECIPES.values()), (name, key)
