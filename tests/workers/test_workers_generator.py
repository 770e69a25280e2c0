"""The controller's connection to a generator: few calls, no lost requests, no leaked tasks."""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeEngine

from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.errors import EngineError, EngineLost, WeightError, WorkerError
from rollick.roles import engine_health
from rollick.roles.engines import Generators, RemoteEngine
from rollick.roles.protocols import EngineDescription, GeneratorRole
from rollick.testing.batches import recipe_of
from rollick.types import Completion, PolicyVersion, Request, SampleId, Sampling, StopReason
from rollick.weights.channels.host import HostSender
from rollick.workers import generator
from rollick.workers.generator import GeneratorWorker

CLUSTER = ClusterConfig(backend="inline", call_timeout_s=30)
Calls = list[str]


def request(index: int = 0, *, max_tokens: int = 4, **more: Any) -> Request:
    ids = np.array([5, 6, 7], np.int32)
    sampling = Sampling(max_tokens=max_tokens)
    return Request(SampleId(0, index), ids, sampling, stream=index, **more)


def make_fake(context: HostContext, rank: int, engine: FakeEngine) -> GeneratorWorker:
    return GeneratorWorker(engine)


def count_calls(group: WorkerGroup) -> Calls:
    """Record the methods that are called on the group from now on, except polls."""
    calls: Calls = []
    send: Callable[..., Awaitable[Any]] = group.call

    async def call(role: Any, method: str, *args: Any, **options: Any) -> Any:
        if method != "poll_results":
            calls.append(method)
        return await send(role, method, *args, **options)

    group.call = call  # type: ignore[method-assign]
    return calls


@asynccontextmanager
async def open_remote_engine(engine: FakeEngine) -> AsyncGenerator[tuple[RemoteEngine, Calls]]:
    """A fake engine behind a group in this process, and the calls that it gets."""
    devices = DeviceMap({"generators": parse_devices("cpu")})
    specs = [RoleSpec("generators", f"{__name__}:make_fake", (engine,))]
    async with (
        open_group(devices, specs, cluster=CLUSTER, threads=1) as group,
        Generators(group, "generators").connect() as generators,
    ):
        yield generators.engines[0], count_calls(group)


async def yield_to_loop(turns: int = 8) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def are_equal(one: Completion, other: Completion) -> bool:
    pairs = [(one.token_ids, other.token_ids), (one.logprobs, other.logprobs)]
    return one.stop is other.stop and all(np.array_equal(a, b) for a, b in pairs)


async def test_the_tiny_model_generates_the_same_through_the_connection(
    tiny_folder: Path,
) -> None:
    recipe = recipe_of(tiny_folder, infer={"slots": 4, "max_length": 32})
    devices = DeviceMap({"generators": parse_devices("cpu")})
    specs = [RoleSpec("generators", "rollick.workers.generator:create", (recipe,))]
    async with open_group(devices, specs, cluster=CLUSTER, threads=1) as group:
        async with Generators(group, "generators").connect() as generators:
            engines = generators.engines
            assert engines[0].load().slots == 4
            calls = count_calls(group)
            remote_results = await asyncio.gather(
                *(engines[0].generate(request(n)) for n in range(6))
            )
            assert calls == ["submit"]
            assert engines[0].load().generated_tokens == sum(
                len(c.token_ids) for c in remote_results
            )
        worker = group.transport._hosts[0]._running_roles["generators"].role  # type: ignore
        local_results = await asyncio.gather(
            *(worker.engine.generate(request(n)) for n in range(6))
        )
    assert [completion.uid.index for completion in remote_results] == list(range(6))
    assert all(are_equal(a, b) for a, b in zip(remote_results, local_results, strict=True))


async def test_requests_of_one_iteration_are_sent_in_one_call() -> None:
    async with open_remote_engine(FakeEngine()) as (engine, calls):
        await asyncio.gather(*(engine.generate(request(n)) for n in range(50)))
        assert calls == ["submit"]
        assert engine.pending == {}


