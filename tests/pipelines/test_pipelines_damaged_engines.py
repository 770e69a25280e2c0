"""Engines whose weights change in their memory, by a flipped byte. No sample of a damaged engine is
trained on, and the engine is replaced by one with verified weights."""

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

TWO_ENGINES = ("devices.generators=cpu:1-2", "rollout.drop_no_signal=false", "infer.slots=8")
DETERMINISTIC = (*TWO_ENGINES, "run.deterministic=true")


@asynccontextmanager
async def open_pipeline(loaded: LoadedRecipe) -> AsyncGenerator[RLPipeline]:
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        yield pipeline


def get_engine(pipeline: RLPipeline, rank: int) -> Any:
    """The inline engine of a generator."""
    group = pipeline.roles.generators.group
    transport: Any = group.transport
    host = transport._hosts[group.device_map.host_of("generators", rank).index]
    return host._running_roles["generators"].role.engine


def find_faults(folder: Path, kind: str) -> list[Any]:
    return [fault for fault in read_faults(folder) if fault.kind == kind]


def record_groups(pipeline: RLPipeline, rank: int) -> set[int]:
    """Record, from now on, the groups with samples of the engine of `rank`. Returns their set."""
    fleet = pipeline.source.rollout.fleet
    record, groups = fleet.unchecked.record, set[int]()
    damaged = pipeline.roles.generators.engines[rank]

    def record_group(number: int, uid: Any) -> None:
        if fleet.engines.get(number) is damaged:
            groups.add(uid.group)
        record(number, uid)

    fleet.unchecked.record = record_group  # type: ignore[method-assign]
    return groups


def get_group_ids(groups: list[Group] | Any) -> set[int]:
    return {group.uid for group in groups}


async def run_damaged(loaded: LoadedRecipe, *, steps: int = 3) -> tuple[Path, set[int]]:
    """A byte of engine 1 flips before step 2. Returns the folder and the damaged groups."""
    async with open_pipeline(loaded) as pipeline:
        rollout, trained = pipeline.source.rollout, set[int]()
        await pipeline.step()
        damaged = record_groups(pipeline, 1)
        flip_byte(get_engine(pipeline, 1))
        for _ in range(steps - 1):
            report = await pipeline.step()
            trained |= get_group_ids(report.groups)
            check_ledger(rollout.ledger)
        assert damaged
        assert not damaged & trained
        return pipeline.state.folder.path, damaged


@pytest.mark.parametrize("staleness", [0, 1])
async def test_the_samples_of_a_damaged_engine_are_dropped_and_replaced(
    toy: Toy, staleness: int, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = toy(*DETERMINISTIC, f"rollout.max_staleness={staleness}", steps=99)
    folder, damaged = await run_damaged(loaded)
    [fault] = find_faults(folder, "corrupt")
    assert (fault.role, fault.rank) == ("generators", 1)
    assert "its memory was damaged" in fault.cause
    counts = audit(read_log(folder / "ledger.jsonl"))
    assert counts.groups.trained == 12
    assert set(counts.dropped_by_reason) == {DAMAGED}
    # With staleness, earlier groups of the engine that were not checked yet are dropped too.
    assert counts.dropped_by_reason[DAMAGED] >= len(damaged)
    assert staleness or counts.dropped_by_reason[DAMAGED] == len(damaged)
    assert "engine 1 is lost" in caplog.text


async def test_a_damaged_engine_returns_with_verified_weights(toy: Toy) -> None:
    async with open_pipeline(toy(*DETERMINISTIC, steps=99)) as pipeline:
        await pipeline.step()
        flip_byte(get_engine(pipeline, 1))
        while not pipeline.source.restarter.restarts:
            await pipeline.step()
        await pipeline.step()
        engines = [get_engine(pipeline, rank) for rank in (0, 1)]
        assert engines[0].fingerprint() == engines[1].fingerprint()
        assert not pipeline.roles.generators.lost_ranks
        [fault] = find_faults(pipeline.state.folder.path, "corrupt")
        assert fault.rejoined_at is not None


async def test_the_only_engine_may_be_damaged(toy: Toy) -> None:
    one_engine = (
        "devices.generators=cpu:1",
        "run.deterministic=true",
        "rollout.drop_no_signal=false",
    )
    async with open_pipeline(toy(*one_engine, steps=99)) as pipeline:
        await pipeline.step()
        flip_byte(get_engine(pipeline, 0))
        report = await pipeline.step()
        assert len(report.groups) == 4
        assert pipeline.source.restarter.restarts == 1
        assert get_group_ids(report.groups) == set(range(8, 12))


async def test_a_damaged_engine_gives_the_same_run_each_time(toy: Toy) -> None:
    one_engine = (
        "devices.generators=cpu:1",
        "run.deterministic=true",
        "rollout.drop_no_signal=false",
    )

    async def run() -> list[Any]:
        async with open_pipeline(toy(*one_engine, steps=99)) as pipeline:
            await pipeline.step()
            flip_byte(get_engine(pipeline, 0))
            reports = [await pipeline.step() for _ in range(2)]
            return [(r.train.loss, r.train.grad_norm) for r in reports if r.train is not None]

    assert await run() == await run()


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_byte_that_flips_before_a_publish_is_found_by_it(toy: Toy, engines: int) -> None:
    """In an asynchronous run the engines go on while the policy trains."""
    options = (*DETERMINISTIC, f"devices.generators=cpu:1-{engines}", "rollout.max_staleness=1")
    async with open_pipeline(toy(*options, steps=99)) as pipeline:
        last = engines - 1
        await pipeline.step()
        train = pipeline.train

        async def flip_then_train(batch: Any) -> Any:
            engine = get_engine(pipeline, last)
            tokens = engine.load().generated_tokens
            flip_byte(engine)
            while engine.load().generated_tokens == tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await train(batch)

        pipeline.train = flip_then_train  # type: ignore[method-assign]
        await pipeline.step()
        pipeline.train = train  # type: ignore[method-assign]
        assert pipeline.roles.generators.lost_ranks == {last}
        assert len(find_faults(pipeline.state.folder.path, "corrupt")) == 1
        while not pipeline.source.restarter.restarts:
            await pipeline.step()
        assert (await pipeline.step()).train is not None
        check_ledger(pipeline.source.rollout.ledger)
