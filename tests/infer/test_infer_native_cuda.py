"""The native engine on a GPU generates the tokens of the engine on the CPU."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import Completion, Request, SampleId, Sampling, frozen_array

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _make_engine(model: Any, device: str, *, deterministic: bool = False, slots: int = 8) -> Any:
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    return NativeEngine(
        EngineWeights(module, device=device),
        InferConfig(slots=slots, max_length=128),
        deterministic=deterministic,
        stops=StopRules(),
    )


async def _generate(engine: Any, *, temperature: float = 1.0) -> list[Completion]:
    requests = [
        Request(
            SampleId(0, index),
            frozen_array([1, *([4 + index % 3] * (index % 5))], np.int32),
            Sampling(max_tokens=20 + index, temperature=temperature),
            stream=index,
        )
        for index in range(20)
    ]
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


async def test_a_gpu_generates_the_tokens_of_the_cpu():
    on_cpu = _make_engine(tiny_model(32).eval(), "cpu")
    on_gpu = _make_engine(tiny_model(32).eval().cuda(), "cuda")
    for one, other in zip(await _generate(on_cpu), await _generate(on_gpu), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-3)
    await on_cpu.close()
    await on_gpu.close()


async def test_on_a_gpu_deterministic_mode_does_not_depend_on_the_batch():
    model = tiny_model(32).eval().cuda()
    wide, narrow = (
        _make_engine(model, "cuda", deterministic=True, slots=slots) for slots in (20, 3)
    )
    for one, other in zip(await _generate(wide), await _generate(narrow), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
    await wide.close()
    await narrow.close()


async def test_sleep_frees_the_memory_of_cache_and_weights():
    engine = _make_engine(tiny_model(32, hidden=256).eval().cuda(), "cuda")
    generated = await _generate(engine, temperature=0.0)
    weight_bytes = sum(parameter.nbytes for parameter in engine.module.parameters())
    held_bytes = weight_bytes + engine.runner.forward.cache.nbytes
    awake = torch.cuda.memory_allocated()
    await engine.sleep()
    assert awake - torch.cuda.memory_allocated() >= held_bytes
    await engine.wake()
    again = await _generate(engine, temperature=0.0)
    assert [one.token_ids.tolist() for one in again] == [
        one.token_ids.tolist() for one in generated
    ]
    await engine.close()


async def test_bfloat16_on_a_gpu_stays_near_float32():
    exact = _make_engine(tiny_model(32).eval().cuda(), "cuda")
    narrow = _make_engine(tiny_model(32).eval().cuda().bfloat16(), "cuda")
    pairs = list(zip(await _generate(exact), await _generate(narrow), strict=True))
    equal = [(one, other) for one, other in pairs if one.token_ids[0] == other.token_ids[0]]
    assert len(equal) >= 15
    for one, other in equal:
        assert abs(one.logprobs[0] - other.logprobs[0]) < 0.05
    await exact.close()
    await narrow.close()
