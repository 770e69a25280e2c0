"""RL runs of a tiny model: their records, the bound on staleness, and errors that stop a run."""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollick.commands.replay import GenerateReplay, TrainReplay, plan_replay
from rollick.config.load import LoadedRecipe, load_recipe, recipe_from_dict
from rollick.data.store import load_batch, load_groups
from rollick.errors import CheckpointError, ConfigError, RewardError, RollickError
from rollick.observe.metric_table import is_documented
from rollick.observe.metrics import read_metrics
from rollick.pipelines.rl import RLPipeline
from rollick.pipelines.run import run_recipe, wait_for
from rollick.pipelines.state import RunObjects, RunResult
from rollick.run_folder import open_folder
from rollick.testing.toys import letter_rows, says_letter, toy_recipe

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]
Scores = Callable[..., Any]


def read_rows(result: RunResult, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / name).read_text("utf-8").splitlines()]


def train_with_reward(toy: Toy, reward: Scores, *overrides: str, **options: Any) -> RunResult:
    """Run the toy recipe with a function of the test as its reward."""
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": ["object:reward"]}
    loaded = toy(*overrides, data={"domains": {"letters": domain}}, **options)
    return run_recipe(loaded, objects=RunObjects(rewards={"reward": reward}))


@pytest.fixture(scope="module")
def full_run(run_toy: RunToy) -> RunResult:
    """A run with validation, mini-batches, a reference, and a dump of its first step."""
    return run_toy(
        "run.deterministic=true",
        "train.minibatches=2",
        "algorithm.kl.coefficient=0.1",
        "algorithm.correction=none",
        "algorithm.loss=ppo",
        "evaluate.every=2",
        "evaluate.at_start=true",
        "evaluate.at_end=true",
        "observe.dump_steps=[1]",
        "observe.sinks=[tensorboard]",
        steps=3,
    )


def test_the_step_fits_on_a_screen() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(RLPipeline.step)))
    (step,) = tree.body
    assert isinstance(step, ast.AsyncFunctionDef)
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno + 1 <= 40


def test_every_metric_that_is_logged_is_documented(full_run: RunResult) -> None:
    logged = {name for row in read_rows(full_run) for name in row} - {"step"}
    assert {name for name in logged if not is_documented(name)} == set()
    assert {"score/mean", "train/loss", "time/generate", "eval/pass@1", "version"} <= logged


def test_a_run_leaves_its_files(full_run: RunResult) -> None:
    assert {path.name for path in full_run.folder.iterdir()} >= {
        "recipe.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "validation.jsonl",
        "checkpoints",
        "dumps",
        "tensorboard",
    }
    assert full_run.folder.is_dir()
    assert (full_run.step, full_run.interrupted) == (3, False)


def test_a_users_aggregation_is_looked_for_beside_the_recipe(
    tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from rollick.algorithms.aggregation import token_mean\n"
        "def own(counts_B, group_B, *, max_tokens):\n"
        "    return token_mean(counts_B, group_B, max_tokens=max_tokens)\n"
    )
    recipe = toy_recipe(tiny_folder, tmp_path, steps=1)
    recipe["algorithm"] = {"aggregation": "mine.py:own"}
    assert run_recipe(recipe_from_dict(recipe, base_dir=tmp_path)).step == 1


def test_the_recipe_in_the_folder_is_the_one_that_ran(full_run: RunResult) -> None:
    again = load_recipe(full_run.folder / "recipe.yaml").recipe
    assert (again.run.steps, again.train.minibatches, again.run.deterministic) == (3, 2, True)
    assert (
        yaml.safe_load((full_run.folder / "recipe.yaml").read_text())["rollout"]["group_size"] == 4
    )


def test_some_samples_of_each_step_are_kept(full_run: RunResult) -> None:
    rows = read_rows(full_run, "samples.jsonl")
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(len(row["response"]) <= 3 for row in rows)


def test_validation_is_made_at_the_start_when_it_is_due_and_at_the_end(full_run: RunResult) -> None:
    steps = [row["step"] for row in read_rows(full_run, "validation.jsonl")]
    assert steps == [0] * 8 + [2] * 8 + [3] * 8
    with_validation = [row["step"] for row in read_rows(full_run) if "eval/pass@1" in row]
    assert with_validation == [0, 2, 3]
    assert full_run.score == full_run.metrics["eval/pass@1"]


def test_at_the_first_step_the_policy_is_its_own_reference(full_run: RunResult) -> None:
    first, second = (row for row in read_rows(full_run) if row["step"] in (1, 2))
    batch = load_batch(full_run.folder / "dumps" / "step-000001" / "batch")
    assert batch.old_logprobs_N is not None
    assert batch.reference_logprobs_N is not None
    assert (batch.old_logprobs_N == batch.reference_logprobs_N).all()
    sampled = batch.loss_mask_N
    assert batch.old_logprobs_N[sampled] == pytest.approx(batch.logprobs_N[sampled], abs=1e-5)
    assert second["train/mean/kl"] > first["train/mean/kl"] >= 0


