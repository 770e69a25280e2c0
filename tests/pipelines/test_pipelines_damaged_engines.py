"""Engines whose weights change in their memory: a byte is really flipped. No sample of a damaged
engine is trained on, and the engine is replaced by one with verified weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty_engine import flip_byte
from ledger_audit import audit, check_ledger

from rollick.config.load import LoadedRecipe
from rollick.observe.faults import read_faults
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import RLPipeline, open_rl
from rollick.rollout.ledger.log import read_log
from rollick.rollout.unchecked import DAMAGED
from rollick.types import Group

Toy = Callable[..., LoadedRecipe]

TWO = ("devices.generators=cpu:1-2", "rollout.drop_no_signal=false", "infer.slots=8")
DETERMINISTIC = (*TWO, "run.deterministic=true")


@asynccontextmanager
async def opened(loaded: LoadedRecipe) -> AsyncGenerator[RLPipeline]:
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        yield pipeline


def engine_of(pipeline: RLPipeline, rank: int) -> Any:
    """The inline engine of a generator."""
    group = pipeline.roles.generators.group
    transport: Any = group.transport
    host = transport._hosts[group.device_map.host_of("generators", rank).index]
    return host._running_roles["generators"].role.engine


def faults_of(folder: Path, kind: str) -> list[Any]:
    return [fault for fault in read_faults(folder) if fault.kind == kind]


def note_groups(pipeline: RLPipeline, rank: int) -> set[int]:
    """The groups that the engine has a part in from now on."""
    fleet = pipeline.source.rollout.fleet
    record, groups = fleet.unchecked.record, set[int]()
    damaged = pipeline.roles.generators.engines[rank]

    def noting(number: int, uid: Any) -> None:
        if fleet.engines.get(number) is damaged:
            groups.add(uid.group)
        record(number, uid)

    fleet.unchecked.record = noting  # type: ignore[method-assign]
    return groups


def group_ids(groups: list[Group] | Any) -> set[int]:
    return {group.uid for group in groups}


async def damaged_run(loaded: LoadedRecipe, *, steps: int = 3) -> tuple[Path, set[int]]:
    """A byte of engine 1 flips before step 2. Returns the folder and the damaged groups."""
    async with opened(loaded) as pipeline:
        rollout, trained = pipeline.source.rollout, set[int]()
        await pipeline.step()
        damaged = note_groups(pipeline, 1)
        flip_byte(engine_of(pipeline, 1))
        for _ in range(steps - 1):
            report = await pipeline.step()
            trained |= group_ids(report.groups)
            check_ledger(rollout.ledger)
        assert damaged
        assert not damaged & trained
        return pipeline.state.folder.path, damaged


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_samples_of_a_damaged_engine_are_dropped_and_replaced(
    toy: Toy, staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = toy(*DETERMINISTIC, f"rollout.max_staleness={staleness}", steps=99)
    folder, damaged = await damaged_run(loaded)
    [fault] = faults_of(folder, "corrupt")
    assert (fault.role, fault.rank) == ("generators", 1)
    assert "its memory was damaged" in fault.cause
    counts = audit(read_log(folder / "ledger.jsonl"))
    assert counts.groups.trained == 12
    assert set(counts.dropped_by_reason) == {DAMAGED}
    # With staleness, also those that the engine finished before, and that no check had covered.
    assert counts.dropped_by_reason[DAMAGED] >= len(damaged)
    assert staleness or counts.dropped_by_reason[DAMAGED] == len(damaged)
    assert "engine 1 is lost" in caplog.text


async def test_a_damaged_engine_returns_with_verified_weights(toy: Toy) -> None:
    async with opened(toy(*DETERMINISTIC, steps=99)) as pipeline:
        await pipeline.step()
        flip_byte(engine_of(pipeline, 1))
        while not pipeline.source.restarter.restarts:
            await pipeline.step()
        await pipeline.step()
        engines = [engine_of(pipeline, rank) for rank in (0, 1)]
        assert engines[0].fingerprint() == engines[1].fingerprint()
        assert not pipeline.roles.generators.lost_ranks
        [fault] = faults_of(pipeline.state.folder.path, "corrupt")
        assert fault.rejoined_at is not None


async def test_the_only_engine_may_be_damaged(toy: Toy) -> None:
    one = ("devices.generators=cpu:1", "run.deterministic=true", "rollout.drop_no_signal=false")
    async with opened(toy(*one, steps=99)) as pipeline:
        await pipeline.step()
        flip_byte(engine_of(pipeline, 0))
        report = await pipeline.step()
        assert len(report.groups) == 4
        assert pipeline.source.restarter.restarts == 1
        assert group_ids(report.groups) == set(range(8, 12))


async def test_a_damaged_engine_gives_the_same_run_each_time(toy: Toy) -> None:
    one = ("devices.generators=cpu:1", "run.deterministic=true", "rollout.drop_no_signal=false")

    async def run() -> list[Any]:
        async with opened(toy(*one, steps=99)) as pipeline:
            await pipeline.step()
            flip_byte(engine_of(pipeline, 0))
            reports = [await pipeline.step() for _ in range(2)]
            return [(r.train.loss, r.train.grad_norm) for r in reports if r.train is not None]

    assert await run() == await run()


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_byte_that_flips_before_a_publish_is_found_by_it(toy: Toy, engines: int) -> None:
    """In an asynchronous run the engines go on while the policy trains."""
    options = (*DETERMINISTIC, f"devices.generators=cpu:1-{engines}", "rollout.max_staleness=1")
    async with opened(toy(*options, steps=99)) as pipeline:
        last = engines - 1
        await pipeline.step()
        train = pipeline.train

        async def flip_then_train(batch: Any) -> Any:
            engine = engine_of(pipeline, last)
            tokens = engine.load().generated_tokens
            flip_byte(engine)
            while engine.load().generated_tokens == tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await train(batch)

        pipeline.train = flip_then_train  # type: ignore[method-assign]
        await pipeline.step()
        pipeline.train = train  # type: ignore[method-assign]
        assert pipeline.roles.generators.lost_ranks == {last}
        assert len(faults_of(pipeline.state.folder.path, "corrupt")) == 1
        while not pipeline.source.restarter.restarts:
            await pipeline.step()
        assert (await pipeline.step()).train is not None
        check_ledger(pipeline.source.rollout.ledger)
