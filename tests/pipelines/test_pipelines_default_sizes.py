"""The sizes that `rollick.train` chooses by the device, and the time limit of a run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollick
from rollick.commands.export import find_checkpoint
from rollick.config.load import load_recipe
from rollick.config.schema import parse_recipe, rl_recipe
from rollick.pipelines.run import add_default_sizes

GIVEN: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"domains": {"prompts": {"source": "rows.jsonl", "rewards": ["exact_match"]}}},
}
RunToy = Callable[..., rollick.RunResult]


def make_sized_recipe(has_gpu: bool = False, **overrides: Any) -> rollick.Recipe:
    return parse_recipe(add_default_sizes({**GIVEN, **overrides}, has_gpu=has_gpu))


def count_tokens(recipe: rollick.Recipe) -> int:
    """The most tokens that a run samples, if no group is dropped."""
    rollout = rl_recipe(recipe).rollout
    samples = recipe.run.steps * rollout.groups_per_step * rollout.group_size
    return samples * recipe.max_new_tokens


def test_on_a_cpu_a_run_is_small_and_has_a_time_limit() -> None:
    recipe = make_sized_recipe()
    # 135 million parameters: 8 floating-point operations for each of a token's weights.
    operations = 8 * 135e6 * count_tokens(recipe)
    assert operations / 100e9 < 300  # On 2 cores with 50 gigaflops each.
    assert recipe.run.max_minutes == 5
    assert (recipe.devices.policy, recipe.devices.generators) == ("cpu", "cpu")


def test_on_a_gpu_the_first_one_is_used_with_the_sizes_of_the_schema() -> None:
    recipe = make_sized_recipe(has_gpu=True)
    assert (recipe.devices.policy, recipe.devices.generators) == ("0", "0")
    assert recipe.model_copy(update={"devices": parse_recipe(GIVEN).devices}) == parse_recipe(GIVEN)


def test_explicit_settings_are_kept() -> None:
    overrides = {
        "run": {"steps": 7},
        "rollout": {"group_size": 3},
        "sampling": {"max_tokens": 500},
        "train": {"optimizer": {"lr": 0.5}},
    }
    recipe = rl_recipe(make_sized_recipe(**overrides))
    assert (recipe.run.steps, recipe.run.max_minutes) == (7, 0)
    assert (recipe.rollout.group_size, recipe.max_new_tokens) == (3, 500)
    assert recipe.train.optimizer.lr == 0.5
    assert make_sized_recipe(has_gpu=True, devices={"policy": "cpu"}) == make_sized_recipe(
        devices={"policy": "cpu"}
    )
    assert count_tokens(make_sized_recipe(devices={"policy": 1, "generators": 1})) == count_tokens(
        make_sized_recipe(has_gpu=True)
    )


def test_adapters_keep_the_learning_rate_of_the_schema() -> None:
    lora = make_sized_recipe(train={"lora": {}}).train
    assert lora.optimizer == parse_recipe({**GIVEN, "train": {"lora": {}}}).train.optimizer
    assert make_sized_recipe().train.peak_lr > parse_recipe(GIVEN).train.peak_lr


def test_train_writes_the_sizes_that_it_chose_into_the_run(
    tiny_folder: Path, tmp_path: Path
) -> None:
    settings = {"cluster__backend": "inline", "observe": {"sinks": [], "live": "off"}}
    result = rollick.train(
        str(tiny_folder),
        ["say a", "say b"],
        reward=lambda completion: sum(map(ord, completion)),
        **{"run__folder": str(tmp_path), "run__max_minutes": 1e-9, "devices__policy": "cpu"},
        **settings,
    )
    recipe = rl_recipe(load_recipe(result.folder / "recipe.yaml", check=False).recipe)
    default = rl_recipe(make_sized_recipe())
    assert recipe.rollout == default.rollout
    assert recipe.run.steps == default.run.steps


def test_a_run_ends_when_its_time_is_up_and_can_be_resumed(
    run_toy: RunToy, caplog: pytest.LogCaptureFixture
) -> None:
    options = ["evaluate.at_end=true", "run.max_minutes=1e-9"]
    first = run_toy(*options, name="short", steps=3)
    assert (first.step, first.interrupted) == (1, False)
    assert [entry.step for entry in first.held_out] == [1]
    assert re.search(r"ending at step 1 of 3.*by run\.max_minutes=1e-09", caplog.text)
    assert json.loads((first.folder / "waits.json").read_text())["outcome"] == "finished"
    resumed = run_toy("evaluate.at_end=true", name="short", steps=3, resume=True)
    assert (resumed.step, [entry.step for entry in resumed.held_out]) == (3, [1, 3])


SLOWS_DOWN = """
import time

calls = 0

def reward(completion):
    global calls
    calls += 1
    if calls > 16:
        time.sleep(60)
    return sum(map(ord, completion))

def rows():
    return [{"prompt": "say a"}, {"prompt": "say b"}]
"""


def test_a_step_that_takes_too_long_is_cut_while_it_samples(
    run_toy: RunToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_reward.py").write_text(SLOWS_DOWN)
    monkeypatch.syspath_prepend(tmp_path)
    domain = {"source": "slow_reward:rows", "rewards": ["slow_reward:reward"]}
    started_at = time.monotonic()
    result = run_toy(
        "run.max_minutes=0.1",
        "rollout.drop_no_signal=false",
        data={"domains": {"letters": domain}},
        rewards={"timeout_s": 100},
        steps=3,
    )
    assert time.monotonic() - started_at < 45
    assert (result.step, result.interrupted) == (1, False)
    assert result.training_score > 0
    assert find_checkpoint(result.folder).step == 1