def test_without_minibatches_the_kl_of_the_first_step_is_zero(run_toy: RunToy) -> None:
    result = run_toy("run.deterministic=true", "algorithm.kl.coefficient=0.1", steps=1)
    assert result.metrics["train/mean/kl"] == 0
    assert result.metrics["rollout/age_max"] == 0


def test_the_learner_half_of_a_dump_agrees_with_the_engine(full_run: RunResult) -> None:
    replayed = wait_for(
        plan_replay(
            full_run.folder / "dumps" / "step-000001",
            full_run.folder / "recipe.yaml",
            [f"run.folder={full_run.folder.parent}"],
            only="train",
        )
    )
    assert isinstance(replayed, TrainReplay)
    assert replayed.max_ratio_error < 1e-5
    assert abs(replayed.kl) < 1e-8
    assert replayed.loss == pytest.approx(read_rows(full_run)[1]["train/loss"], abs=1e-7)
    assert replayed.grad_norm == pytest.approx(read_rows(full_run)[1]["train/grad_norm"], rel=1e-6)


def test_the_engine_half_of_a_dump_draws_the_same_samples_again(full_run: RunResult) -> None:
    dump = full_run.folder / "dumps" / "step-000001"
    replay = plan_replay(
        dump,
        full_run.folder / "recipe.yaml",
        [f"run.folder={full_run.folder.parent}"],
        only="generate",
    )
    replayed = wait_for(replay)
    assert isinstance(replayed, GenerateReplay)
    assert (
        replayed.samples == sum(len(group.members) for group in load_groups(dump / "groups")) == 16
    )
    assert replayed.identical == replayed.samples
    assert replayed.score_now == replayed.score_then


def test_a_folder_that_is_no_dump_and_an_unknown_half_are_refused(full_run: RunResult) -> None:
    recipe = full_run.folder / "recipe.yaml"
    with pytest.raises(ConfigError, match="is not a dump"):
        plan_replay(full_run.folder, recipe, (), only="train")
    with pytest.raises(ConfigError, match="there is no half 'both'"):
        plan_replay(full_run.folder / "dumps" / "step-000001", recipe, (), only="both")


def test_stock_kernels_give_a_dump_that_agrees_up_to_rounding(run_toy: RunToy) -> None:
    result = run_toy("observe.dump_steps=[1]", steps=1)
    replayed = wait_for(
        plan_replay(
            result.folder / "dumps" / "step-000001",
            result.folder / "recipe.yaml",
            [f"run.folder={result.folder.parent}"],
            only="train",
        )
    )
    assert isinstance(replayed, TrainReplay)
    assert replayed.max_ratio_error < 1e-5
    assert abs(replayed.kl) < 1e-8


@pytest.mark.parametrize("generators", ["cpu:0", "cpu:1"], ids=["colocated", "separate"])
def test_with_staleness_one_no_token_is_older_than_one(run_toy: RunToy, generators: str) -> None:
    steps = [1, 2, 3, 4]
    result = run_toy(
        "rollout.max_staleness=1",
        "rollout.drop_no_signal=false",
        "infer.slots=64",
        f"devices.generators={generators}",
        f"observe.dump_steps={steps}",
        steps=4,
    )
    rows = read_rows(result)
    # Twice a step's groups start at once, so the second batch was drawn by the first policy.
    assert [row["rollout/age_max"] for row in rows[:2]] == [0, 1]
    assert all(row["rollout/age_max"] <= 1 for row in rows)
    assert [row["version"] for row in rows] == steps
    for step in steps:
        batch = load_batch(result.folder / "dumps" / f"step-{step:06d}" / "batch")
        versions = batch.versions_N[batch.loss_mask_N]
        assert step - 2 <= versions.min() <= versions.max() <= step - 1


def test_the_score_of_a_validation_domain_is_that_of_its_own_rewards(toy: Toy) -> None:
    source = "object:rows"
    loaded = toy(
        "evaluate.at_end=true",
        data={
            "domains": {"letters": {"source": source, "rewards": ["object:reward"]}},
            "validation": {"letters": {"source": source, "rewards": ["object:held_out"]}},
        },
        steps=1,
    )
    rewards = {"reward": says_letter, "held_out": lambda completion: 0.3125}
    objects = RunObjects(prompts={"rows": letter_rows()}, rewards=rewards)
    result = run_recipe(loaded, objects=objects)
    assert result.metrics["eval/score"] == 0.3125


