"""Contract tests that every TrainStrategy must pass. To add a strategy, add it to STRATEGIES.

A sharded strategy runs on real ranks: `ShardedStrategy` calls all of them, as a worker group does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks, all_logprobs, own_part
from tiny_mixture import save_tiny_mixture
from transformers import AutoModelForCausalLM

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema import Recipe
from rollick.config.schema.losses import PpoLoss
from rollick.data.batch import Batch
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.strategy import TrainStrategy

SHARDED: dict[str, tuple[int, dict[str, int]]] = {
    "fsdp on 1": (1, {}),
    "fsdp on 2": (2, {"data": 2}),
    "fsdp on 4": (4, {"data": 4}),
    "fsdp data x tensor": (4, {"data": 2, "tensor": 2}),
    "fsdp data x context": (4, {"data": 2, "context": 2}),
    "fsdp data x expert": (4, {"data": 2, "expert": 2}),
}
SLOW = {"fsdp on 4", "fsdp data x tensor", "fsdp data x context", "fsdp data x expert"}
STRATEGIES = [
    "local",
    *(pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SHARDED),
]

LENGTHS = [5, 9, 5, 3]
OPTIMIZER: dict[str, Any] = {"optimizer": {"lr": 1e-2, "eps": 1e-4}}
"""eps is large, so that Adam does not amplify rounding errors to full steps. The router's gradients
for experts that were not chosen consist of rounding errors."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense"), hidden=32, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixture(tmp_path_factory.mktemp("mixture"), hidden=32, heads=8, kv_heads=4)


@pytest.fixture(params=STRATEGIES)
def strategy_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(strategy_name: str, dense: Path, mixture: Path) -> Path:
    """The model: a mixture of experts for expert parallelism, a dense model otherwise."""
    return mixture if "expert" in strategy_name else dense


