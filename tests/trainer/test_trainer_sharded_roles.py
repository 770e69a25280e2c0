"""Sharded critics, references, teachers and reward models on real ranks over gloo: on every mesh,
their results are those of the model on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ranks import Ranks, own_part
from tiny_mixture import save_tiny_mixture, widen_norms

from rollick.algorithms.losses import ValueInputs, value
from rollick.algorithms.objective import Loss
from rollick.config.schema import ParallelConfig, Recipe, RlRecipe, rl_recipe
from rollick.config.schema.losses import ValueLoss
from rollick.config.schema.train import RewardModelConfig
from rollick.data.batch import Batch
from rollick.errors import ModelError
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.critic import LocalCritic
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.critic import ShardedCritic
from rollick.trainer.parallel.reward_model import ShardedRewardModel
from rollick.trainer.parallel.shard import gather_full_tensors, shard_like
from rollick.trainer.reward_model import LocalRewardModel
from rollick.trainer.strategy import LossReport, OptimReport
from rollick.types import FloatArray

LENGTHS = [7, 12, 7, 3, 9, 12, 5]
MESHES = [
    (2, {"data": 2}),
    (2, {"tensor": 2}),
    (2, {"context": 2}),
    (4, {"data": 2, "tensor": 2}),
    (4, {"tensor": 2, "context": 2}),
]
on_every_mesh = pytest.mark.parametrize(("count", "parallel"), MESHES, ids=str)

RanksFactory = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense"), hidden=64, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixture(tmp_path_factory.mktemp("mixture"), hidden=32, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def scorer(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with a score head."""
    folder = tmp_path_factory.mktemp("scorer")
    LocalRewardModel(recipe_of(dense), trainable=False).export(folder)
    return folder


def make_recipe(folder: Path, parallel: Mapping[str, Any] | None = None) -> RlRecipe:
    sharded = {} if parallel is None else {"strategy": "fsdp", "parallel": dict(parallel)}
    return rl_recipe(
        recipe_of(
            folder,
            algorithm={"preset": "ppo"},
            # A large eps: Adam turns the rounding of a gradient that is zero into a full step.
            critic={"optimizer": {"lr": 1e-2, "grad_clip": 0.05, "eps": 1e-3}},
            train={"tokens_per_microbatch": 20, **sharded},
        )
    )


def add_value_targets(batch: Batch) -> Batch:
    random = np.random.default_rng(1)
    old_N, returns_N = (random.normal(size=batch.tokens) * batch.loss_mask_N for _ in range(2))
    return replace(batch, values_N=old_N, returns_N=returns_N)


def value_loss(inputs: ValueInputs) -> Loss:
    loss = value(inputs, ValueLoss(clip=0.2))
    return Loss((inputs.weights_T * loss.loss_T).sum(), loss.sums)


class CriticOutcome(NamedTuple):
    values_N: FloatArray
    last_values_B: FloatArray
    report: LossReport
    gradients: dict[str, torch.Tensor]
    optim: OptimReport
    weights: dict[str, torch.Tensor]


def run_local_critic(recipe: RlRecipe, batch: Batch) -> CriticOutcome:
    critic = LocalCritic(recipe)
    critic.value_model.double()
    critic.value_model.set_experts_implementation("eager")
    widen_norms(critic.module)
    values = critic.values(batch)
    report = critic.forward_backward(batch, value_loss)
    named = dict(critic.module.named_parameters())
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    optim = critic.step()
    weights = {name: p.detach().clone() for name, p in named.items()}
    return CriticOutcome(*values, report, gradients, optim, weights)