async def test_many_results_come_back_in_few_calls() -> None:
    async with open_remote_engine(FakeEngine(slots=100)) as (engine, _):
        polls = 0
        original_call = engine.handle.group.call

        async def call(role: Any, method: str, *args: Any, **options: Any) -> Any:
            nonlocal polls
            polls += method == "poll_results"
            return await original_call(role, method, *args, **options)

        engine.handle.group.call = call  # type: ignore[method-assign]
        await asyncio.gather(*(engine.generate(request(n)) for n in range(100)))
        assert polls < 20


async def test_a_request_that_was_not_sent_yet_is_aborted_without_a_call() -> None:
    fake = FakeEngine()
    async with open_remote_engine(fake) as (engine, calls):
        task = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: bool(engine.outbox.requests))
        await engine.abort(SampleId(0, 0))
        completion = await task
    assert (completion.stop, len(completion.token_ids)) == (StopReason.ABORTED, 0)
    assert (calls, fake.requests) == ([], [])


async def test_an_unsent_continuation_keeps_its_tokens_when_it_is_aborted() -> None:
    partial = Completion(
        SampleId(0, 0),
        np.array([9], np.int32),
        np.array([-0.5], np.float32),
        np.array([3], np.int32),
        StopReason.ABORTED,
    )
    async with open_remote_engine(FakeEngine()) as (engine, _):
        task = asyncio.create_task(engine.generate(request(continue_from=partial)))
        await wait_until(lambda: bool(engine.outbox.requests))
        await engine.abort(SampleId(0, 0))
        assert are_equal(await task, partial)


@pytest.mark.parametrize("turns", range(12))
async def test_an_abort_is_never_lost_whenever_it_comes(turns: int) -> None:
    async with open_remote_engine(FakeEngine(seconds=math.inf)) as (engine, _):
        task = asyncio.create_task(engine.generate(request()))
        await yield_to_loop(1 + turns)
        async with asyncio.timeout(5):
            await engine.abort(SampleId(0, 0))
            assert (await task).stop is StopReason.ABORTED


@asynccontextmanager
async def delay_calls(group: WorkerGroup, method: str) -> AsyncGenerator[asyncio.Event]:
    """Delay calls of the method until the event is set; calls of `poll_results` arrive, but their
    results are delayed. Other calls overtake them, as small ones do on Ray."""
    gate = asyncio.Event()
    send: Callable[..., Awaitable[Any]] = group.call

    async def call(role: Any, called_method: str, *args: Any, **options: Any) -> Any:
        if called_method == method and method != "poll_results":
            await gate.wait()
        result = await send(role, called_method, *args, **options)
        if called_method == method:
            await gate.wait()
        return result

    group.call = call  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        yield gate


async def test_an_abort_does_not_overtake_the_submit_of_its_request() -> None:
    fake = FakeEngine(seconds=math.inf)
    async with (
        open_remote_engine(fake) as (engine, _),
        delay_calls(engine.handle.group, "submit") as gate,
    ):
        tasks = [asyncio.create_task(engine.generate(request(n))) for n in range(3)]
        await yield_to_loop(20)
        aborts = [asyncio.create_task(engine.abort(SampleId(0, n))) for n in range(2)]
        tasks[2].cancel()
        await yield_to_loop(20)
        gate.set()
        assert [(await task).stop for task in tasks[:2]] == 2 * [StopReason.ABORTED]
        await asyncio.gather(*aborts)
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        await wait_until(lambda: not engine.pending and not fake._pending)


