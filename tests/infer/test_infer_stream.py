"""Streams of tokens, from engines that support streaming and from those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError
from rollick.infer.engine import Delta, StopRules, SupportsStreaming
from rollick.infer.native.engine import NativeEngine
from rollick.infer.stream import StreamSubscribers, stream_deltas
from rollick.types import Completion, Request, SampleId, Sampling, StopReason, frozen_array

LONG = 2000


@pytest.fixture
async def engine(tiny_folder: Path) -> AsyncGenerator[NativeEngine]:
    model = ModelConfig(path=str(tiny_folder))
    native_engine = NativeEngine.create(
        InferConfig(slots=4, max_length=LONG + 50), model, stops=StopRules()
    )
    async with asyncio.timeout(60):
        yield native_engine
    await native_engine.close()


def make_request(index: int = 0, *, tokens: int = 12) -> Request:
    ids = frozen_array([1, 8, 9], np.int32)
    return Request(SampleId(0, index), ids, Sampling(max_tokens=tokens), stream=5)


def make_completion(*tokens: int) -> Completion:
    ids = frozen_array(tokens, np.int32)
    return Completion(SampleId(0, 0), ids, ids.astype(np.float32), ids, StopReason.STOP)


async def test_an_engine_without_streaming_returns_one_delta():
    fake = FakeEngine(reply=lambda _: [4, 5])
    assert not isinstance(fake, SupportsStreaming)
    (delta,) = [delta async for delta in stream_deltas(fake, make_request())]
    assert (delta.token_ids.tolist(), delta.stop) == ([4, 5], StopReason.STOP)


async def test_concatenated_deltas_are_the_completion(engine: NativeEngine):
    complete = await engine.generate(make_request())
    parts = [delta async for delta in stream_deltas(engine, make_request())]
    assert len(parts) > 6
    for name in ("token_ids", "logprobs", "versions"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(complete, name))
    assert [part.stop for part in parts] == [None] * (len(parts) - 1) + [StopReason.LENGTH]


async def test_two_streams_and_a_plain_request_do_not_mix(engine: NativeEngine):
    async def ids(index: int) -> list[int]:
        return [
            t
            async for part in stream_deltas(engine, make_request(index))
            for t in part.token_ids.tolist()
        ]

    first, second, third = await asyncio.gather(ids(0), ids(1), engine.generate(make_request(2)))
    assert first == second == third.token_ids.tolist()


async def test_closing_a_stream_aborts_the_request(engine: NativeEngine):
    async with aclosing(stream_deltas(engine, make_request(tokens=LONG))) as stream:
        async for _ in stream:
            break
    again = await engine.generate(make_request())
    assert len(again.token_ids) == 12
    assert engine.load().running == 0
    assert engine.load().generated_tokens < LONG


async def test_an_aborted_stream_ends_with_its_tokens_so_far(engine: NativeEngine):
    parts: list[Delta] = []
    async for part in stream_deltas(engine, make_request(tokens=LONG)):
        parts.append(part)
        if len(parts) == 3:
            await engine.abort(SampleId(0, 0))
    assert parts[-1].stop is StopReason.ABORTED
    assert sum(len(part.token_ids) for part in parts) < LONG


async def test_a_failure_reaches_the_subscriber():
    async def fail(request: Request) -> Completion:
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        async for _ in StreamSubscribers().stream(make_request(), fail):
            pass


async def test_published_tokens_are_not_repeated_at_the_end():
    subscribers = StreamSubscribers()

    async def generate(request: Request) -> Completion:
        first = make_completion(4, 5)
        subscribers.send(request.uid, first.token_ids, first.logprobs, first.versions)
        return make_completion(4, 5, 6)

    parts = [part.token_ids.tolist() async for part in subscribers.stream(make_request(), generate)]
    assert parts == [[4, 5], [6]]
    assert list(subscribers) == []


async def test_a_continued_stream_starts_with_its_earlier_tokens(
    engine: NativeEngine,
):
    complete = await engine.generate(make_request())
    first = replace(await engine.generate(make_request(tokens=5)), stop=StopReason.ABORTED)
    continued = replace(make_request(), continue_from=first)
    parts = [part.token_ids.tolist() async for part in stream_deltas(engine, continued)]
    assert parts[0] == first.token_ids.tolist()
    assert [token for part in parts for token in part] == complete.token_ids.tolist()


async def test_a_continued_stream_repeats_nothing():
    subscribers = StreamSubscribers()

    async def generate(request: Request) -> Completion:
        chunk = make_completion(6, 7)
        subscribers.send(request.uid, chunk.token_ids, chunk.logprobs, chunk.versions)
        return make_completion(4, 5, 6, 7, 8)

    continued = replace(make_request(), continue_from=make_completion(4, 5))
    parts = [part.token_ids.tolist() async for part in subscribers.stream(continued, generate)]
    assert parts == [[4, 5], [6, 7], [8]]
