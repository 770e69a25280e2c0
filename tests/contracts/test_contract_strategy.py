"""What every TrainStrategy promises. A new strategy joins by one entry in STRATEGIES.

A sharded strategy runs on real ranks: `OnRanks` calls all of them, as a worker group does.
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
"""eps is large, so that Adam does not blow up gradients that consist of rounding to full steps: a
router has such ones, for experts that were not chosen."""


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
    """The model: experts are divided where there are some."""
    return mixture if "expert" in strategy_name else dense


@pytest.fixture
def build(
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
        sharded = recipe_of(folder, train=train)
        yield lambda: OnRanks(ranks(number), sharded)
    torch.set_num_threads(before)


class OnRanks:
    """A sharded strategy: every call goes to all ranks, which must return the same."""

    numbers = count()
    built: dict[int, FsdpStrategy] = {}  # noqa: RUF012, in the process of a rank

    def __init__(self, ranks: Ranks, recipe: Recipe) -> None:
        self.ranks = ranks
        self.number = next(self.numbers)
        ranks.run(_build, self.number, recipe)

    @property
    def module(self) -> None:
        return None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            answers = self.ranks.run(_ask, self.number, method, args, options)
            assert all(str(answer) == str(answers[0]) for answer in answers)
            return answers[0]

        return call


def _build(number: int, recipe: Recipe) -> None:
    OnRanks.built[number] = FsdpStrategy(recipe)


def _ask(number: int, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    strategy = OnRanks.built[number]
    if method == "logprobs":
        return all_logprobs(strategy, *args)
    args = tuple(own_part(strategy, a)[0] if isinstance(a, Batch) else a for a in args)
    answer = getattr(strategy, method)(*args, **options)
    return list(answer) if method == "weights" else answer


def loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def not_a_number(inputs: LossInputs) -> Loss:
    return Loss(inputs.logprobs_T.sum() * float("nan"))


def train(strategy: TrainStrategy, batch: Batch) -> None:
    strategy.forward_backward(batch, loss)
    assert not strategy.step().skipped


def test_log_probs_are_those_of_plain_transformers(
    build: Callable[[], TrainStrategy], folder: Path
):
    batch = random_batch(LENGTHS)
    plain = AutoModelForCausalLM.from_pretrained(folder)
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
    full, parts = build(), build()
    train(full, batch)
    parts.forward_backward(batch.take([2, 0]), loss)
    train(parts, batch.take([3, 1]))
    for (name, ours), (_, theirs) in zip(full.weights(), parts.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_a_gradient_that_is_not_finite_is_skipped(build: Callable[[], TrainStrategy]):
    strategy = build()
    before = fingerprint(strategy.weights())
    strategy.forward_backward(random_batch(LENGTHS), not_a_number)
    assert strategy.step().skipped
    assert fingerprint(strategy.weights()) == before


def test_the_weights_of_a_full_model_are_shared_and_keep_their_addresses(dense: Path):
    """So that an engine in the process can share them; a sharded learner has no module to share."""
    strategy = LocalStrategy(recipe_of(dense, train=OPTIMIZER))
    held = dict(strategy.weights())
    before = {name: value.clone() for name, value in held.items()}
    train(strategy, random_batch(LENGTHS))
    assert fingerprint(held.items()) == fingerprint(strategy.weights())
    assert fingerprint(held.items()) != fingerprint(before.items())


def test_a_restored_learner_continues_bit_for_bit(
    build: Callable[[], TrainStrategy], tmp_path: Path
):
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
    for keep_parameters in (False, True):
        strategy.sleep(keep_parameters=keep_parameters)
        strategy.wake()
        assert np.array_equal(strategy.logprobs(batch), before)
