"""What a sleeping engine holds: no cache, or, where it is told to keep it, the cache as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollick.config.schema import InferConfig, ModelConfig
from rollick.infer.native.engine import NativeEngine
from rollick.models.load import load_model
from rollick.types import PolicyVersion, Request, SampleId, Sampling, frozen_array


def request(number: int) -> Request:
    ids = frozen_array([5, 6, 7, 8], np.int32)
    return Request(SampleId(number, 0), ids, Sampling(max_tokens=4), stream=7)


@pytest.mark.parametrize("frees", [True, False])
async def test_a_sleeping_engine_that_shares_weights_frees_its_cache_unless_it_may_keep_it(
    tiny_folder: Path, frees: bool
) -> None:
    model = ModelConfig(path=str(tiny_folder), dtype="float32")
    learner = load_model(model, device="cpu", attention="sdpa")
    infer = InferConfig(slots=2, max_length=32, free_cache=frees)
    engine = NativeEngine.create(infer, model, shared=learner, stop_ids=())
    first = await engine.generate(request(0))
    assert engine.runner.cache.bytes > 0
    await engine.sleep()
    assert (engine.runner.cache.bytes == 0) is frees
    await engine.wake()
    await engine.commit_shared(PolicyVersion(1))
    again = await engine.generate(request(1))
    assert again.token_ids.tolist() == first.token_ids.tolist()
    await engine.close()


async def test_an_engine_with_weights_of_its_own_always_frees_its_cache(tiny_folder: Path) -> None:
    model = ModelConfig(path=str(tiny_folder), dtype="float32")
    infer = InferConfig(slots=2, max_length=32, free_cache=False)
    engine = NativeEngine.create(infer, model, stop_ids=())
    await engine.generate(request(0))
    await engine.sleep()
    assert engine.runner.cache.bytes == 0
    await engine.close()