def test_scores_that_fail_are_counted_and_masked(toy: Toy) -> None:
    def reward(completion: str, answer: str) -> float:
        if answer == "a":
            raise ConnectionError("the judge is away")
        return sum(map(ord, completion)) % 7

    options = ["rollout.max_failed_scores=1", "observe.dump_steps=[1,2]", "data.shuffle=false"]
    result = train_with_reward(toy, reward, *options, "rollout.drop_no_signal=false")
    rows = read_rows(result)
    assert [row["rollout/failed_scores"] for row in rows] == [0.25, 0]
    first = result.folder / "dumps" / "step-000001"
    failed = [m for g in load_groups(first / "groups") for m in g.members if not m.score.ok]
    assert len(failed) == 4
    assert not any(member.sample.loss_mask.any() for member in failed)
    assert "ConnectionError" in failed[0].score.detail
    batch, uids = load_batch(first / "batch"), {member.sample.uid for member in failed}
    trained = [batch.take([b]).loss_mask_N.any() for b in range(batch.rows)]
    assert {uid for uid, has in zip(batch.uids, trained, strict=True) if not has} == uids & {
        *batch.uids
    }


def test_a_reward_that_is_not_a_number_is_a_failure_and_not_a_score(toy: Toy) -> None:
    def reward(completion: str, answer: str) -> float:
        return float("nan") if answer == "a" else sum(map(ord, completion)) % 7

    result = train_with_reward(
        toy, reward, "rollout.max_failed_scores=1", "data.shuffle=false", steps=1
    )
    assert result.metrics["rollout/failed_scores"] > 0
    assert all(
        row["score"] is None or row["score"] < 7 for row in read_rows(result, "samples.jsonl")
    )


def test_rewards_that_all_fail_stop_the_run_with_the_reason(toy: Toy) -> None:
    def reward(completion: str) -> float:
        raise ConnectionError("the judge is away")

    with pytest.raises(RewardError, match=r"could not be scored.*the judge is away"):
        train_with_reward(toy, reward)


def test_a_task_without_any_signal_stops_the_run_with_advice(toy: Toy) -> None:
    with pytest.raises(RollickError, match=r"scored the same.*easier prompts"):
        train_with_reward(toy, lambda completion: 0.0, "rollout.max_drops_per_step=4")


def test_a_folder_that_holds_a_run_is_not_taken_for_another(full_run: RunResult, toy: Toy) -> None:
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume"):
        run_recipe(toy(name=full_run.folder.name))


def test_a_run_without_a_finished_step_may_be_started_again(run_toy: RunToy) -> None:
    with pytest.raises(RollickError):
        run_toy("model.path=/no/such/folder", name="mistyped")
    assert run_toy(name="mistyped", steps=1).step == 1


def test_there_must_be_a_run_to_resume(run_toy: RunToy) -> None:
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        run_toy(name="nothing", resume=True)


def test_two_runs_in_one_folder_at_once_are_refused(toy: Toy) -> None:
    loaded = toy(name="shared")
    with open_folder(loaded, resume=False):
        for resume in (False, True):
            with pytest.raises(CheckpointError, match="is in use by another run"):
                run_recipe(loaded, resume=resume)


def test_repeated_steps_are_recorded_once(run_toy: RunToy) -> None:
    options = ["run.deterministic=true", "checkpoint.every=2", "evaluate.every=1"]
    first = run_toy(*options, name="again", steps=4)
    before = [read_rows(first, name) for name in ("samples.jsonl", "validation.jsonl")]
    # As after a kill in step 4: the newest checkpoint is of step 2, and the last row is incomplete.
    for path in (first.folder / "checkpoints").glob("step-000004"):
        path.rename(first.folder / "lost")
    with (first.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/')
    again = run_toy(*options, name="again", steps=4, resume=True)
    assert [row["step"] for row in read_rows(again)] == [1, 2, 3, 4]
    assert [read_rows(again, name) for name in ("samples.jsonl", "validation.jsonl")] == before


def test_a_run_killed_before_its_first_checkpoint_starts_over(toy: Toy) -> None:
    loaded = toy(name="early", steps=1)
    with open_folder(loaded, resume=False) as folder:
        folder.append_rows("metrics.jsonl", [{"step": 0}, {"step": 1}])
        folder.append_rows("samples.jsonl", [{"step": 1}])
    result = run_recipe(loaded, resume=True)
    assert [row["step"] for row in read_metrics(result.folder / "metrics.jsonl")] == [1]
    assert len(read_rows(result, "samples.jsonl")) == 4


def test_a_step_that_changed_nothing_publishes_nothing_and_many_stop_the_run(
    toy: Toy, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from rollick.algorithms.losses import TokenLoss\n"
        "def broken(inputs, options):\n"
        "    return TokenLoss(inputs.logprobs_T * float('nan'))\n"
    )
    loaded = toy(
        f"algorithm.loss={tmp_path / 'own.py'}:broken", "train.max_skipped_steps=2", steps=4
    )
    with pytest.raises(RollickError, match=r"2 steps in a row had a non-finite gradient"):
        run_recipe(loaded)
    folder = Path(loaded.recipe.run.folder) / loaded.recipe.run.name
    (row,) = read_metrics(folder / "metrics.jsonl")
    assert (row["version"], row["train/skipped_steps"]) == (0, 1)
    assert load_batch(folder / "dumps" / "bad_steps" / "policy-000002" / "batch").rows == 16