async def test_a_late_result_does_not_end_a_newer_request_of_the_same_sample() -> None:
    fake = FakeEngine(reply=lambda request: "ab" if request.stream == 0 else "xyz")
    newer = Request(SampleId(0, 0), np.array([8], np.int32), Sampling(max_tokens=8), stream=1)
    async with (
        open_remote_engine(fake) as (engine, _),
        delay_calls(engine.handle.group, "poll_results") as gate,
    ):
        older = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: len(fake.requests) == 1 and not fake._pending)
        older.cancel()
        with pytest.raises(asyncio.CancelledError):
            await older
        task = asyncio.create_task(engine.generate(newer))
        await wait_until(lambda: len(fake.requests) == 2)
        gate.set()
        assert (await task).token_ids.tolist() == [ord(letter) for letter in "xyz"]


class SlowAbortEngine(FakeEngine):
    async def abort(self, uid: SampleId) -> None:
        asyncio.get_running_loop().call_later(0.02, self._pending[uid].aborted.set)


async def test_a_sample_that_is_cancelled_and_resent_waits_for_its_earlier_request() -> None:
    fake = SlowAbortEngine(seconds=lambda request: math.inf if request.stream == 0 else 0.0)
    newer = Request(SampleId(0, 0), np.array([8], np.int32), Sampling(max_tokens=8), stream=1)
    async with open_remote_engine(fake) as (engine, _), asyncio.timeout(10):
        older = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: bool(fake.requests))
        older.cancel()
        with pytest.raises(asyncio.CancelledError):
            await older
        assert (await engine.generate(newer)).stop is not StopReason.ABORTED
        assert fake.peak == 1


async def test_an_abort_of_a_finished_request_does_nothing() -> None:
    async with open_remote_engine(FakeEngine()) as (engine, _):
        await engine.generate(request())
        await engine.abort(SampleId(0, 0))
        await engine.generate(request())