def run_sharded_critic(recipe: RlRecipe, batch: Batch) -> CriticOutcome:
    critic = ShardedCritic(recipe, recipe.train.parallel, dtype=torch.float64)
    widen_norms(critic.model)
    own, rows = own_part(critic, batch)
    values = critic.values(own)
    values_N, last_B = np.zeros(batch.tokens), np.zeros(batch.rows)
    values_N[np.repeat(np.isin(np.arange(batch.rows), rows), batch.lengths_B)] = values.values_N
    last_B[rows] = values.last_values_B
    report = critic.forward_backward(own, value_loss)
    sharded = critic.sharded_optimizer
    shards = {name: sharded.gradient(name) for name in sharded.parameters}
    named = [(n, shard_like(sharded.parameters[n], g)) for n, g in shards.items() if g is not None]
    gradients = dict(gather_full_tensors(named, torch.float64))
    optim = critic.step()
    weights = dict(gather_full_tensors(sharded.parameters.items(), torch.float64))
    return CriticOutcome(values_N, last_B, report, gradients, optim, weights)


def add_over_replicas(results: list[CriticOutcome], name: str, parallel: ParallelConfig) -> Any:
    """Sum the results of the replicas, of which each has its own rows."""
    return sum(getattr(result, name) for result in results[:: parallel.ranks_per_replica])


def assert_equal_critics(
    results: list[CriticOutcome], expected: CriticOutcome, parallel: ParallelConfig
) -> None:
    for name in ("values_N", "last_values_B"):
        actual = add_over_replicas(results, name, parallel)
        np.testing.assert_allclose(actual, getattr(expected, name), rtol=0, atol=1e-6)
    for result in results:
        assert result.report.tokens == expected.report.tokens
        assert result.report.loss == pytest.approx(expected.report.loss, rel=1e-10)
        assert result.report.sums == pytest.approx(expected.report.sums, rel=1e-10)
        assert result.optim.grad_norm == pytest.approx(expected.optim.grad_norm, rel=1e-9)
        for name in ("gradients", "weights"):
            actual, wanted = getattr(result, name), getattr(expected, name)
            assert actual.keys() == wanted.keys()
            for parameter, tensor in wanted.items():
                torch.testing.assert_close(
                    actual[parameter],
                    tensor,
                    rtol=1e-8,
                    atol=1e-10,
                    msg=lambda text, at=f"{name} of {parameter}": f"{at}: {text}",
                )


@on_every_mesh
def test_a_sharded_critic_has_the_values_gradient_and_update_of_one_device(
    ranks: RanksFactory, dense: Path, count: int, parallel: dict[str, int]
) -> None:
    batch = add_value_targets(random_batch(LENGTHS))
    expected = run_local_critic(make_recipe(dense), batch)
    recipe = make_recipe(dense, parallel)
    results = ranks(count).run(run_sharded_critic, recipe, batch)
    assert_equal_critics(results, expected, recipe.train.parallel)


@pytest.mark.parametrize("parallel", [{"expert": 2}, {"tensor": 2}], ids=str)
def test_a_critic_may_be_a_mixture_of_experts(
    ranks: RanksFactory, mixture: Path, parallel: dict[str, int]
) -> None:
    batch = add_value_targets(random_batch(LENGTHS))
    expected = run_local_critic(make_recipe(mixture), batch)
    recipe = make_recipe(mixture, parallel)
    results = ranks(2).run(run_sharded_critic, recipe, batch)
    assert_equal_critics(results, expected, recipe.train.parallel)


def train_critic(recipe: RlRecipe, loaded: Path | None, saved: Path | None) -> float:
    """Load a critic, take a step and save it. Returns the loss of another batch."""
    critic = ShardedCritic(recipe, recipe.train.parallel)
    if loaded is not None:
        critic.load(loaded)
    own, _ = own_part(critic, add_value_targets(random_batch(LENGTHS)))
    critic.forward_backward(own, value_loss)
    assert not critic.step().skipped
    if saved is not None:
        critic.save(saved)
    held_out, _ = own_part(critic, add_value_targets(random_batch(LENGTHS, seed=9)))
    return critic.forward_backward(held_out, value_loss).loss


def test_a_critic_is_saved_on_one_layout_and_loaded_on_another(
    ranks: RanksFactory, dense: Path, tmp_path: Path
) -> None:
    first, second = make_recipe(dense, {"data": 2, "tensor": 2}), make_recipe(dense, {"context": 2})
    ranks(4).run(train_critic, first, None, tmp_path / "critic")
    expected = ranks(4).run(train_critic, first, tmp_path / "critic", None)
    actual = ranks(2).run(train_critic, second, tmp_path / "critic", None)
    assert actual == pytest.approx([expected[0]] * 2, rel=1e-4)


