"""Generators that die during a run: it continues with the others and reports the loss."""

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from ledger_audit import audit, check_ledger

from rollick.cluster.group import WorkerGroup
from rollick.config.load import LoadedRecipe
from rollick.errors import EngineLost, WorkerError
from rollick.observe.faults import Fault, read_faults
from rollick.pipelines.evaluate import evaluate_prompts
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import RLPipeline, open_rl
from rollick.roles.protocols import EngineDescription, GeneratorRole
from rollick.rollout.ledger.log import read_log
from rollick.types import Group, PolicyVersion

Toy = Callable[..., LoadedRecipe]

TWO_ENGINES = ("devices.generators=cpu:1-2", "rollout.drop_no_signal=false", "infer.slots=4")
NO_RESTARTS = (*TWO_ENGINES, "rollout.engine_restarts=0")


def collect_versions(groups: Sequence[Group]) -> set[int]:
    """The policy versions of all tokens that are trained on."""
    samples = [sample for group in groups for sample in group.samples]
    return {version for s in samples for version in s.versions[s.loss_mask].tolist()}


@asynccontextmanager
async def open_pipeline(loaded: LoadedRecipe) -> AsyncGenerator[RLPipeline]:
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        yield pipeline


def get_group(pipeline: RLPipeline) -> WorkerGroup:
    return pipeline.roles.generators.group


async def describe(pipeline: RLPipeline, rank: int) -> EngineDescription:
    return await pipeline.roles.generators.call_rank(rank, GeneratorRole.describe)


def fail_calls(pipeline: RLPipeline, rank: int, *, methods: tuple[str, ...] = ()) -> list[str]:
    """Make calls of these methods (by default: all) to the host of a generator fail. Returns the
    methods of the failed calls."""
    transport = get_group(pipeline).transport
    send: Callable[..., Awaitable[Any]] = transport.send
    failed_calls: list[str] = []

    async def send_or_fail(host: Any, call: Any, shared: Any) -> Any:
        if host.roles.get("generators") != rank or (methods and call.method not in methods):
            return await send(host, call, shared)
        failed_calls.append(call.method)
        raise WorkerError(f"{host} died")

    transport.send = send_or_fail  # type: ignore[method-assign]
    return failed_calls


