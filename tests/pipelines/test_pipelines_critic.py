"""Runs with a critic and runs with a teacher, over a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollick import LoadedRecipe, RunResult, run_recipe
from rollick.cli import app
from rollick.cluster.devices import DeviceMap, PhasePlan, RoleRank, plan_phases, plan_residency
from rollick.config.load import dump_recipe
from rollick.errors import ConfigError, RollickError
from rollick.models.loading.load import silence_transformers
from rollick.observe.metric_table import is_documented
from rollick.pipelines.state import RunObjects
from rollick.testing.tiny import save_tiny

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

PPO = ("algorithm=ppo", "critic.optimizer.lr=3e-3")
TRAINED_ROLES = ("learner", "critic")
NOT_REPRODUCIBLE = ("time/", "speed/", "controller/event_loop_lag", "memory/")
LETTERS = "rollick.testing.toys:letter_rows"
SAYS = "rollick.testing.toys:says_letter"


def read_metric_rows(result: RunResult) -> list[dict[str, float]]:
    """The metrics of each step, without those that depend on time and machine."""
    lines = (result.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows: list[dict[str, float]] = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPRODUCIBLE)} for row in rows]


def find_newest(result: RunResult) -> Path:
    return sorted((result.folder / "checkpoints").glob("step-*"))[-1]


def read_state(result: RunResult, name: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (find_newest(result) / name).iterdir()}


def test_the_critic_is_trained_in_each_step_and_reports_its_metrics(run_toy: RunToy) -> None:
    result = run_toy(*PPO, "train.minibatches=2", steps=3)
    rows = read_metric_rows(result)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["version"] for row in rows] == [1, 2, 3]
    critic_metrics = {
        "critic/loss",
        "critic/explained_variance",
        "critic/lr",
        "critic/mean/value_error",
    }
    assert all(critic_metrics <= row.keys() for row in rows)
    assert all(is_documented(name) for row in rows for name in row.keys() - {"step"})
    assert [row["critic/tokens"] for row in rows] == [row["train/tokens"] for row in rows]


def test_a_resumed_run_with_a_critic_equals_an_uninterrupted_one(run_toy: RunToy) -> None:
    options = (*PPO, "run.deterministic=true", "train.minibatches=2", "critic.warmup_steps=1")
    full_run = run_toy(*options, name="critic-whole", steps=6)
    run_toy(*options, name="critic-halved", steps=3)
    resumed = run_toy(*options, name="critic-halved", steps=6, resume=True)
    for name in TRAINED_ROLES:
        assert read_state(full_run, name) == read_state(resumed, name)
    assert read_metric_rows(full_run) == read_metric_rows(resumed)


def test_in_the_warm_up_only_the_critic_is_trained_and_nothing_is_published(
    run_toy: RunToy,
) -> None:
    result = run_toy(*PPO, "critic.warmup_steps=2", "checkpoint.every=1", steps=3)
    rows = read_metric_rows(result)
    assert [row["version"] for row in rows] == [0, 0, 1]
    assert ["train/loss" in row for row in rows] == [False, False, True]
    assert all("critic/loss" in row for row in rows)
    steps = [
        [
            json.loads((folder / name / f"{name}.json").read_text())["steps"]
            for name in TRAINED_ROLES
        ]
        for folder in sorted((result.folder / "checkpoints").glob("step-*"))
    ]
    assert steps[-2:] == [[0, 2], [1, 3]]


def test_a_critic_may_have_its_own_device_and_its_own_model(
    run_toy: RunToy, tmp_path: Path
) -> None:
    small = save_tiny(tmp_path / "small", hidden=16, layers=1)
    result = run_toy(*PPO, f"critic.model.path={small}", "devices.critic=cpu:1", steps=1)
    assert "critic/loss" in read_metric_rows(result)[0]


def test_in_a_mixture_the_critic_learns_from_its_own_domains(run_toy: RunToy) -> None:
    domains = {
        "judged": {"source": LETTERS, "rewards": [SAYS], "algorithm": "ppo"},
        "compared": {"source": LETTERS, "rewards": [SAYS], "algorithm": "grpo"},
    }
    # The untrained model hardly ever scores: all groups with the algorithm grpo would be dropped.
    domains["compared"]["filters"] = {"drop_no_signal": False}
    rows = read_metric_rows(run_toy(data={"domains": domains}, steps=3))
    learned = sum(row.get("critic/tokens", 0) for row in rows)
    assert 0 < learned < sum(row["train/tokens"] for row in rows)


def test_returns_too_large_for_a_gradient_stop_the_run(toy: Toy) -> None:
    def huge(completion: str) -> float:
        return 1e30 * (completion < "m")

    data = {"domains": {"letters": {"source": LETTERS, "rewards": ["object:reward"]}}}
    loaded = toy(*PPO, "train.max_skipped_steps=2", data=data, steps=4)
    with pytest.raises(RollickError, match=r"2 steps in a row .* in the critic") as error:
        run_recipe(loaded, objects=RunObjects(rewards={"reward": huge}))
    assert "critic.optimizer.lr" in error.value.fix


def test_a_checkpoint_without_a_critic_cannot_be_resumed_with_one(run_toy: RunToy) -> None:
    run_toy(name="begun-without", steps=1)
    with pytest.raises(RollickError, match="the critic's state in"):
        run_toy(*PPO, name="begun-without", steps=2, resume=True)


def test_check_prints_the_critic_in_its_plan(toy: Toy, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(toy(*PPO).recipe), encoding="utf-8")
    cli_result = CliRunner().invoke(app, ["check", str(file)])
    assert cli_result.exit_code == 0, cli_result.output
    lines = cli_result.output.splitlines()
    assert any("cpu" in line and "critic 0" in line for line in lines)
    assert any(line.split()[:2] == ["train_critic", "critic"] for line in lines)


def plan_by_phase(loaded: LoadedRecipe) -> dict[str, PhasePlan]:
    recipe = loaded.recipe
    plans = plan_residency(DeviceMap.of(recipe), plan_phases(recipe))
    return {plan.phase.name: plan for plan in plans}


def test_on_a_shared_gpu_critic_and_teacher_sleep_outside_their_phases(
    toy: Toy, tiny_folder: Path
) -> None:
    gpu = ("devices.policy=0", "devices.generators=0")
    critic, teacher = RoleRank("critic", 0), RoleRank("teacher", 0)
    plans = plan_by_phase(toy(*PPO, *gpu))
    assert {name for name, plan in plans.items() if critic not in plan.sleeps} == {
        "annotate",
        "train_critic",
    }
    assert critic in plans["train"].sleeps
    teacher_plans = plan_by_phase(toy(*OPD, *gpu, f"teacher.path={tiny_folder}"))
    assert {name for name, plan in teacher_plans.items() if teacher not in plan.sleeps} == {
        "annotate"
    }
    separate = plan_by_phase(toy(*PPO, *gpu, "devices.critic=1"))
    assert all(critic not in plan.sleeps for plan in separate.values())


OPD = ("algorithm.advantage=opd", "algorithm.loss=reinforce", "rollout.drop_no_signal=false")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model with the same tokens, whose logits are ten times larger."""
    folder = save_tiny(tmp_path_factory.mktemp("teacher"), seed=7, hidden=32)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad(), silence_transformers():
        model.get_input_embeddings().weight.mul_(10)
        model.save_pretrained(folder)
    return folder


def test_a_student_approaches_its_teacher_without_a_reward(toy: Toy, teacher: Path) -> None:
    loaded = toy(
        *OPD,
        f"teacher.path={teacher}",
        "run.deterministic=true",
        "rollout.groups_per_step=8",
        "rollout.group_size=8",
        "train.optimizer.lr=1e-2",
        data={"domains": {"letters": {"source": LETTERS}}},
        steps=16,
    )
    rows = read_metric_rows(run_recipe(loaded))
    kl = [row["train/mean/teacher_kl"] for row in rows]
    assert sum(kl[:3]) / 3 > 1.5
    assert sum(kl[-3:]) / 3 < 0.5 * sum(kl[:3]) / 3
    assert all(row["score/mean"] == 0 for row in rows)
    assert all(is_documented(name) for row in rows for name in row.keys() - {"step"})


def test_a_teacher_with_other_tokens_stops_the_run_at_its_start(
    run_toy: RunToy, tmp_path: Path
) -> None:
    other = save_tiny(tmp_path / "other", alphabet="abcdefgh says")
    with pytest.raises(ConfigError, match="has other tokens than the policy"):
        run_toy(*OPD, f"teacher.path={other}", steps=1)
