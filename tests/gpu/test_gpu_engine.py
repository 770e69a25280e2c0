"""The native engine on a GPU against the CPU and the learner, shared parameters, and memory."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollick.config.schema import InferConfig, ModelConfig, Recipe
from rollick.data.batch import Batch
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.testing.batches import recipe_of
from rollick.testing.tiny import save_tiny
from rollick.trainer.local import LocalStrategy
from rollick.types import (
    NOT_SAMPLED,
    Completion,
    PolicyVersion,
    Request,
    SampleId,
    Sampling,
    frozen_array,
)

pytestmark = pytest.mark.gpu

PROMPTS = [[1, 4, 5], [1, 6], [1, 7, 8, 9, 10], [1, 4, 5], [1, 11, 12, 13]]
INFER = InferConfig(slots=8, max_length=128)

MEAN_BF16_GAP = 0.02
"""Limit of the mean log-prob difference between engine and learner from bfloat16 rounding."""
MAX_BF16_GAP = 0.15
"""Limit of the difference of a single token."""


def _make_engine(folder: Path, device: str, *, dtype: str = "float32") -> NativeEngine:
    model = ModelConfig.model_validate({"path": str(folder), "dtype": dtype})
    return NativeEngine.create(INFER, model, device=device, stops=StopRules())


def _make_learner(folder: Path, *, dtype: str) -> LocalStrategy:
    recipe: Recipe = recipe_of(
        folder, model={"path": str(folder), "dtype": dtype}, train={"optimizer": {"lr": 0.01}}
    )
    return LocalStrategy(recipe, device="cuda")


def _make_sharing_engine(learner: LocalStrategy) -> NativeEngine:
    return NativeEngine.create(
        INFER, learner.recipe.model, device="cuda", shared=learner.module, stops=StopRules()
    )


def _make_request(index: int, *, temperature: float, tokens: int) -> Request:
    return Request(
        SampleId(index, 0),
        frozen_array(PROMPTS[index], np.int32),
        Sampling(temperature=temperature, max_tokens=tokens),
        stream=index,
    )


async def _generate(
    engine: NativeEngine, *, temperature: float = 0.0, tokens: int = 24
) -> list[Completion]:
    requests = [
        _make_request(i, temperature=temperature, tokens=tokens) for i in range(len(PROMPTS))
    ]
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def _get_tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def _make_batch(completions: Sequence[Completion]) -> Batch:
    """The generated samples as a batch, with the engine's log-probs."""
    lengths = [len(p) + len(c.token_ids) for p, c in zip(PROMPTS, completions, strict=True)]
    pairs = list(zip(PROMPTS, completions, strict=True))
    generated_N = np.concatenate([[False] * len(p) + [True] * len(c.token_ids) for p, c in pairs])
    logprobs_N = np.concatenate([[*([0.0] * len(p)), *c.logprobs] for p, c in pairs])
    return Batch(
        token_ids_N=np.concatenate([[*p, *c.token_ids] for p, c in pairs]).astype(np.int32),
        lengths_B=np.asarray(lengths, np.int32),
        uids=tuple(c.uid for c in completions),
        group_B=np.arange(len(lengths), dtype=np.int32),
        temperature_B=np.ones(len(lengths), np.float32),
        loss_mask_N=generated_N,
        logprobs_N=logprobs_N.astype(np.float32),
        versions_N=np.where(generated_N, 0, NOT_SAMPLED).astype(np.int32),
        advantages_N=np.ones(len(generated_N), np.float32),
        weights_N=np.where(generated_N, 1 / generated_N.sum(), 0.0),
    )


def _measure_allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


async def test_greedy_tokens_on_a_gpu_equal_those_of_the_cpu(tiny_folder: Path) -> None:
    on_cpu, on_gpu = _make_engine(tiny_folder, "cpu"), _make_engine(tiny_folder, "cuda")
    expected, generated = await _generate(on_cpu), await _generate(on_gpu)
    await on_cpu.close()
    await on_gpu.close()
    assert _get_tokens(generated) == _get_tokens(expected)
    for one, other in zip(generated, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "mean", "most"),
    [("float32", 1e-5, 1e-4), ("bfloat16", MEAN_BF16_GAP, MAX_BF16_GAP)],
)
async def test_engine_and_learner_agree_on_the_log_probs_of_generated_tokens(
    tiny_folder: Path, dtype: str, mean: float, most: float
) -> None:
    learner = _make_learner(tiny_folder, dtype=dtype)
    engine = _make_sharing_engine(learner)
    batch = _make_batch(await _generate(engine, temperature=1.0))
    await engine.close()
    gap_N = np.abs(learner.logprobs(batch) - batch.logprobs_N)[batch.loss_mask_N]
    assert gap_N.mean() < mean
    assert gap_N.max() < most


async def test_an_engine_on_the_learners_host_shares_its_memory(tiny_folder: Path) -> None:
    learner = _make_learner(tiny_folder, dtype="bfloat16")
    before = _measure_allocated()
    engine = _make_sharing_engine(learner)
    weight_bytes = sum(parameter.nbytes for parameter in learner.module.parameters())
    engine_parameters = dict(engine.module.named_parameters())
    for name, parameter in learner.module.named_parameters():
        assert engine_parameters[name].data_ptr() == parameter.data_ptr()
        assert engine_parameters[name].is_cuda
    # The engine owns only buffers.
    assert _measure_allocated() - before < weight_bytes / 10
    await engine.close()


async def test_an_engine_generates_the_same_after_its_learner_slept(tiny_folder: Path) -> None:
    learner = _make_learner(tiny_folder, dtype="bfloat16")
    engine = _make_sharing_engine(learner)
    generated = await _generate(engine)
    await engine.pause()
    await engine.sleep()
    learner.sleep()
    learner.wake()
    await engine.wake()
    await engine.resume()
    assert _get_tokens(await _generate(engine)) == _get_tokens(generated)
    await engine.close()


async def test_a_write_between_pause_and_commit_changes_tokens_and_version(
    tiny_folder: Path,
) -> None:
    learner = _make_learner(tiny_folder, dtype="float32")
    engine = _make_sharing_engine(learner)
    before = await _generate(engine)
    await engine.pause()
    with torch.no_grad():
        for parameter in learner.module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    await engine.commit_shared(PolicyVersion(1))
    await engine.resume()
    after = await _generate(engine)
    await engine.close()
    assert _get_tokens(after) != _get_tokens(before)
    assert {version for c in before for version in c.versions.tolist()} == {0}
    assert {version for c in after for version in c.versions.tolist()} == {1}


async def test_sleep_frees_weights_and_cache_and_wake_restores_them(
    tmp_path: Path,
) -> None:
    engine = _make_engine(save_tiny(tmp_path, hidden=256), "cuda")
    generated = await _generate(engine)
    weight_bytes = sum(parameter.nbytes for parameter in engine.module.parameters())
    held_bytes = weight_bytes + engine.runner.forward.cache.nbytes
    assert held_bytes > weight_bytes, "the cache must hold something for its end to be seen"
    awake = _measure_allocated()
    await engine.sleep()
    asleep = _measure_allocated()
    await engine.wake()
    again = await _generate(engine)
    await engine.close()
    assert awake - asleep >= held_bytes
    assert _get_tokens(again) == _get_tokens(generated)