class Scores(NamedTuple):
    logprobs_N: FloatArray
    top_logprobs_NK: FloatArray


def run_local_scorer(recipe: Recipe, batch: Batch, vocabulary: int) -> Scores:
    model = LocalStrategy(recipe, trainable=False, vocabulary=vocabulary)
    return Scores(model.logprobs(batch), model.top_logprobs(batch, k=3).logprobs_NK)


def run_sharded_scorer(recipe: Recipe, batch: Batch, vocabulary: int) -> tuple[Scores, list[int]]:
    model = FsdpStrategy(recipe, trainable=False, vocabulary=vocabulary)
    own, rows = own_part(model, batch)
    return Scores(model.logprobs(own), model.top_logprobs(own, k=3).logprobs_NK), rows


@on_every_mesh
def test_a_sharded_scorer_has_the_log_probs_of_one_device(
    ranks: RanksFactory, dense: Path, count: int, parallel: dict[str, int]
) -> None:
    batch, vocabulary = random_batch(LENGTHS, vocabulary=40), 45
    expected = run_local_scorer(make_recipe(dense), batch, vocabulary)
    recipe = make_recipe(dense, parallel)
    for scores, rows in ranks(count).run(run_sharded_scorer, recipe, batch, vocabulary):
        own_N = np.repeat(np.isin(np.arange(batch.rows), rows), batch.lengths_B)
        for actual, wanted in zip(scores, expected, strict=True):
            np.testing.assert_allclose(actual, wanted[own_N], atol=2e-6)


def describe_frozen(recipe: Recipe) -> tuple[set[torch.dtype], str]:
    """The dtypes of a frozen model's parameters, and the error of its training."""
    model = FsdpStrategy(recipe, trainable=False)
    dtypes = {parameter.dtype for parameter in model.model.parameters()}
    assert not any(parameter.requires_grad for parameter in model.model.parameters())
    with pytest.raises(ModelError) as caught:
        model.step()
    return dtypes, caught.value.message


def test_a_frozen_model_has_no_masters_and_cannot_be_trained(
    ranks: RanksFactory, dense: Path
) -> None:
    recipe = make_recipe(dense, {"data": 2})
    model = recipe.model.model_copy(update={"dtype": "bfloat16"})
    recipe = recipe.model_copy(update={"model": model})
    for dtypes, message in ranks(2).run(describe_frozen, recipe):
        assert dtypes == {torch.bfloat16}
        assert "frozen" in message


def run_sharded_reward_model(
    recipe: Recipe, model: RewardModelConfig, batch: Batch
) -> tuple[FloatArray, list[int]]:
    scorer = ShardedRewardModel(recipe, model, recipe.train.parallel)
    own, rows = own_part(scorer, batch)
    return scorer.scores(own), rows


@on_every_mesh
def test_a_sharded_reward_model_has_the_scores_of_one_device(
    ranks: RanksFactory, dense: Path, scorer: Path, count: int, parallel: dict[str, int]
) -> None:
    batch, model = random_batch(LENGTHS), RewardModelConfig(path=str(scorer))
    expected = LocalRewardModel(recipe_of(dense), model, trainable=False).scores(batch)
    recipe = make_recipe(dense, parallel)
    for scores_B, rows in ranks(count).run(run_sharded_reward_model, recipe, model, batch):
        np.testing.assert_allclose(scores_B, expected[rows], atol=1e-5)


def build_reward_model(recipe: Recipe, model: RewardModelConfig) -> str:
    try:
        ShardedRewardModel(recipe, model, recipe.train.parallel)
    except ModelError as error:
        return error.message
    return ""


def test_every_rank_refuses_a_reward_model_without_a_score_head(
    ranks: RanksFactory, dense: Path
) -> None:
    model, recipe = RewardModelConfig(path=str(dense)), make_recipe(dense, {"data": 2})
    for message in ranks(2).run(build_reward_model, recipe, model):
        assert "has no scoring head" in message
