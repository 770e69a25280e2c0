"""An invalid request raises, and does not affect the other requests."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError
from rollick.infer.engine import StopRules
from rollick.infer.native.engine import NativeEngine
from rollick.infer.request_validation import RequestLimits
from rollick.testing.tiny import tiny_tokenizer
from rollick.types import Completion, Request, SampleId, Sampling, StopReason, frozen_array

SIZE = len(tiny_tokenizer())
LIMITS = RequestLimits(64, SIZE, StopRules())

INVALID: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1e-40}, "temperature is 1e-40"),
    ({"temperature": 9e-4}, "at least 0.001"),
    ({"temperature": -1.0}, "temperature is -1"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"top_k": 2**63}, "top_k is 9223372036854775808"),
    ({"top_k": -1}, "top_k is -1"),
    ({"min_tokens": 2**63}, "min_tokens is"),
    ({"top_p": math.nan}, "top_p is nan"),
    ({"logit_bias": ((5, math.inf),)}, "logit_bias is inf"),
    ({"logit_bias": ((SIZE, 1.0),)}, f"no token {SIZE}"),
    ({"stop_ids": (-2,), "min_tokens": 1}, "no token -2"),
]


def make_request(index: int = 0, *, ids: tuple[int, ...] = (1, 8, 9), **options: Any) -> Request:
    earlier = options.pop("continue_from", None)
    sampling = Sampling(**{"max_tokens": 40} | options)
    token_ids = frozen_array(ids, np.int32)
    return Request(SampleId(0, index), token_ids, sampling, stream=3, continue_from=earlier)


@pytest.mark.parametrize(("sampling", "message"), INVALID)
def test_invalid_sampling_parameters_raise(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        LIMITS.check(make_request(**sampling), pending=())


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0}, {"temperature": 1e-3}, {"top_k": 10**6}, {"stop_ids": (-2,)}],
)
def test_parameters_at_their_limits_are_accepted(sampling: dict[str, Any]) -> None:
    LIMITS.check(make_request(ids=(0, SIZE - 1), **sampling), pending=())


@pytest.mark.parametrize("ids", [(1, SIZE), (-1,)])
def test_ids_without_an_embedding_raise_in_a_prompt_and_in_continued_tokens(
    ids: tuple[int, ...],
) -> None:
    with pytest.raises(EngineError, match="no token"):
        LIMITS.check(make_request(ids=ids), pending=())
    generated = frozen_array(ids, np.int32)
    earlier = Completion(
        SampleId(0, 0), generated, generated.astype(np.float32), generated, StopReason.ABORTED
    )
    with pytest.raises(EngineError, match="no token"):
        LIMITS.check(make_request(continue_from=earlier), pending=())


async def test_an_invalid_request_does_not_affect_the_others(tiny_folder: Path) -> None:
    engine = NativeEngine.create(
        InferConfig(slots=32, max_length=64), ModelConfig(path=str(tiny_folder)), stops=StopRules()
    )
    try:
        async with asyncio.timeout(60):
            valid_tasks = [
                asyncio.create_task(engine.generate(make_request(index))) for index in range(4)
            ]
            invalid_tasks = [
                asyncio.create_task(engine.generate(make_request(10 + index, **sampling)))
                for index, (sampling, _) in enumerate(INVALID)
            ]
            invalid_tasks.append(
                asyncio.create_task(engine.generate(make_request(99, ids=(1, SIZE))))
            )
            errors = await asyncio.gather(*invalid_tasks, return_exceptions=True)
            generated = await asyncio.gather(*valid_tasks)
            low_temperature = await engine.generate(
                make_request(5, temperature=1e-3, top_k=SIZE + 7)
            )
    finally:
        await engine.close()
    assert [type(error) for error in errors] == [EngineError] * len(invalid_tasks)
    assert [len(completion.token_ids) for completion in generated] == [40] * 4
    assert np.isfinite(low_temperature.logprobs).all()
