"""Complete runs on a tiny model."""

from pathlib import Path
from typing import Any

import pytest
from toy_runs import Run, toy

from rollick import RunResult, run_recipe


@pytest.fixture
def run_toy(tiny_folder: Path, tmp_path: Path) -> Run:
    """Runs the toy recipe with overrides."""

    def run(*overrides: str, resume: bool = False, **options: Any) -> RunResult:
        return run_recipe(toy(tiny_folder, tmp_path, *overrides, **options), resume=resume)

    return run
