"""A complete run on one GPU: learner and engine in one process, over one set of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollick import run_recipe
from rollick.config.load import recipe_from_dict
from rollick.testing.toys import toy_recipe

pytestmark = pytest.mark.gpu

COLOCATED = ("devices.policy=0", "devices.generators=0")
ALL_LETTERS = ("rollout.groups_per_step=8", "rollout.group_size=16", "infer.slots=256")
STEPS = 80


def _read_scores(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row["score/mean"] for row in map(json.loads, lines) if "score/mean" in row]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_colocated_run_learns_to_say_the_letter(
    tiny_folder: Path, tmp_path: Path, dtype: str
) -> None:
    loaded = recipe_from_dict(
        toy_recipe(tiny_folder, tmp_path, steps=STEPS),
        overrides=[*COLOCATED, *ALL_LETTERS, f"model.dtype={dtype}"],
    )
    result = run_recipe(loaded)
    scores = _read_scores(result.folder)
    assert result.step == STEPS
    assert scores[0] < 0.1
    assert sum(scores[-5:]) / 5 > 0.4
