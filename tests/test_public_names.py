"""The public interface, pinned: a change here is a change for every user."""

import sys

import pytest

import rollick

NAMES = [
    "ConfigError",
    "Group",
    "LoadedRecipe",
    "Prompt",
    "Recipe",
    "RollickError",
    "RunInterrupted",
    "RunResult",
    "Sample",
    "SampleId",
    "Score",
    "StopReason",
    "TextEnv",
    "Turn",
    "load_recipe",
    "run_recipe",
    "train",
]


def test_these_are_the_public_names() -> None:
    assert rollick.__all__ == NAMES
    assert set(NAMES) <= set(dir(rollick))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    actual = getattr(rollick, name)
    assert callable(actual)
    assert actual.__name__ == name
    assert actual.__doc__


def test_train_stays_the_function_after_its_namesake_was_imported() -> None:
    from rollick.trainer.local import LocalStrategy

    assert LocalStrategy.__module__ == "rollick.trainer.local"
    assert rollick.train is sys.modules["rollick.pipelines.run"].train


def test_an_unknown_name_gets_a_message_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"rollick has no 'trian'; it has .*train"):
        _ = rollick.trian
