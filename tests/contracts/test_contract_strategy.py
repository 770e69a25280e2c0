"""What every TrainStrategy promises. A new strategy joins by one entry in STRATEGIES."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.losses import PpoLoss
from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.models.load import fingerprint
from rollick.testing.batches import random_batch, recipe_of, weighed
from rollick.testing.tiny import save_tiny
from rollick.train.local import LocalStrategy
from rollick.train.strategy import TrainStrategy

STRATEGIES: dict[str, Callable[[Recipe], TrainStrategy]] = {"local": LocalStrategy}

LENGTHS = [5, 9, 5, 3]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)
    return recipe_of(folder, train={"optimizer": {"lr": 1e-2}})


@pytest.fixture(params=STRATEGIES)
def build(request: pytest.FixtureRequest, recipe: Recipe) -> Iterator[Callable[[], TrainStrategy]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda: STRATEGIES[request.param](recipe)
    torch.set_num_threads(before)


def loss(inputs: LossInputs) -> Loss:
    return weighed(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def train(strategy: TrainStrategy, batch: Batch) -> None:
    strategy.forward_backward(batch, loss)
    assert not strategy.step().skipped


def test_log_probs_are_those_of_plain_transformers(
    build: Callable[[], TrainStrategy], recipe: Recipe
):
    batch = random_batch(LENGTHS)
    plain = AutoModelForCausalLM.from_pretrained(recipe.model.path)
    expected = np.zeros(batch.tokens, np.float32)
    for b, start in enumerate(batch.offsets_B1[:-1]):
        cut = slice(start, start + batch.lengths_B[b])
        ids = torch.as_tensor(batch.token_ids_N[cut]).long()
        with torch.no_grad():
            every = (plain(ids[None]).logits[0] / float(batch.temperature_B[b])).log_softmax(-1)
        expected[cut][1:] = every[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    result = build().logprobs(batch)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result[batch.loss_mask_N], expected[batch.loss_mask_N], atol=1e-5)


def test_any_split_of_a_batch_makes_the_same_step(build: Callable[[], TrainStrategy]):
    batch = random_batch(LENGTHS)
    whole, parts = build(), build()
    train(whole, batch)
    parts.forward_backward(batch.take([2, 0]), loss)
    train(parts, batch.take([3, 1]))
    for (name, ours), (_, theirs) in zip(whole.weights(), parts.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_a_gradient_that_is_not_finite_is_skipped(build: Callable[[], TrainStrategy]):
    strategy = build()
    before = fingerprint(strategy.weights())
    strategy.forward_backward(
        random_batch(LENGTHS), lambda inputs: Loss(inputs.logprobs_T.sum() * float("nan"))
    )
    assert strategy.step().skipped
    assert fingerprint(strategy.weights()) == before


def test_the_weights_are_live_and_stay_where_they_are(build: Callable[[], TrainStrategy]):
    strategy = build()
    held = dict(strategy.weights())
    before = {name: value.clone() for name, value in held.items()}
    train(strategy, random_batch(LENGTHS))
    assert fingerprint(held.items()) == fingerprint(strategy.weights())
    assert fingerprint(held.items()) != fingerprint(before.items())


def test_a_restored_learner_goes_on_bit_for_bit(build: Callable[[], TrainStrategy], tmp_path: Path):
    first = build()
    train(first, random_batch(LENGTHS, seed=0))
    train(first, random_batch(LENGTHS, seed=1))
    first.save(tmp_path / "state")
    train(first, random_batch(LENGTHS, seed=2))

    second = build()
    train(second, random_batch(LENGTHS, seed=7))
    second.load(tmp_path / "state")
    train(second, random_batch(LENGTHS, seed=2))
    assert fingerprint(second.weights()) == fingerprint(first.weights())


def test_an_export_is_a_folder_that_transformers_loads(
    build: Callable[[], TrainStrategy], tmp_path: Path
):
    strategy = build()
    train(strategy, random_batch(LENGTHS))
    strategy.export(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert fingerprint(plain.named_parameters()) == fingerprint(strategy.weights())


def test_a_learner_that_slept_gives_the_same_log_probs(build: Callable[[], TrainStrategy]):
    strategy = build()
    batch = random_batch(LENGTHS)
    train(strategy, batch)
    before = strategy.logprobs(batch)
    strategy.sleep()
    strategy.wake()
    assert np.array_equal(strategy.logprobs(batch), before)
