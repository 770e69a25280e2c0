"""The predicted memory of a run, and its metrics of predicted and measured memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollick import LoadedRecipe, RunResult
from rollick.cli import app
from rollick.cluster.devices import DeviceMap
from rollick.config.load import dump_recipe
from rollick.config.schema import Recipe, TrainConfig
from rollick.config.schema.train import ParallelConfig
from rollick.models.loading.shape import ModelShape
from rollick.pipelines.memory import (
    PhaseMemory,
    describe_memory,
    machine_bounds,
    microbatch_tokens,
    plan_memory,
    predicted_bytes,
    read_shapes,
)
from rollick.testing.batches import recipe_of
from rollick.trainer.memory_estimate import trained_footprint

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

SHAPE = ModelShape(
    layers=2, hidden=8, inner=16, heads=2, kv_heads=1, head_dim=4, vocabulary=100, tied=True
)
PARAMETERS = 100 * 8 + 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16)


def plan_bytes(recipe: Recipe) -> dict[tuple[int, str], dict[str, int]]:
    rows = plan_memory(recipe, {recipe.model.path: SHAPE})
    return {(row.host.index, row.phase): dict(row.bytes) for row in rows}


def make_recipe(**sections: Any) -> Recipe:
    """A recipe for one GPU. A micro-batch is one sample of 10 tokens, so that sizes are small."""
    sizes: dict[str, Any] = {
        "data": {"domains": {"none": {"source": "none.jsonl"}}, "max_prompt_tokens": 4},
        "sampling": {"max_tokens": 6},
        "infer": {"slots": 3, "max_length": 10},
        "devices": {"policy": "0", "generators": "0"},
    }
    train = {"tokens_per_microbatch": 1, "logprob_chunk_tokens": 5} | sections.pop("train", {})
    return recipe_of(Path("m"), **sizes, train=train, **sections)


def test_the_parameters_of_a_shape_are_counted_as_they_are(tiny_folder: Path) -> None:
    assert SHAPE.parameters == PARAMETERS
    result = ModelShape.read(str(tiny_folder))
    assert result is not None
    stored = (tiny_folder / "model.safetensors").stat().st_size / 4
    assert result.parameters == pytest.approx(stored, rel=0.02)


def test_a_mixture_counts_all_its_experts() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 100}
    config = sizes | {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    shape = ModelShape.of(config | {"intermediate_size": 99})
    assert shape is not None
    assert shape.expert_parameters == 2 * 4 * (3 * 8 * 16 + 8)
    assert ModelShape.of({"hidden_size": 8}) is None


def test_a_policy_in_bfloat16_holds_masters_moments_and_gradients() -> None:
    result = plan_bytes(make_recipe())
    weights, state = 2 * PARAMETERS, 12 * PARAMETERS
    cache = 3 * 10 * (2 * 2 * 1 * 4) * 2
    assert result[0, "generate"] == {"policy": weights + state, "generators": cache}
    layer = 2 * (4 + 4) * 8 + 2 * (8 + 4) * 2 + 4 * 16 * 2
    head = 2 * 5 * 100 * 4
    gradients, activations = 6 * PARAMETERS, 10 * 2 * layer
    training = weights + state + gradients + activations + head
    assert result[0, "train"] == {"policy": training, "generators": 0}


def test_an_engine_that_keeps_its_cache_holds_it_while_the_policy_trains() -> None:
    recipe = make_recipe()
    infer_config = recipe.infer.model_copy(update={"free_cache": False})
    result = plan_bytes(recipe.model_copy(update={"infer": infer_config}))
    assert result[0, "train"]["generators"] == result[0, "generate"]["generators"] > 0


def test_a_policy_that_sleeps_holds_its_weights_only_which_the_engine_uses() -> None:
    result = plan_bytes(make_recipe(train={"sleep": True}))
    assert result[0, "generate"]["policy"] == 2 * PARAMETERS
    assert result[0, "train"]["policy"] > 14 * PARAMETERS


def test_adapters_leave_the_model_without_state_and_the_engine_with_sums() -> None:
    result = plan_bytes(make_recipe(train={"lora": {"rank": 2, "targets": ["q_proj"]}}))
    adapters, sums = 2 * 2 * (8 + 8), 2 * 8 * 8
    assert result[0, "generate"]["policy"] == 2 * (PARAMETERS + adapters) + 12 * adapters
    assert result[0, "generate"]["generators"] == 2 * sums + 3 * 10 * 16 * 2


def test_a_reference_on_a_shared_gpu_is_awake_only_while_it_scores() -> None:
    result = plan_bytes(make_recipe(algorithm={"kl": {"coefficient": 0.1}}))
    assert result[0, "generate"]["reference"] == 0
    assert result[0, "annotate"]["reference"] == 2 * PARAMETERS + 2 * 5 * 100 * 4


def test_a_micro_batch_is_its_limit_or_a_full_batch_or_one_long_sample() -> None:
    assert microbatch_tokens(make_recipe()) == 10
    assert microbatch_tokens(make_recipe(train={"tokens_per_microbatch": 64})) == 64
    few = {"groups_per_step": 2, "group_size": 2}
    roomy = make_recipe(rollout=few, train={"tokens_per_microbatch": 64})
    assert microbatch_tokens(roomy) == 40


def test_processes_are_counted_one_by_one_and_an_inline_run_as_one() -> None:
    separate = {"policy": "cpu", "generators": "cpu:1"}
    ray, inline = (
        make_recipe().model_copy(
            update={
                "devices": recipe_of(Path("m"), devices=separate).devices,
                "cluster": recipe_of(Path("m"), cluster={"backend": backend}).cluster,
            }
        )
        for backend in ("ray", "inline")
    )
    rows = plan_memory(ray, {"m": SHAPE})
    train = [row.total for row in rows if row.phase == "train"]
    assert len(train) == 2
    assert predicted_bytes(inline, rows) >= sum(train)
    assert predicted_bytes(ray, rows) == max(row.total for row in rows)


def test_check_prints_the_memory_of_each_phase(toy: Toy, tmp_path: Path) -> None:
    loaded = toy()
    (tmp_path / "recipe.yaml").write_text(dump_recipe(loaded.recipe))
    wide = {"COLUMNS": "200"}  # No line is wrapped.
    cli_result = CliRunner().invoke(app, ["check", str(tmp_path / "recipe.yaml")], env=wide)
    assert cli_result.exit_code == 0, cli_result.output
    printed = cli_result.output[cli_result.output.index("memory  ") :].splitlines()
    assert printed[0].split() == ["memory", "phase", "GB", "of", "which,", "at", "the", "most"]
    assert [line.split("  ")[1] for line in printed[1:3]] == [
        "generate, publish, validate",
        "train",
    ]
    assert printed[4].startswith("in total  ")
    assert printed[5].startswith("machine   ")
    assert read_shapes(loaded.recipe) is not None


def test_hosts_share_a_line_only_if_all_their_phases_are_equal() -> None:
    device_map = recipe_of(Path("m"), devices={"policy": "cpu", "generators": "cpu:1-3"})
    hosts = DeviceMap.of(device_map).hosts()
    sizes = {0: (1, 2), 1: (2, 1), 2: (1, 1), 3: (1, 1)}
    rows = [
        PhaseMemory(host, phase, {"policy": size * 10**9}, least=size * 10**9)
        for host in hosts
        for phase, size in zip(("generate", "train"), sizes[host.index], strict=True)
    ]
    lines = describe_memory(rows).splitlines()[1:]
    assert [re.split(r"  +", line)[:3] for line in lines] == [
        ["host 0", "generate", "1"],
        ["host 0", "train", "2"],
        ["host 1", "generate", "2"],
        ["host 1", "train", "1"],
        ["host 2-3", "generate, train", "1"],
    ]


def test_snapshots_take_two_copies_of_masters_and_moments_from_the_controller(toy: Toy) -> None:
    ray = ("cluster.backend=ray", "devices.generators=cpu:1", "model.dtype=float32")
    recipe = toy(*ray).recipe
    shapes = read_shapes(recipe)
    assert shapes is not None
    rows = plan_memory(recipe, shapes)
    [parameters] = {shape.parameters for shape in shapes.values()}
    assert {row.snapshots for row in rows if "policy" in row.host.roles} == {2 * 12 * parameters}
    assert {row.snapshots for row in rows if "policy" not in row.host.roles} == {0}
    without = plan_memory(toy(*ray, "checkpoint.snapshot=false").recipe, shapes)
    bounds, bare = machine_bounds(rows), machine_bounds(without)
    assert bounds.least - bare.least == bounds.most - bare.most == 24 * parameters
    assert "snapshots (checkpoint.snapshot)" in describe_memory(rows)
    assert "snapshots" not in describe_memory(without)


def test_check_reports_sizes_that_are_not_known_yet(toy: Toy, tmp_path: Path) -> None:
    text = dump_recipe(toy("model.path=org/name").recipe)
    (tmp_path / "recipe.yaml").write_text(text)
    cli_result = CliRunner().invoke(app, ["check", "--recipe-only", str(tmp_path / "recipe.yaml")])
    assert "unknown until the run starts" in cli_result.output


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_a_sharded_policy_divide_its_parameters_state_and_gradients(ranks: int) -> None:
    devices = {"policy": f"0-{ranks - 1}", "generators": str(ranks)}
    train = {"strategy": "fsdp"}
    recipe = make_recipe(train=train).model_copy(
        update={"devices": recipe_of(Path("m"), train=train, devices=devices).devices}
    )
    [resting] = {
        row.bytes["policy"]
        for row in plan_memory(recipe, {"m": SHAPE})
        if row.phase == "generate" and "policy" in row.bytes
    }
    assert resting == 2 * PARAMETERS // ranks + 12 * PARAMETERS // ranks
    [least] = {
        row.least
        for row in plan_memory(recipe, {"m": SHAPE})
        if row.phase == "train" and "policy" in row.bytes
    }
    gathered = 2 * PARAMETERS  # The shape has two layers, and two are gathered at a time.
    assert least == resting + gathered + 6 * PARAMETERS // ranks


def test_the_tokens_of_a_micro_batch_are_divided_by_context_ranks() -> None:
    sizes = {"itemsize": 2, "tokens": 100, "ranks": 4}
    full, half, recomputed = (
        trained_footprint(SHAPE, TrainConfig(strategy="fsdp", parallel=parallel), **sizes)
        for parallel in (
            ParallelConfig(),
            ParallelConfig(context=2),
            ParallelConfig(recompute=True),
        )
    )
    assert half.activations == full.activations // 2
    assert recomputed.activations < full.activations


def test_the_least_that_a_run_takes_does_not_depend_on_its_lengths() -> None:
    small = make_recipe()
    large = small.model_copy(
        update={"infer": small.infer.model_copy(update={"slots": 4096, "max_length": 4096})}
    )
    shapes = {small.model.path: SHAPE}
    bounds = [
        [(row.least, row.total) for row in plan_memory(recipe, shapes)] for recipe in (small, large)
    ]
    assert [least for least, _ in bounds[0]] == [least for least, _ in bounds[1]]
    assert sum(most for _, most in bounds[0]) < sum(most for _, most in bounds[1])
    assert all(least <= most for least, most in bounds[0] + bounds[1])


def test_a_cache_on_the_cpu_holds_no_more_than_the_samples_in_flight() -> None:
    few = {"groups_per_step": 2, "group_size": 2}
    devices = recipe_of(Path("m"), devices={"policy": "cpu", "generators": "cpu"}).devices
    recipe = make_recipe(rollout=few)
    wide = recipe.infer.model_copy(update={"slots": 256, "max_length": 2048})
    recipe = recipe.model_copy(update={"devices": devices, "infer": wide})
    [row] = [row for row in plan_memory(recipe, {"m": SHAPE}) if row.phase == "generate"]
    assert row.total - row.least == 4 * 10 * SHAPE.cache_per_token * 4


def test_a_run_logs_predicted_and_measured_memory(run_toy: RunToy) -> None:
    lines = (run_toy(steps=2).folder / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["memory/predicted_gb"] > 0.001 for row in rows)
    assert all(row["memory/peak_gb"] >= 0 for row in rows)
    assert rows[0]["memory/peak_gb"] <= rows[1]["memory/peak_gb"]