async def test_a_cancelled_generate_frees_its_slot_in_the_engine() -> None:
    fake = FakeEngine(seconds=lambda request: math.inf if request.uid.index == 0 else 0.0, slots=1)
    async with open_remote_engine(fake) as (engine, _):
        task = asyncio.create_task(engine.generate(request(0)))
        await wait_until(lambda: bool(fake.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.pending == {}
        completion = await asyncio.wait_for(engine.generate(request(1)), 5)
        assert completion.stop is not StopReason.ABORTED


async def test_one_sample_cannot_be_generated_twice_at_once() -> None:
    async with open_remote_engine(FakeEngine(seconds=math.inf)) as (engine, _):
        task = asyncio.create_task(engine.generate(request()))
        await yield_to_loop()
        with pytest.raises(EngineError, match=r"g0\.0 is already being generated"):
            await engine.generate(request())
        await engine.abort(SampleId(0, 0))
        await task


async def test_an_error_of_one_request_reaches_that_request_alone() -> None:
    fake = FakeEngine()
    async with open_remote_engine(fake) as (engine, _):
        fake.fail_with = EngineError("the prompt is empty", fix="give at least one token")
        with pytest.raises(EngineError, match="the prompt is empty"):
            await engine.generate(request())
        fake.fail_with = None
        assert (await engine.generate(request())).stop is not StopReason.ABORTED


async def test_an_error_that_is_not_ours_reaches_the_request_too() -> None:
    fake = FakeEngine()
    async with open_remote_engine(fake) as (engine, _):
        fake.fail_with = ZeroDivisionError("division by zero")
        with pytest.raises(EngineError, match="ZeroDivisionError: division by zero"):
            await asyncio.wait_for(engine.generate(request()), 5)


async def test_a_broken_connection_fails_pending_and_later_calls_with_the_cause() -> None:
    fake = FakeEngine(seconds=math.inf)
    async with open_remote_engine(fake) as (engine, _):
        waiting = [asyncio.create_task(engine.generate(request(n))) for n in range(3)]
        await wait_until(lambda: len(fake.requests) == 3)

        async def raise_error(*args: Any, **options: Any) -> Any:
            raise WorkerError("generator 0 died", fix="see its log")

        engine.handle.group.call = raise_error  # type: ignore[method-assign]
        late = asyncio.create_task(engine.generate(request(3)))
        for task in (*waiting, late):
            with pytest.raises(EngineLost, match="generator 0 is lost: generator 0 died"):
                await asyncio.wait_for(task, 5)
        with pytest.raises(EngineLost, match="generator 0 is lost: generator 0 died"):
            await engine.generate(request(4))


async def test_a_lost_engine_stays_lost_and_fails_calls_at_once() -> None:
    fake = FakeEngine()
    async with open_remote_engine(fake) as (engine, calls):
        assert not engine.lost
        engine.mark_lost(WorkerError("the host is gone", fix="see its log"))
        for method in (engine.generate(request()), engine.abort(SampleId(0, 0))):
            with pytest.raises(EngineLost, match="generator 0 is lost: the host is gone") as lost:
                await method
            assert lost.value.fix == "see its log"
        assert engine.lost
        assert calls == []


async def test_each_waiter_on_a_lost_engine_gets_its_own_error() -> None:
    fake = FakeEngine(seconds=math.inf)
    async with open_remote_engine(fake) as (engine, _):
        tasks = [asyncio.create_task(engine.generate(request(n))) for n in range(2)]
        await wait_until(lambda: len(fake.requests) == 2)
        engine.mark_lost(WorkerError("the host is gone"))
        errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineLost, EngineLost]
    assert errors[0] is not errors[1]


async def test_an_engine_that_does_not_respond_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs = False

    async def describe(self: GeneratorWorker) -> Any:
        await asyncio.sleep(math.inf if hangs else 0)
        return EngineDescription(self.engine.capabilities, self.engine.load())

    monkeypatch.setattr(GeneratorWorker, "describe", describe)
    async with open_remote_engine(FakeEngine()) as (engine, _):
        await engine.health_check()
        assert not engine.lost
        hangs = True
        engine.handle.group.deadlines.ceiling_s = 0.05
        await engine.health_check()
        with pytest.raises(EngineLost, match=r"did not finish 'describe' within 0\.05 s"):
            await engine.generate(request())


async def test_a_cancellation_stays_a_cancellation_when_the_connection_breaks() -> None:
    fake = FakeEngine(seconds=math.inf)
    async with open_remote_engine(fake) as (engine, _):
        task = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: bool(fake.requests))

        async def raise_error(*args: Any, **options: Any) -> Any:
            raise WorkerError("generator 0 died")

        engine.handle.group.call = raise_error  # type: ignore[method-assign]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_no_task_is_left_behind_when_the_engines_close() -> None:
    before = asyncio.all_tasks()
    fake = FakeEngine(seconds=math.inf)
    async with open_remote_engine(fake) as (engine, _):
        task = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: bool(fake.requests))
    with pytest.raises(WorkerError, match="closed"):
        await asyncio.wait_for(task, 5)
    assert asyncio.all_tasks() == before
    assert fake.closed


async def test_a_poll_with_nothing_ready_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "POLL_TIMEOUT_S", 0.01)
    results, load = await GeneratorWorker(FakeEngine(slots=3)).poll_results()
    assert (results, load.slots) == ([], 3)


async def test_a_version_that_was_not_received_cannot_be_committed() -> None:
    worker = GeneratorWorker(FakeEngine())
    with pytest.raises(WeightError, match="cannot commit version 2: it was not received"):
        await worker.commit(PolicyVersion(2))


async def test_what_is_committed_is_what_was_verified() -> None:
    class RecordingEngine(FakeEngine):
        expected: Any = None

        async def update(
            self, weights: Any, version: Any, expected: Any = None, *, keep_cache: bool = False
        ) -> Any:
            self.expected = expected
            return await super().update(weights, version, expected, keep_cache=keep_cache)

    engine = RecordingEngine()
    worker = GeneratorWorker(engine)
    sender = HostSender()
    manifest = sender.offer([("a", torch.ones(3))], PolicyVersion(2), (0,))
    await worker.receive(manifest)
    await worker.commit(PolicyVersion(2))
    sender.close()
    assert engine.expected == manifest.fingerprint


