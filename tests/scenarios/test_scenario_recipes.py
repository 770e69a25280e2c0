"""The recipes of this repository: PPO learns its toy task, and every recipe is valid."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollick.config.load import load_recipe
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.testing.learning import LETTERS, SMALL_MODEL
from rollick.testing.tiny import save_tiny

RECIPES = Path(__file__).parents[2] / "recipes"


def test_ppo_with_a_critic_learns_the_toy(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", alphabet=LETTERS, **SMALL_MODEL)
    overrides = [f"model.path={model}", f"run.folder={tmp_path}", "observe.sinks=[]"]
    loaded = load_recipe(RECIPES / "ppo_critic.yaml", [*overrides, "observe.live=off"])
    result = run_recipe(loaded)
    rows = list(read_metrics(result.folder / "metrics.jsonl"))
    assert rows[0]["eval/pass@1"] < 0.4
    assert result.score > 0.9
    assert rows[-1]["critic/mean/value"] == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_has_no_mistake(path: Path) -> None:
    assert load_recipe(path).recipe.run.name == path.stem
