"""RLVR over three domains at once: no held-out prompt is trained on, and all domains improve."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollick.config.load import load_recipe
from rollick.observe.metrics import read_metrics
from rollick.pipelines.run import run_recipe
from rollick.rewards.code import score_code
from rollick.rewards.instructions import CHECKERS
from rollick.starters.rlvr import tasks

RECIPES = Path(__file__).parents[2] / "recipes"
GAIN = 0.1


def load_multidomain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("multidomain", RECIPES / "multidomain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


multidomain = load_multidomain()


@pytest.mark.parametrize("domain", ["math", "code", "general"])
def test_held_out_prompts_of_the_tiny_recipe_are_trained_on_nowhere(domain: str) -> None:
    seen = {row["prompt"] for row in [*getattr(multidomain, domain)(), *multidomain.warm_up()]}
    held_out = {row["prompt"] for row in getattr(multidomain, f"held_out_{domain}")()}
    assert len(held_out) == multidomain.HELD_OUT
    assert not held_out & seen


@pytest.mark.parametrize("domain", ["math", "code", "instructions"])
def test_held_out_prompts_of_the_starter_are_trained_on_nowhere(domain: str) -> None:
    trained = {row["prompt"] for row in getattr(tasks, domain)()}
    held_out = {row["prompt"] for row in getattr(tasks, f"held_out_{domain}")()}
    assert len(held_out) >= 50
    assert not held_out & trained


def test_the_starters_instructions_have_checkers() -> None:
    names = {name for row in tasks.instructions() for name in row["instruction_id_list"]}
    assert names <= set(CHECKERS)


async def test_a_right_program_of_the_tiny_recipe_passes_in_the_sandbox_and_a_wrong_one_fails() -> (
    None
):
    row: dict[str, Any] = multidomain.held_out_code()[0]
    right = await score_code(row["answer"], row)
    wrong = await score_code(row["answer"] + "0", row)
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert right.isolation in ("full", "user")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_tiny_model_improves_in_math_code_and_general_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = multidomain.make_model(tmp_path)
    options = [f"model.path={model}", f"run.folder={tmp_path}", "observe.sinks=[]"]
    run = run_recipe(load_recipe(RECIPES / "rlvr_multidomain.yaml", options))
    validated = [row for row in read_metrics(run.folder / "metrics.jsonl") if "eval/score" in row]
    first, last = validated[0], validated[-1]
    with capsys.disabled():
        print()
        for domain in ("math", "code", "general"):
            name = f"eval/{domain}/pass@1"
            print(f"{domain:<10}{first[name]:.2f} -> {last[name]:.2f}")
    for domain in ("math", "code", "general"):
        assert last[f"eval/{domain}/pass@1"] >= first[f"eval/{domain}/pass@1"] + GAIN
