"""The native engine's records of its steps: their work and their duration."""

import asyncio
import time

import numpy as np

from rollick.config.schema import InferConfig
from rollick.infer.engine import StopRules, SupportsStepRecords
from rollick.infer.native.engine import NativeEngine
from rollick.infer.native.weight_update import EngineWeights
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import Request, SampleId, Sampling, frozen_array


def make_engine() -> NativeEngine:
    model = tiny_model(20, hidden=16, layers=1)
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    infer = InferConfig(slots=4, max_length=64)
    return NativeEngine(EngineWeights(module, shared=True), infer, stops=StopRules())


async def generate_group(engine: NativeEngine, *, prompt: int, tokens: list[int]) -> None:
    """Generate a group of samples with these numbers of tokens."""
    ids = frozen_array([3] * prompt, np.int32)
    async with asyncio.timeout(30):
        await asyncio.gather(
            *(
                engine.generate(Request(SampleId(0, n), ids, Sampling(max_tokens=limit), stream=n))
                for n, limit in enumerate(tokens)
            )
        )


async def test_each_step_is_recorded_with_its_work() -> None:
    engine = make_engine()
    assert isinstance(engine, SupportsStepRecords)
    engine.record_steps(100)
    started = time.time()
    await generate_group(engine, prompt=5, tokens=[1, 3])
    steps = engine.take_steps()
    await engine.close()
    # The prompt is prefilled once, without its last token, which the first decode feeds.
    works = [(s.batch, s.kv_tokens, s.prefill_tokens, s.longest) for s in steps]
    assert works == [(2, 10, 4, 5), (1, 6, 0, 6), (1, 7, 0, 7)]
    assert all(step.seconds > 0 for step in steps)
    assert started <= steps[0].at < steps[1].at < steps[2].at <= time.time()
    assert engine.take_steps() == []


async def test_the_latest_steps_are_kept() -> None:
    engine = make_engine()
    engine.record_steps(2)
    await generate_group(engine, prompt=1, tokens=[5])
    assert [step.longest for step in engine.take_steps()] == [4, 5]
    await engine.close()


async def test_steps_are_recorded_only_on_request() -> None:
    engine = make_engine()
    await generate_group(engine, prompt=1, tokens=[5])
    assert engine.take_steps() == []
    await engine.close()
