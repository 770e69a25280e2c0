"""The cache of a sleeping engine: freed, or kept if so configured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollick.config.schema import InferConfig, ModelConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.models.loading.load import load_model
from rollick.types import PolicyVersion, Request, SampleId, Sampling, frozen_array


def make_request(number: int) -> Request:
    ids = frozen_array([5, 6, 7, 8], np.int32)
    return Request(SampleId(number, 0), ids, Sampling(max_tokens=4), stream=7)


@pytest.mark.parametrize("frees", [True, False])
async def test_a_sleeping_engine_with_shared_weights_frees_its_cache_if_configured(
    tiny_folder: Path, frees: bool
) -> None:
    model = ModelConfig(path=str(tiny_folder), dtype="float32")
    learner = load_model(model, device="cpu", attention="sdpa")
    infer = InferConfig(slots=2, max_length=32, free_cache=frees)
    engine = NativeEngine.create(infer, model, shared=learner, stops=StopRules())
    first = await engine.generate(make_request(0))
    assert list(engine.runner.cache.tensors()) != []
    await engine.sleep()
    assert (list(engine.runner.cache.tensors()) == []) is frees
    await engine.wake()
    await engine.commit_shared(PolicyVersion(1))
    again = await engine.generate(make_request(1))
    assert again.token_ids.tolist() == first.token_ids.tolist()
    await engine.close()


async def test_a_sleeping_engine_with_its_own_weights_always_frees_its_cache(
    tiny_folder: Path,
) -> None:
    model = ModelConfig(path=str(tiny_folder), dtype="float32")
    infer = InferConfig(slots=2, max_length=32, free_cache=False)
    engine = NativeEngine.create(infer, model, stops=StopRules())
    await engine.generate(make_request(0))
    await engine.sleep()
    assert list(engine.runner.cache.tensors()) == []
    await engine.close()
