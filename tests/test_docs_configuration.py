"""docs/configuration.md is generated from the schema and has every key."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rollick.config.schema import RECIPES

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("make_configuration")
    sys.path.remove(str(DOCS))


def test_the_page_is_what_the_generator_writes(generator: ModuleType) -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    assert page == generator.write_page(), "run python docs/make_configuration.py"


def test_every_section_of_every_pipeline_has_a_heading() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    sections = {key for recipe in RECIPES.values() for key in recipe.model_fields} - {"pipeline"}
    assert {f"## {section}\n" in page for section in sections} == {True}
    assert "| `rollout.group_size` | whole number, > 0 | `8` |" in page
