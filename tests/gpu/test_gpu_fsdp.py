"""The sharded strategy on one GPU, over NCCL: its steps equal those of the local strategy, and
offload and sleep free GPU memory. Several GPUs are not tested here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_mixture import save_tiny_mixture
from transformers import AutoModelForCausalLM

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema import Recipe
from rollick.config.schema.losses import PpoLoss
from rollick.models.loading.fingerprint import fingerprint
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.fsdp import FsdpStrategy
from rollick.trainer.local import LocalStrategy
from rollick.trainer.parallel.mesh import leave_process_group

pytestmark = pytest.mark.gpu

LENGTHS = [7, 12, 7, 3, 9, 12]
OPTIONS = [{}, {"recompute": True}, {"offload": True}, {"offload": True, "recompute": True}]


@pytest.fixture(autouse=True)
def _process_group_cleanup() -> Iterator[None]:
    yield
    leave_process_group()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("dense"), hidden=256, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixture(tmp_path_factory.mktemp("mixture"), hidden=64, heads=8, kv_heads=4)


def make_recipe(folder: Path, *, dtype: str = "float32", **train: Any) -> Recipe:
    # eps is large, so that a gradient's last bits are not amplified to full steps by Adam.
    train = {"optimizer": {"lr": 1e-3, "eps": 1e-3}, **train}
    return recipe_of(folder, model={"path": str(folder), "dtype": dtype}, train=train)


def make_sharded(folder: Path, *, dtype: str = "float32", **parallel: Any) -> FsdpStrategy:
    recipe = make_recipe(folder, dtype=dtype, strategy="fsdp", parallel=parallel)
    return FsdpStrategy(recipe, device="cuda")


def compute_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def train(strategy: FsdpStrategy | LocalStrategy, seed: int) -> float:
    strategy.forward_backward(random_batch(LENGTHS, seed=seed), compute_loss)
    return strategy.step().grad_norm


def measure_allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("parallel", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_three_steps_are_those_of_the_local_strategy(
    request: pytest.FixtureRequest, kind: str, parallel: dict[str, bool]
) -> None:
    folder: Path = request.getfixturevalue(kind)
    local = LocalStrategy(make_recipe(folder), device="cuda")
    strategy = make_sharded(folder, **parallel)
    batch = random_batch(LENGTHS, seed=9)
    for seed in range(3):
        assert train(strategy, seed) == pytest.approx(train(local, seed), rel=1e-4)
    np.testing.assert_allclose(strategy.logprobs(batch), local.logprobs(batch), atol=1e-4)
    expected = dict(local.weights())
    for name, value in strategy.weights():
        torch.testing.assert_close(value.cpu(), expected[name].cpu(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("parallel", OPTIONS, ids=str)
def test_masters_are_float32_where_the_model_computes_in_bfloat16(
    dense: Path, parallel: dict[str, bool]
) -> None:
    strategy, exact = make_sharded(dense, dtype="bfloat16", **parallel), make_sharded(dense)
    assert train(strategy, 0) == pytest.approx(train(exact, 0), rel=0.05)
    assert {master.dtype for master in strategy.optimizer.masters.values()} == {torch.float32}
    assert {value.dtype for _, value in strategy.weights()} == {torch.bfloat16}


def test_what_is_offloaded_is_not_on_the_gpu(dense: Path) -> None:
    baseline = measure_allocated()
    resident = make_sharded(dense)
    train(resident, 0)
    resident_bytes = measure_allocated() - baseline
    del resident
    before = measure_allocated()
    strategy = make_sharded(dense, offload=True)
    train(strategy, 0)
    assert all(not value.is_cuda for value in strategy.optimizer.tensors().values())
    assert measure_allocated() - before < resident_bytes / 4


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
def test_a_restored_learner_continues_bit_for_bit(
    dense: Path, tmp_path: Path, offload: bool
) -> None:
    first = make_sharded(dense, offload=offload)
    train(first, 0)
    first.save(tmp_path / "state")
    train(first, 1)
    second = make_sharded(dense, offload=offload)
    train(second, 7)
    second.load(tmp_path / "state")
    train(second, 1)
    assert fingerprint(second.weights()) == fingerprint(first.weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_frees_the_learner_and_wake_restores_every_bit(dense: Path, dtype: str) -> None:
    strategy = make_sharded(dense, dtype=dtype)
    train(strategy, 0)
    weights = fingerprint(strategy.weights())
    state = fingerprint(strategy.optimizer.tensors().items())
    awake = measure_allocated()
    held_bytes = sum(value.nbytes for value in strategy.optimizer.tensors().values())
    strategy.sleep()
    asleep = measure_allocated()
    strategy.wake()
    assert awake - asleep >= 0.9 * held_bytes
    assert fingerprint(strategy.weights()) == weights
    assert fingerprint(strategy.optimizer.tensors().items()) == state
    train(strategy, 1)


@pytest.mark.parametrize("offload", [False, True], ids=["on the GPU", "offloaded"])
def test_an_export_loads_in_transformers(mixture: Path, tmp_path: Path, offload: bool) -> None:
    strategy = make_sharded(mixture, offload=offload)
    train(strategy, 0)
    strategy.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    exported = {name: value.cpu() for name, value in strategy.weights()}
    assert fingerprint(loaded.named_parameters()) == fingerprint(exported.items())