async def test_an_idle_connection_outlives_a_short_call_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generator, "POLL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(engine_health, "POLL_TIMEOUT_S", 1.0)
    devices = DeviceMap({"generators": parse_devices("cpu")})
    specs = [RoleSpec("generators", f"{__name__}:make_fake", (FakeEngine(),))]
    short = ClusterConfig(backend="inline", call_timeout_s=0.2)
    async with (
        open_group(devices, specs, cluster=short, threads=1) as group,
        Generators(group, "generators").connect() as generators,
    ):
        await asyncio.sleep(0.4)
        assert (await generators.sample(request())).stop is not StopReason.ABORTED


async def test_a_connection_broken_by_a_foreign_error_fails_pending_calls() -> None:
    fake = FakeEngine(seconds=math.inf)
    async with open_remote_engine(fake) as (engine, _):
        task = asyncio.create_task(engine.generate(request(0)))
        await wait_until(lambda: bool(fake.requests))

        async def raise_error(*args: Any, **options: Any) -> Any:
            raise TypeError("cannot be pickled")

        engine.handle.group.call = raise_error  # type: ignore[method-assign]
        late = asyncio.create_task(engine.generate(request(1)))
        for waiting in (task, late):
            with pytest.raises(EngineLost, match="TypeError: cannot be pickled"):
                await asyncio.wait_for(waiting, 5)


async def test_an_engine_that_reports_itself_lost_is_lost_although_its_host_is_alive() -> None:
    fake = FakeEngine(seconds=lambda request: math.inf if request.uid.index else 0.0)
    async with open_remote_engine(fake) as (engine, _):
        other = asyncio.create_task(engine.generate(request(1)))
        await wait_until(lambda: bool(fake.requests))
        fake.fail_with = EngineLost("the fake engine is gone")
        with pytest.raises(EngineLost, match="gone"):
            await asyncio.wait_for(engine.generate(request(0)), 5)
        with pytest.raises(EngineLost, match="generator 0 is lost: the fake engine is gone"):
            await asyncio.wait_for(other, 5)
        assert engine.lost
        assert engine.lost_event.is_set()
        with pytest.raises(EngineLost, match="the fake engine is gone"):
            await engine.handle.call_rank(0, GeneratorRole.describe)


async def test_an_engine_that_is_lost_over_a_call_is_lost_for_all() -> None:
    fake = FakeEngine(seconds=math.inf)

    async def fail_abort(uid: SampleId) -> None:
        raise EngineLost("it does not abort")

    fake.abort = fail_abort  # type: ignore[method-assign]
    async with open_remote_engine(fake) as (engine, _):
        task = asyncio.create_task(engine.generate(request()))
        await wait_until(lambda: bool(fake.requests))
        with pytest.raises(EngineLost, match="does not abort"):
            await engine.abort(SampleId(0, 0))
        assert engine.lost
        with pytest.raises(EngineLost, match="does not abort"):
            await task
        with pytest.raises(EngineLost, match="does not abort"):
            await engine.handle.call_rank(0, GeneratorRole.describe)


class CheckedEngine(FakeEngine):
    """An engine with a health check."""

    alive = True

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineLost("its process has ended")


async def test_an_idle_engine_that_is_gone_does_not_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = CheckedEngine()
    async with open_remote_engine(fake) as (engine, _):
        await engine.health_check()
        assert not engine.lost
        fake.alive = False
        await engine.health_check()
        assert engine.lost


async def test_an_idle_engine_that_is_gone_is_detected_by_the_next_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generator, "POLL_TIMEOUT_S", 0.01)
    fake = CheckedEngine()
    async with open_remote_engine(fake) as (engine, _):
        fake.alive = False
        await asyncio.wait_for(engine.lost_event.wait(), 5)
        assert engine.failure is not None
        assert "its process has ended" in engine.failure.message
