"""A generator that records requests: each once, in bounded memory."""

import asyncio

import numpy as np
from fakes import FakeEngine

from rollick.roles.protocols import NumberedRequest
from rollick.types import Request, SampleId, Sampling, frozen_array
from rollick.workers.generator import MAX_RECORDS, GeneratorWorker


async def run_requests(worker: GeneratorWorker, count: int) -> None:
    ids = frozen_array([1, 2], np.int32)
    sampling = Sampling(max_tokens=2)
    requests = [Request(SampleId(n, 0), ids, sampling, stream=n) for n in range(count)]
    await worker.submit([NumberedRequest(*item) for item in enumerate(requests)], [])
    async with asyncio.timeout(30):
        await asyncio.gather(*worker.tasks.values())


async def test_completions_are_reported_once_with_the_engines_seconds() -> None:
    worker = GeneratorWorker(FakeEngine())
    worker.record()
    await run_requests(worker, 3)
    record = await worker.take_record()
    assert sorted(uid.group for uid, _ in record.answers) == [0, 1, 2]
    assert all(seconds >= 0 for _, seconds in record.answers)
    assert (await worker.take_record()).answers == []


async def test_an_engine_that_reports_no_steps_has_none() -> None:
    worker = GeneratorWorker(FakeEngine())
    worker.record()
    await run_requests(worker, 1)
    assert (await worker.take_record()).steps == []


async def test_nothing_is_recorded_unless_requested() -> None:
    worker = GeneratorWorker(FakeEngine())
    await run_requests(worker, 1)
    assert (await worker.take_record()).answers == []


async def test_unfetched_results_are_bounded() -> None:
    worker = GeneratorWorker(FakeEngine())
    worker.record()
    assert worker.answers is not None
    assert worker.answers.maxlen == MAX_RECORDS
