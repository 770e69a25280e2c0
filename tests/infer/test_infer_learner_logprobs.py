"""The engine's log-probs against the learner's, for the same tokens and parameters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.testing.batches import completions_to_batch, recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import Completion, Request, SampleId, Sampling, frozen_array

GROUP_SIZE = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=64, layers=3)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _make_requests(count: int, *, tokens: int, temperature: float) -> list[Request]:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 40, -(-count // GROUP_SIZE))
    prompts = [random.integers(4, 60, length) for length in lengths]
    return [
        Request(
            SampleId(number // GROUP_SIZE, number % GROUP_SIZE),
            frozen_array(prompts[number // GROUP_SIZE], np.int32),
            # Different lengths, so that rows start and end while others run.
            Sampling(temperature=temperature, max_tokens=tokens - 7 * (number % 5)),
            stream=number,
        )
        for number in range(count)
    ]


def _compute_gaps(folder: Path, requests: list[Request], *, deterministic: bool) -> np.ndarray:
    """|engine - learner| of each generated token; the engine shares the learner's parameters."""
    strategy = LocalStrategy(recipe_of(folder, run={"deterministic": deterministic}))
    infer = InferConfig(slots=24, max_length=256)

    async def generate() -> list[Completion]:
        engine = NativeEngine.create(
            infer,
            strategy.recipe.model,
            deterministic=deterministic,
            shared=strategy.module,
            stops=StopRules(),
        )
        async with asyncio.timeout(100):
            generated = await asyncio.gather(*(engine.generate(request) for request in requests))
        await engine.close()
        return list(generated)

    batch = completions_to_batch(requests, asyncio.run(generate()))
    gap_N = np.abs(strategy.logprobs(batch).astype(np.float64) - batch.logprobs_N)
    return gap_N[batch.loss_mask_N]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_ten_thousand_log_probs_equal_the_learners_up_to_rounding(folder, temperature):
    requests = _make_requests(112, tokens=105, temperature=temperature)
    gap = _compute_gaps(folder, requests, deterministic=False)
    assert len(gap) >= 10_000
    assert gap.mean() <= 5e-6
    assert gap.max() <= 1e-4
    assert gap.max() > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_in_deterministic_mode_log_probs_are_bit_equal_to_the_learners(folder, temperature):
    requests = _make_requests(24, tokens=70, temperature=temperature)
    assert _compute_gaps(folder, requests, deterministic=True).max() == 0
