"""What the native engine says of its steps: what each had to do, and how long it took."""

import asyncio
import time

import numpy as np

from rollick.config.schema import InferConfig
from rollick.infer.engine import RecordsSteps
from rollick.infer.native.endings import Stops
from rollick.infer.native.engine import NativeEngine
from rollick.models.cached_attention import CACHED
from rollick.models.load import empty_model, share_parameters
from rollick.testing.tiny import tiny_model
from rollick.types import Request, SampleId, Sampling, frozen_array


def make_engine() -> NativeEngine:
    model = tiny_model(20, hidden=16, layers=1)
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    infer = InferConfig(slots=4, max_length=64)
    return NativeEngine.around(module, infer, shared=True, stops=Stops(()))


async def draw(engine: NativeEngine, *, prompt: int, tokens: list[int]) -> None:
    """A group of samples that end after so many tokens."""
    ids = frozen_array([3] * prompt, np.int32)
    async with asyncio.timeout(30):
        await asyncio.gather(
            *(
                engine.generate(Request(SampleId(0, n), ids, Sampling(max_tokens=most), stream=n))
                for n, most in enumerate(tokens)
            )
        )


async def test_each_step_is_recorded_with_what_it_had_to_do() -> None:
    engine = make_engine()
    assert isinstance(engine, RecordsSteps)
    engine.record_steps(100)
    begun = time.time()
    await draw(engine, prompt=5, tokens=[1, 3])
    steps = engine.take_steps()
    await engine.close()
    # The prompt is prefilled once, without its last token, which the first decode feeds.
    works = [(s.batch, s.kv_tokens, s.prefill_tokens, s.longest) for s in steps]
    assert works == [(2, 10, 4, 5), (1, 6, 0, 6), (1, 7, 0, 7)]
    assert all(step.seconds > 0 for step in steps)
    assert begun <= steps[0].at < steps[1].at < steps[2].at <= time.time()
    assert engine.take_steps() == []


async def test_of_many_steps_the_newest_are_kept() -> None:
    engine = make_engine()
    engine.record_steps(2)
    await draw(engine, prompt=1, tokens=[5])
    assert [step.longest for step in engine.take_steps()] == [4, 5]
    await engine.close()


async def test_nothing_is_recorded_that_nobody_asked_for() -> None:
    engine = make_engine()
    await draw(engine, prompt=1, tokens=[5])
    assert engine.take_steps() == []
    await engine.close()