async def test_a_run_continues_without_a_generator_that_died(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pipeline(toy(*NO_RESTARTS, "rollout.max_staleness=1")) as pipeline:
        await pipeline.step()
        fail_calls(pipeline, 1)
        for _ in range(3):
            report = await pipeline.step()
            assert len(report.groups) == 4
        assert pipeline.roles.generators.lost_ranks == {1}
        assert pipeline.state.version == 4
        assert pipeline.measure(report)["controller/engines"] == 1
        assert collect_versions(report.groups) <= {2, 3}
        check_ledger(pipeline.source.rollout.ledger)
        folder = pipeline.state.folder.path
    assert audit(read_log(folder / "ledger.jsonl")).groups.trained == 16
    assert "engine 1 is lost" in caplog.text
    assert "version 4 was published without the lost generators 1" in caplog.text


@pytest.mark.parametrize("method", ["receive", "commit"])
async def test_a_generator_that_dies_over_a_publish_is_left_out(toy: Toy, method: str) -> None:
    async with open_pipeline(toy(*NO_RESTARTS)) as pipeline:
        failed_calls = fail_calls(pipeline, 1, methods=(method, "describe"))
        await pipeline.step()
        assert failed_calls == [method, "describe"]
        assert pipeline.roles.generators.lost_ranks == {1}
        report = await pipeline.step()
        assert collect_versions(report.groups) == {1}


async def test_a_publish_that_fails_with_all_generators_alive_is_an_error(toy: Toy) -> None:
    async with open_pipeline(toy(*NO_RESTARTS)) as pipeline:
        fail_calls(pipeline, 1, methods=("receive",))
        pipeline.state.version = PolicyVersion(1)
        with pytest.raises(WorkerError, match="died"):
            await pipeline.publisher.publish_to_alive(PolicyVersion(1))
        assert not pipeline.roles.generators.lost_ranks


async def test_with_all_generators_gone_the_run_ends(toy: Toy) -> None:
    async def run() -> None:
        async with open_pipeline(toy(*NO_RESTARTS)) as pipeline:
            await pipeline.step()
            for rank in (0, 1):
                fail_calls(pipeline, rank)
            await pipeline.step()

    with pytest.raises(EngineLost, match="died"):
        await run()


async def test_validation_is_made_by_the_generators_that_are_left(toy: Toy) -> None:
    async with open_run(toy(*NO_RESTARTS)) as run, open_rl(run) as pipeline:
        await pipeline.step()
        fail_calls(pipeline, 0)
        await pipeline.step()
        assert pipeline.roles.generators.lost_ranks == {0}
        prompts = run.open_prompts(validation=True).all()
        async with run.phases.enter("validate"):
            assert len((await evaluate_prompts(run, prompts)).groups) == 8


@pytest.mark.parametrize("generators", ["cpu:0", "cpu:1-2"], ids=["colocated", "separate"])
async def test_samples_that_move_at_a_publish_train_on_tokens_of_both_versions(
    toy: Toy, generators: str
) -> None:
    options = ("rollout.max_staleness=1", "rollout.at_publish=move", "infer.slots=1")
    devices = (f"devices.generators={generators}", "rollout.drop_no_signal=false")
    # Long samples on one slot: some are in flight at a publish, however slow the training is.
    sizes = ("rollout.groups_per_step=2", "rollout.group_size=2", "sampling.max_tokens=48")
    moved = 0
    async with open_pipeline(toy(*options, *devices, *sizes, steps=6)) as pipeline:
        interrupt = pipeline.source.rollout.interrupt

        async def count_moved() -> None:
            nonlocal moved
            moved += len(pipeline.source.rollout.fleet.engine_of)
            await interrupt()
            assert pipeline.source.rollout.fleet.engine_of == {}

        pipeline.source.rollout.interrupt = count_moved  # type: ignore[method-assign]
        mixed = 0
        for step in range(4):
            report = await pipeline.step()
            for sample in (s for group in report.groups for s in group.samples):
                versions = sample.versions[sample.loss_mask]
                assert (versions[1:] >= versions[:-1]).all()
                assert step - 1 <= versions.min() <= versions.max() <= step
                mixed += len(set(versions.tolist())) > 1
    assert moved > 0
    assert mixed > 0


def kill_until_restarted(pipeline: RLPipeline, rank: int, *, restarts_fail: int = 0) -> None:
    """Make calls to the host of a generator fail until a restart; the first ones do not help."""
    transport = get_group(pipeline).transport
    send: Callable[..., Awaitable[Any]] = transport.send
    replace_hosts: Callable[..., Awaitable[Any]] = transport.replace
    restarts_left = restarts_fail + 1

    async def send_or_fail(host: Any, call: Any, shared: Any) -> Any:
        if host.roles.get("generators") == rank and restarts_left:
            raise WorkerError(f"{host} died")
        return await send(host, call, shared)

    async def count_restart(hosts: Any) -> Any:
        nonlocal restarts_left
        restarts_left -= 1
        return await replace_hosts(hosts)

    transport.send, transport.replace = send_or_fail, count_restart  # type: ignore[method-assign]


async def step_until(pipeline: RLPipeline, condition: Callable[[], bool]) -> list[Group]:
    """Make steps until the condition holds, and one more; returns its groups."""
    async with asyncio.timeout(60):
        while not condition():
            await pipeline.step()
        return list((await pipeline.step()).groups)


@pytest.mark.parametrize("restarts_fail", [0, 2])
async def test_a_lost_generator_is_restarted_with_the_current_weights(
    toy: Toy, caplog: pytest.LogCaptureFixture, restarts_fail: int
) -> None:
    async with open_pipeline(toy(*TWO_ENGINES, "rollout.max_staleness=1", steps=99)) as pipeline:
        state, fleet = pipeline.state, pipeline.source.rollout.fleet
        await pipeline.step()
        kill_until_restarted(pipeline, 1, restarts_fail=restarts_fail)
        await step_until(pipeline, lambda: pipeline.source.restarter.restarts == 1)
        groups = await step_until(pipeline, lambda: sorted(fleet.engines) == [0, 2])
        assert not pipeline.roles.generators.lost_ranks
        assert fleet.engines[2] is pipeline.roles.generators.engines[1]
        assert min(collect_versions(groups)) >= state.version - 2
        worker = await describe(pipeline, 1)
        assert worker.load.version == state.version
        check_ledger(pipeline.source.rollout.ledger)
    assert caplog.text.count("could not be restarted") == restarts_fail
    assert "generator 1 was restarted" in caplog.text


async def test_the_loss_of_the_only_generator_is_waited_for(toy: Toy) -> None:
    one_engine = ("devices.generators=cpu:1", "rollout.drop_no_signal=false")
    async with open_pipeline(toy(*one_engine, steps=99)) as pipeline:
        await pipeline.step()
        kill_until_restarted(pipeline, 0)
        report = await pipeline.step()
        assert collect_versions(report.groups) == {1}
        assert pipeline.measure(report)["controller/engine_restarts"] == 1


async def test_when_the_restarts_are_used_up_the_run_ends(toy: Toy) -> None:
    async def run() -> None:
        options = ("devices.generators=cpu:1", "rollout.engine_restarts=2")
        async with open_pipeline(toy(*options)) as pipeline:
            await pipeline.step()
            fail_calls(pipeline, 0)
            await pipeline.step()

    with pytest.raises(EngineLost, match="restarts are used up"):
        async with asyncio.timeout(60):
            await run()


async def test_two_generators_lost_at_once_are_not_restarted_more_often_than_allowed(
    toy: Toy,
) -> None:
    three = ("devices.generators=cpu:1-3", "rollout.engine_restarts=1")
    async with open_pipeline(toy(*three, "rollout.max_staleness=1", steps=99)) as pipeline:
        await pipeline.step()
        restarter, generators = pipeline.source.restarter, pipeline.roles.generators
        for rank in (0, 1):
            generators.engines[rank].mark_lost(WorkerError(f"generator {rank} died"))
        await step_until(pipeline, lambda: restarter.restarts + restarter.in_progress > 0)
        await step_until(pipeline, lambda: not restarter.in_progress)
        assert (restarter.restarts, restarter.budget) == (1, 0)
        assert generators.lost_ranks == {1}


async def test_a_generator_that_runs_out_of_memory_is_replaced(toy: Toy) -> None:
    async with open_pipeline(toy(*TWO_ENGINES, "rollout.max_staleness=1", steps=99)) as pipeline:
        await pipeline.step()
        host = pipeline.roles.device_map.host_of("generators", 1)
        transport: Any = get_group(pipeline).transport
        worker = transport._hosts[host.index]._running_roles["generators"].role

        def allocate_too_much() -> Any:
            return torch.empty(1 << 60)

        worker.engine.runner.step = allocate_too_much
        await step_until(pipeline, lambda: pipeline.source.restarter.restarts == 1)
        [fault] = read_losses(pipeline)
        assert (fault.rank, fault.kind) == (1, "killed")
        assert "out of memory" in fault.cause
        check_ledger(pipeline.source.rollout.ledger)


@pytest.mark.slow
async def test_a_generator_killed_on_ray_is_restarted(toy: Toy) -> None:
    options = ("cluster.backend=ray", "rollout.max_staleness=1", "sampling.max_tokens=16")
    async with open_pipeline(toy(*TWO_ENGINES, *options, steps=9999)) as pipeline:
        state = pipeline.state
        await pipeline.step()
        host = pipeline.roles.device_map.host_of("generators", 1)
        processes = get_group(pipeline).transport.processes  # type: ignore
        killed_pid = processes[host.index].pid
        os.kill(killed_pid, signal.SIGKILL)
        async with asyncio.timeout(90):
            while not pipeline.source.restarter.restarts:
                await pipeline.step()
        assert processes[host.index].pid != killed_pid
        trained = [uid.group for _ in range(3) for uid in await _step_and_list_uids(pipeline)]
        assert len(set(trained)) == 12
        description = await describe(pipeline, 1)
        assert description.load.version == state.version
        assert description.load.generated_tokens > 0
        assert not pipeline.roles.generators.lost_ranks
        check_ledger(pipeline.source.rollout.ledger)


@pytest.mark.slow
async def test_a_generator_killed_on_ray_costs_no_group(toy: Toy) -> None:
    options = ("cluster.backend=ray", "rollout.max_staleness=1", "sampling.max_tokens=16")
    async with open_pipeline(toy(*NO_RESTARTS, *options, steps=20)) as pipeline:
        await pipeline.step()
        host = pipeline.roles.device_map.host_of("generators", 1)
        os.kill(get_group(pipeline).transport.processes[host.index].pid, signal.SIGKILL)  # type: ignore
        trained = [uid.group for _ in range(3) for uid in await _step_and_list_uids(pipeline)]
        assert len(trained) == 48
        assert len(set(trained)) == 12
        assert pipeline.roles.generators.lost_ranks == {1}
        assert math.isfinite(pipeline.source.lag.take_ms())


async def test_a_slow_generator_is_named_in_the_faults_and_the_metrics(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pipeline(toy(*TWO_ENGINES, "sampling.max_tokens=16", steps=99)) as pipeline:
        speeds = pipeline.source.rollout.fleet.speeds
        observe = speeds.observe

        def observe_speed(engine: int, *, tokens: int, seconds: float) -> None:
            observe(engine, tokens=tokens, seconds=tokens / (40 if engine == 1 else 100))

        speeds.observe = observe_speed  # type: ignore[method-assign]
        report = await pipeline.step()
        assert pipeline.measure(report)["speed/slow_engines"] == 0
        for _ in range(19):
            report = await pipeline.step()
        assert pipeline.measure(report)["speed/slow_engines"] == 1
        [fault] = read_faults(pipeline.state.folder.path)
        assert (fault.role, fault.rank, fault.kind) == ("generators", 1, "slow")
    assert caplog.text.count("engine 1 decodes at 40% of the median speed") == 1


@pytest.mark.slow
async def test_the_requests_of_a_generator_stopped_on_ray_run_elsewhere_within_ten_seconds(
    toy: Toy,
) -> None:
    options = ("cluster.backend=ray", "rollout.max_staleness=1", "sampling.max_tokens=16")
    async with open_pipeline(toy(*TWO_ENGINES, *options, steps=9999)) as pipeline:
        rollout = pipeline.source.rollout
        for _ in range(2):
            await pipeline.step()
        host = pipeline.roles.device_map.host_of("generators", 1)
        processes = get_group(pipeline).transport.processes  # type: ignore
        engine = pipeline.roles.generators.engines[1]
        # Ten seconds, or more if polls were already late by more than half a second.
        allowed_s = max(10.0, engine.health.poll_limit_s(engine.last_load) + 3)
        stopped_pid, stopped_at = processes[host.index].pid, time.time()
        os.kill(stopped_pid, signal.SIGSTOP)
        trained = [uid for _ in range(4) for uid in await _step_and_list_uids(pipeline)]
        assert len(trained) == len(set(trained)) == 4 * 16
        [fault] = read_losses(pipeline)
        assert (fault.role, fault.rank, fault.kind) == ("generators", 1, "hung")
        assert fault.detected_at - stopped_at < allowed_s
        assert fault.failed_at < stopped_at + 1
        await step_until(pipeline, lambda: pipeline.source.restarter.restarts == 1)
        assert processes[host.index].pid != stopped_pid
        check_ledger(rollout.ledger)
        folder = pipeline.state.folder.path
        [fault] = read_losses(pipeline)
        assert fault.rejoined_at is not None
    assert audit(read_log(folder / "ledger.jsonl")).groups.trained % 4 == 0


def read_losses(pipeline: RLPipeline) -> list[Fault]:
    """The faults of a run, without engines that a busy machine made slow."""
    return [fault for fault in read_faults(pipeline.state.folder.path) if fault.kind != "slow"]


async def _step_and_list_uids(pipeline: RLPipeline) -> list[Any]:
    async with asyncio.timeout(60):
        report = await pipeline.step()
    return [sample.uid for group in report.groups for sample in group.samples]


def engine_of(pipeline: RLPipeline, rank: int) -> Any:
    """The engine of a generator, in its inline host."""
    group = get_group(pipeline)
    host = group.transport._hosts[group.device_map.host_of("generators", rank).index]  # type: ignore
    return host._running_roles["generators"].role.engine


def fail_method(engine: Any, method: str) -> None:
    """Make a method of the engine raise EngineLost; its host stays alive."""

    async def raise_lost(*args: Any, **options: Any) -> Any:
        raise EngineLost("its own process died")

    setattr(engine, method, raise_lost)


async def test_an_engine_lost_in_a_running_host_is_restarted_in_a_new_one(
    toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pipeline(toy(*TWO_ENGINES, "rollout.max_staleness=1", steps=99)) as pipeline:
        state = pipeline.state
        await pipeline.step()
        lost_engine = engine_of(pipeline, 1)
        fail_method(lost_engine, "generate")
        await step_until(pipeline, lambda: pipeline.source.restarter.restarts == 1)
        assert engine_of(pipeline, 1) is not lost_engine
        assert lost_engine._closed
        assert not pipeline.roles.generators.lost_ranks
        engine_info = await describe(pipeline, 1)
        assert engine_info.load.version == state.version
        check_ledger(pipeline.source.rollout.ledger)
    assert "generator 1 was restarted" in caplog.text


async def test_an_engine_that_is_lost_over_a_commit_is_left_out(toy: Toy) -> None:
    async with open_pipeline(toy(*NO_RESTARTS)) as pipeline:
        fail_method(engine_of(pipeline, 1), "update")
        await pipeline.step()
        assert pipeline.roles.generators.lost_ranks == {1}
        report = await pipeline.step()
        assert collect_versions(report.groups) == {1}


async def test_a_restarted_generator_is_located_again(toy: Toy) -> None:
    async with open_pipeline(toy(*TWO_ENGINES, "rollout.max_staleness=1", steps=99)) as pipeline:
        await pipeline.step()
        forgotten: list[int] = []
        forget = pipeline.publisher.forget

        def record_forgotten(rank: int) -> None:
            forgotten.append(rank)
            forget(rank)

        pipeline.publisher.forget = record_forgotten  # type: ignore[method-assign]
        kill_until_restarted(pipeline, 1)
        await step_until(pipeline, lambda: pipeline.source.restarter.restarts == 1)
    assert forgotten == [1]
