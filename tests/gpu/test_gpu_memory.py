"""GPU memory: sleep frees it, kept tensors keep their addresses, and estimates are close."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from rollick.algorithms.losses import LossInputs, ppo
from rollick.algorithms.objective import Loss
from rollick.config.schema import InferConfig
from rollick.config.schema.losses import PpoLoss
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.shape import ModelShape
from rollick.testing.batches import random_batch, recipe_of, weighted_loss
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.trainer.memory_estimate import trained_footprint
from rollick.types import Request, SampleId, Sampling

pytestmark = pytest.mark.gpu

LENGTHS = [64] * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 million parameters, so that the rounding of allocators does not matter."""
    sizes = {"hidden": 768, "layers": 6, "heads": 12, "kv_heads": 4}
    return save_tiny(tmp_path_factory.mktemp("middle"), **sizes)


def make_learner(folder: Path, *, dtype: str = "bfloat16", **train: Any) -> LocalStrategy:
    model = {"path": str(folder), "dtype": dtype}
    return LocalStrategy(recipe_of(folder, model=model, train=train), device="cuda")


def compute_loss(inputs: LossInputs) -> Loss:
    return weighted_loss(inputs, ppo(inputs, PpoLoss(dual_clip=0)))


def step(strategy: LocalStrategy, lengths: list[int] = LENGTHS, seed: int = 0) -> None:
    strategy.forward_backward(random_batch(lengths, seed=seed), compute_loss)
    strategy.step()


def measure_allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_frees_gradients_too_and_the_step_is_the_same(folder: Path, dtype: str) -> None:
    actual = []
    for sleeps in (False, True):
        strategy = make_learner(folder, dtype=dtype)
        step(strategy)
        strategy.forward_backward(random_batch(LENGTHS, seed=1), compute_loss)
        if sleeps:
            awake = measure_allocated()
            gradient_bytes = sum(value.nbytes for value in strategy.optimizer.gradients().values())
            strategy.sleep()
            assert awake - measure_allocated() > gradient_bytes + 8 * sum(
                master.numel() for master in strategy.optimizer.masters.values()
            )
            strategy.wake()
        strategy.step()
        actual.append(fingerprint(strategy.weights()))
    assert actual[0] == actual[1]


def test_the_copies_in_host_memory_are_pinned_and_kept(folder: Path) -> None:
    strategy = make_learner(folder)
    step(strategy)
    addresses = []
    for _ in range(2):
        strategy.sleep()
        copies = strategy._offloaded.copies
        assert all(copy.is_pinned() for copy in copies.values())
        addresses.append({name: copy.data_ptr() for name, copy in copies.items()})
        strategy.wake()
    assert addresses[0] == addresses[1]


async def test_an_engine_keeps_using_its_graphs_while_the_learner_sleeps(folder: Path) -> None:
    strategy = make_learner(folder)
    infer = InferConfig(slots=4, max_length=64)
    engine = NativeEngine.create(
        infer, strategy.model_config, device="cuda", shared=strategy.module, stops=StopRules()
    )
    prompt = torch.arange(4, 12).numpy().astype("int32")

    async def generate_tokens(number: int) -> list[int]:
        sampling = Sampling(temperature=0.0, max_tokens=24)
        request = Request(SampleId(number, 0), prompt, sampling, stream=number)
        return (await engine.generate(request)).token_ids.tolist()

    try:
        step(strategy)
        before = await generate_tokens(0)
        parameter_addresses = [parameter.data_ptr() for parameter in strategy.module.parameters()]
        awake = measure_allocated()
        strategy.sleep(keep_parameters=True)
        assert awake - measure_allocated() > 11 * sum(
            m.numel() for m in strategy.optimizer.masters.values()
        )
        assert await generate_tokens(1) == before
        strategy.wake()
        assert [
            parameter.data_ptr() for parameter in strategy.module.parameters()
        ] == parameter_addresses
        assert await generate_tokens(2) == before
    finally:
        await engine.close()


@pytest.mark.parametrize("lora", [None, {"rank": 16}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_a_training_step_is_near_what_is_predicted(
    folder: Path, dtype: str, lora: dict[str, int] | None
) -> None:
    if lora:
        pytest.importorskip("peft")
    lengths = [128] * 32
    baseline = measure_allocated()
    strategy = make_learner(folder, dtype=dtype, lora=lora, share_prefix=False)
    step(strategy, lengths)
    torch.cuda.reset_peak_memory_stats()
    step(strategy, lengths, seed=1)
    peak = torch.cuda.max_memory_allocated() - baseline
    shape = ModelShape.read(str(folder))
    assert shape is not None
    footprint = trained_footprint(
        shape,
        strategy.recipe.train,
        itemsize=4 if dtype == "float32" else 2,
        tokens=sum(lengths),
        lora=strategy.recipe.train.lora,
    )
    print(
        f"\n{dtype} lora={lora}: predicted {footprint.training / 1e9:.3f} GB, seen {peak / 1e9:.3f}"
    )
    assert 0.7 < peak / footprint.training < 1.3