@pytest.fixture
def strategy_factory(
    strategy_name: str, folder: Path, ranks: Callable[[int], Ranks]
) -> Iterator[Callable[[], TrainStrategy]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if strategy_name == "local":
        recipe = recipe_of(folder, train=OPTIMIZER)
        yield lambda: LocalStrategy(recipe)
    else:
        number, parallel = SHARDED[strategy_name]
        train = {**OPTIMIZER, "strategy": "fsdp", "parallel": parallel}
        sharded_recipe = recipe_of(folder, train=train)
        yield lambda: ShardedStrategy(ranks(number), sharded_recipe)
    torch.set_num_threads(before)


class ShardedStrategy:
    """A sharded strategy. Every call runs on all ranks, which must return equal results."""

    numbers = count()
    built: dict[int, FsdpStrategy] = {}  # noqa: RUF012, in the process of a rank

    def __init__(self, ranks: Ranks, recipe: Recipe) -> None:
        self.ranks = ranks
        self.number = next(self.numbers)
        ranks.run(_build_strategy, self.number, recipe)

    @property
    def module(self) -> None:
        return None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            rank_results = self.ranks.run(_call_method, self.number, method, args, options)
            assert all(str(rank_result) == str(rank_results[0]) for rank_result in rank_results)
            return rank_results[0]

        return call


def _build_strategy(number: int, recipe: Recipe) -> None:
    ShardedStrategy.built[number] = FsdpStrategy(recipe)


def _call_method(number: int, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    strategy = ShardedStrategy.built[number]
    if method == "logprobs":
        return all_logprobs(strategy, *args)
    args = tuple(own_part(strategy, a)[0] if isinstance(a, Batch) else a for a in args)
    rank_result = getattr(strategy, method)(*args, **options)
    return list(rank_result) if method == "weights" else rank_result


def compute_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def compute_nan_loss(inputs: LossInputs) -> Loss:
    return Loss(inputs.logprobs_T.sum() * float("nan"))


def train(strategy: TrainStrategy, batch: Batch) -> None:
    strategy.forward_backward(batch, compute_loss)
    assert not strategy.step().skipped


def test_log_probs_are_those_of_plain_transformers(
    strategy_factory: Callable[[], TrainStrategy], folder: Path
):
    batch = random_batch(LENGTHS)
    reference_model = AutoModelForCausalLM.from_pretrained(folder)
    expected = np.zeros(batch.tokens, np.float32)
    for b, start in enumerate(batch.offsets_B1[:-1]):
        span = slice(start, start + batch.lengths_B[b])
        ids = torch.as_tensor(batch.token_ids_N[span]).long()
        with torch.no_grad():
            vocabulary_logprobs = (
                reference_model(ids[None]).logits[0] / float(batch.temperature_B[b])
            ).log_softmax(-1)
        expected[span][1:] = vocabulary_logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    result = strategy_factory().logprobs(batch)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result[batch.loss_mask_N], expected[batch.loss_mask_N], atol=1e-5)


def test_any_split_of_a_batch_makes_the_same_step(strategy_factory: Callable[[], TrainStrategy]):
    batch = random_batch(LENGTHS)
    full, split = strategy_factory(), strategy_factory()
    train(full, batch)
    split.forward_backward(batch.take([2, 0]), compute_loss)
    train(split, batch.take([3, 1]))
    for (name, full_weight), (_, split_weight) in zip(full.weights(), split.weights(), strict=True):
        torch.testing.assert_close(full_weight, split_weight, rtol=1e-3, atol=1e-4, msg=name)


def test_a_gradient_that_is_not_finite_is_skipped(strategy_factory: Callable[[], TrainStrategy]):
    strategy = strategy_factory()
    before = fingerprint(strategy.weights())
    strategy.forward_backward(random_batch(LENGTHS), compute_nan_loss)
    assert strategy.step().skipped
    assert fingerprint(strategy.weights()) == before


def test_the_weights_of_a_full_model_are_shared_and_keep_their_addresses(dense: Path):
    """An engine in the same process shares them. A sharded learner has no module to share."""
    strategy = LocalStrategy(recipe_of(dense, train=OPTIMIZER))
    shared_weights = dict(strategy.weights())
    before = {name: value.clone() for name, value in shared_weights.items()}
    train(strategy, random_batch(LENGTHS))
    assert fingerprint(shared_weights.items()) == fingerprint(strategy.weights())
    assert fingerprint(shared_weights.items()) != fingerprint(before.items())


def test_a_restored_learner_continues_bit_for_bit(
    strategy_factory: Callable[[], TrainStrategy], tmp_path: Path
):
    first = strategy_factory()
    train(first, random_batch(LENGTHS, seed=0))
    train(first, random_batch(LENGTHS, seed=1))
    first.save(tmp_path / "state")
    train(first, random_batch(LENGTHS, seed=2))

    second = strategy_factory()
    train(second, random_batch(LENGTHS, seed=7))
    second.load(tmp_path / "state")
    train(second, random_batch(LENGTHS, seed=2))
    assert fingerprint(second.weights()) == fingerprint(first.weights())


def test_an_export_is_a_folder_that_transformers_loads(
    strategy_factory: Callable[[], TrainStrategy], tmp_path: Path
):
    strategy = strategy_factory()
    train(strategy, random_batch(LENGTHS))
    strategy.export(tmp_path / "out")
    reference_model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert fingerprint(reference_model.named_parameters()) == fingerprint(strategy.weights())


def test_a_learner_that_slept_gives_the_same_log_probs(
    strategy_factory: Callable[[], TrainStrategy],
):
    strategy = strategy_factory()
    batch = random_batch(LENGTHS)
    train(strategy, batch)
    before = strategy.logprobs(batch)
    for keep_parameters in (False, True):
        strategy.sleep(keep_parameters=keep_parameters)
        strategy.wake()
        assert np.array_equal(strategy.logprobs(batch), before)
