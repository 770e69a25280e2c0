"""The reward model: one score per sample, trained on pairs, exported for transformers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_verdicts import save_family
from tiny_mixture import widen_norms
from transformers import AutoModelForSequenceClassification

from rollick.algorithms.aggregation import prompt_mean
from rollick.algorithms.reward import ScoreInputs, bradley_terry
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig, ModelConfig
from rollick.data.batch import Batch
from rollick.data.collate import examples_to_batch
from rollick.errors import ConfigError, ModelError, RollickError
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.load import silence_transformers
from rollick.roles.handles import RewardModel
from rollick.testing.batches import random_batch, recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.reward_model import LocalRewardModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


def make_model(folder: Path, **train: Any) -> LocalRewardModel:
    return LocalRewardModel(recipe_of(folder, train={"optimizer": {"lr": 1e-2}} | train))


def make_pairs(count: int = 4, *, seed: int = 0) -> Batch:
    """Pairs of completions of four tokens; the better one contains the token 10."""
    random = np.random.default_rng(seed)
    mask = np.array([False, False, True, True, True, True])

    def make_pair() -> list[tuple[Any, Any]]:
        prompt, good, bad = (random.integers(20, 60, n).astype(np.int32) for n in (2, 4, 4))
        good[random.integers(4)] = 10
        return [(np.concatenate([prompt, tokens]), mask) for tokens in (good, bad)]

    examples = [make_pair() for _ in range(count)]
    return examples_to_batch(examples, aggregation=prompt_mean, max_tokens=8)


def test_the_loss_is_the_mean_over_pairs_of_the_chance_of_their_order() -> None:
    inputs = ScoreInputs(
        scores_B=torch.tensor([1.0, 1.0, 0.0, log(3.0)]),
        better_B=torch.tensor([1.0, -1.0, -1.0, 1.0]),
        pair_B=torch.tensor([0, 0, 1, 1]),
        weights_B=torch.full((4,), 0.25),
    )
    actual = bradley_terry(inputs)
    assert actual.total.item() == pytest.approx((log(2) + log(4 / 3)) / 2)
    assert actual.sums["preference_accuracy"].item() == 1


def test_the_score_is_that_of_transformers_at_the_last_token(folder: Path, tmp_path: Path) -> None:
    model, batch = make_model(folder), random_batch([7, 12, 3, 9])
    model.export(tmp_path)
    with silence_transformers():
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = np.split(batch.token_ids_N, batch.offsets_B1[1:-1])
    with torch.no_grad():
        expected = [
            plain(torch.as_tensor(sample_ids).long()[None]).logits.item() for sample_ids in ids
        ]
    assert plain.config.num_labels == 1
    np.testing.assert_allclose(model.scores(batch), expected, atol=1e-6)


def test_a_model_that_was_written_is_read_with_its_head(folder: Path, tmp_path: Path) -> None:
    model, batch = make_model(folder), make_pairs()
    for _ in range(2):
        model.forward_backward(batch, bradley_terry)
        model.step()
    model.export(tmp_path)
    loaded = LocalRewardModel(recipe_of(folder), ModelConfig(path=str(tmp_path)), trainable=False)
    np.testing.assert_allclose(loaded.scores(batch), model.scores(batch), atol=1e-6)


def test_any_split_gives_the_same_gradient(folder: Path) -> None:
    batch, actual = make_pairs(6), []
    for tokens in (1, 30, 1000):
        model = make_model(folder, tokens_per_microbatch=tokens)
        model.module.double()
        widen_norms(model.module)
        model.forward_backward(batch, bradley_terry)
        actual.append(torch.cat([p.grad.flatten() for p in model.module.parameters()]))
    for other in actual[1:]:
        assert (other - actual[0]).norm() < 1e-10 * actual[0].norm()


def test_it_learns_an_order_that_holds_for_pairs_it_has_not_seen(folder: Path) -> None:
    model, held_out = make_model(folder), make_pairs(32, seed=1)
    for seed in range(2, 32):
        model.forward_backward(make_pairs(16, seed=seed), bradley_terry)
        assert not model.step().skipped
    scores_B = model.scores(held_out)
    is_correct = scores_B[::2] > scores_B[1::2]
    assert is_correct.mean() > 0.9


def test_it_continues_from_its_state_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    first, second = make_model(folder), make_model(folder)
    first.forward_backward(make_pairs(), bradley_terry)
    first.step()
    first.save(tmp_path)
    second.load(tmp_path)
    for model in (first, second):
        model.forward_backward(make_pairs(seed=1), bradley_terry)
        model.step()
    fingerprints = [fingerprint(model.module.named_parameters()) for model in (first, second)]
    assert fingerprints[0] == fingerprints[1]


def test_what_is_no_pair_is_refused(folder: Path) -> None:
    model, batch = make_model(folder), make_pairs()
    with pytest.raises(ConfigError, match="does not mark the better answer"):
        model.forward_backward(replace(batch, scores_B=None), bradley_terry)
    with pytest.raises(ConfigError, match="a group has 1 answers"):
        model.forward_backward(batch.take([0, 1, 2]), bradley_terry)


def open_role(path: Path) -> AbstractAsyncContextManager[WorkerGroup]:
    """A worker group with one reward model, which is loaded from `path`."""
    args = (recipe_of(path), ModelConfig(path=str(path)))
    spec = RoleSpec("reward_model", "rollick.workers.scorer:create_reward_model", args)
    devices = DeviceMap({"reward_model": parse_devices("cpu")})
    cluster = ClusterConfig(backend="inline", call_timeout_s=60)
    return open_group(devices, [spec], cluster=cluster, threads=1)


async def test_a_role_of_a_run_gives_the_scores(folder: Path, tmp_path: Path) -> None:
    model, batch = make_model(folder), make_pairs()
    model.export(tmp_path)
    async with open_role(tmp_path) as group:
        actual = await RewardModel(group, "reward_model").scores(batch)
    np.testing.assert_allclose(actual, model.scores(batch), atol=1e-6)


async def test_a_role_refuses_a_model_without_a_head(folder: Path) -> None:
    with pytest.raises(RollickError, match="no scoring head"):
        async with open_role(folder):
            pass


def test_a_reward_model_that_would_be_wrong_is_refused_at_load(tmp_path: Path):
    folder = save_family("bloom", tmp_path)
    with pytest.raises(ModelError, match="layers do not call our attention"):
        make_model(folder)
