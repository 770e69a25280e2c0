"""Runs that train adapters: the policy is its own reference, resume is exact, exports load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollick import LoadedRecipe, RunResult
from rollick.cli import app
from rollick.cluster.devices import DeviceMap, describe_plan, plan_phases
from rollick.models.loading.load import silence_transformers

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

LORA = ("train.lora.rank=4", "train.optimizer.lr=2e-2", "algorithm.kl.coefficient=0.05")
NOT_REPRODUCIBLE = ("time/", "speed/", "controller/event_loop_lag", "memory/")


def read_metric_rows(result: RunResult) -> list[dict[str, float]]:
    lines = (result.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows: list[dict[str, float]] = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_REPRODUCIBLE)} for row in rows]


def read_learner_state(result: RunResult) -> dict[str, bytes]:
    newest = sorted((result.folder / "checkpoints").glob("step-*"))[-1]
    return {file.name: file.read_bytes() for file in (newest / "learner").iterdir()}


@pytest.fixture(scope="module")
def full_run(run_toy: RunToy) -> RunResult:
    return run_toy(*LORA, "run.deterministic=true", name="lora-whole", steps=3)


def test_the_policy_is_its_own_reference_and_no_second_model_is_loaded(
    toy: Toy, full_run: RunResult
) -> None:
    recipe = toy(*LORA).recipe
    assert set(DeviceMap.of(recipe).roles) == {"policy", "generators"}
    assert [(p.name, p.uses) for p in plan_phases(recipe)][1] == ("annotate", ("policy",))
    kls = [row["train/mean/kl"] for row in read_metric_rows(full_run)]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-4


def test_a_reference_may_still_have_a_device_of_its_own(run_toy: RunToy, toy: Toy) -> None:
    options = (*LORA, "devices.reference=cpu:1")
    assert "reference" in DeviceMap.of(toy(*options).recipe).roles
    assert "train/mean/kl" in read_metric_rows(run_toy(*options, steps=1))[0]


def test_a_resumed_run_equals_an_uninterrupted_one(run_toy: RunToy, full_run: RunResult) -> None:
    options = (*LORA, "run.deterministic=true")
    run_toy(*options, name="lora-halved", steps=2)
    resumed = run_toy(*options, name="lora-halved", steps=3, resume=True)
    assert read_metric_rows(resumed) == read_metric_rows(full_run)
    assert read_learner_state(resumed) == read_learner_state(full_run)


def test_both_exports_of_a_run_load_and_give_the_same_logits(
    full_run: RunResult, tmp_path: Path
) -> None:
    for option, name in ((), "merged"), (("--adapter",), "adapter"):
        arguments = ["export", str(full_run.folder), str(tmp_path / name), *option]
        cli_result = CliRunner().invoke(app, arguments)
        assert cli_result.exit_code == 0, cli_result.output
    ids = torch.arange(4, 20)[None]
    with silence_transformers(), torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=0, atol=1e-5)


def test_separate_engines_sample_what_the_policy_would(run_toy: RunToy) -> None:
    """If an engine had other weights than the learner, the log-probs of both would differ."""
    for options in ((), ("devices.generators=cpu:1", "weights.channel=host")):
        rows = read_metric_rows(run_toy(*LORA, *options, steps=3))
        assert max(row["train/max/probability_change"] for row in rows) < 1e-4
        assert rows[-1]["train/mean/kl"] > 1e-4


def test_the_plan_names_what_engines_get(toy: Toy) -> None:
    assert "except weights with merged adapters" in describe_plan(toy(*LORA).recipe)
    separate = describe_plan(toy(*LORA, "devices.generators=cpu:1").recipe)
    assert "adapters are sent at each publish" in separate


@pytest.mark.slow
def test_a_run_on_ray_publishes_adapters_through_host_memory(run_toy: RunToy) -> None:
    options = ("cluster.backend=ray", "devices.generators=cpu:1", "weights.channel=host")
    rows = read_metric_rows(run_toy(*LORA, *options, steps=3))
    assert max(row["train/max/probability_change"] for row in rows) < 1e-4
    assert rows[-1]["train/mean/kl"] > 1e-4
