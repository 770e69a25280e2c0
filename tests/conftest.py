"""Fixtures that several areas share. What is heavy is imported inside them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from rollick import LoadedRecipe, RunResult

# Every run of the tests tries the same examples.
settings.register_profile("rollick", derandomize=True, database=None, deadline=None)
settings.load_profile("rollick")

OBJECTS = frozenset({"rows", "reward", "held_out"})
"""What a recipe made by `toy` may name as object:NAME."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, as a Hugging Face folder."""
    from rollick.testing.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def toy(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedRecipe]:
    """A loaded toy recipe; overrides as text, whole sections as keywords; a folder of its own."""
    from rollick.config.load import recipe_from_dict
    from rollick.testing.toys import toy_recipe

    numbers, runs = count(), tmp_path_factory.mktemp("runs")

    def load(*overrides: str, name: str = "", steps: int = 2, **sections: Any) -> LoadedRecipe:
        name = name or f"toy{next(numbers)}"
        recipe = toy_recipe(tiny_folder, runs, name=name, steps=steps) | sections
        return recipe_from_dict(recipe, overrides=overrides, objects=OBJECTS)

    return load


@pytest.fixture(scope="session")
def run_toy(toy: Callable[..., LoadedRecipe]) -> Callable[..., RunResult]:
    """Runs the toy recipe."""
    from rollick import run_recipe

    def run(*overrides: str, resume: bool = False, **options: Any) -> RunResult:
        return run_recipe(toy(*overrides, **options), resume=resume)

    return run
