"""Engines that hang or are slow in a live process, on Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import faulty_engine
import pytest
import ray
from faulty_engine import plan_fault, taken_by
from ledger_audit import check_ledger
from toy_runs import toy

from rollick.children.process_tree import process_exists
from rollick.cluster.ray_start import start_ray
from rollick.observe.faults import Fault, read_faults
from rollick.pipelines.open_run import open_run
from rollick.pipelines.rl import RLPipeline, open_rl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_ENGINES = (
    "cluster.backend=ray",
    "devices.generators=cpu:1-2",
    "infer.engine=faulty",
    "rollout.drop_no_signal=false",
    "sampling.max_tokens=16",
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with the fault of an engine. Ray's workers inherit the variable with its path."""
    folder = tmp_path_factory.mktemp("hung")
    path = faulty_engine.install(folder / "plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([path, *filter(None, sys.path)]))
        patch.setenv(faulty_engine.VARIABLE, str(folder / "plan"))
        patch.syspath_prepend(path.split(os.pathsep)[0])
        assert start_ray(None)
        yield folder / "plan"
        ray.shutdown()


@asynccontextmanager
async def open_pipeline(
    tiny_folder: Path, runs: Path, *overrides: str
) -> AsyncGenerator[RLPipeline]:
    loaded = toy(tiny_folder, runs, *TWO_ENGINES, *overrides, steps=9999)
    async with open_run(loaded) as run, open_rl(run) as pipeline:
        yield pipeline


def list_processes(pipeline: RLPipeline) -> list[int]:
    processes = pipeline.roles.generators.group.worker_processes()
    return [processes[f"generators {rank}"] for rank in (0, 1)]


def find_faults(pipeline: RLPipeline, kind: str) -> list[Fault]:
    faults = read_faults(pipeline.state.folder.path)
    return [fault for fault in faults if fault.role == "generators" and fault.kind == kind]


async def test_the_requests_of_an_engine_whose_step_blocks_run_elsewhere_and_it_is_replaced(
    tiny_folder: Path, tmp_path: Path, plan: Path
) -> None:
    async with open_pipeline(tiny_folder, tmp_path) as pipeline:
        pipeline.roles.generators.group.deadlines.floors_s["progress"] = 4.0
        for _ in range(2):
            await pipeline.step()
        before = list_processes(pipeline)
        plan_fault(plan, "hang")
        async with asyncio.timeout(90):
            report = await pipeline.step()
        hung = taken_by(plan)
        trained = [sample.uid for group in report.groups for sample in group.samples]
        assert len(set(trained)) == 16
        [fault] = find_faults(pipeline, "hung")
        assert fault.rank == before.index(hung)
        assert "generated no token for" in fault.cause
        async with asyncio.timeout(120):
            while not pipeline.source.restarter.restarts:
                await pipeline.step()
        assert hung not in list_processes(pipeline)
        assert not process_exists(hung)
        assert len(set(before) & set(list_processes(pipeline))) == 1
        assert not pipeline.roles.generators.lost_ranks
        check_ledger(pipeline.source.rollout.ledger)


async def test_an_engine_with_slow_steps_is_named_within_twenty_steps_and_gets_less_work(
    tiny_folder: Path, tmp_path: Path, plan: Path
) -> None:
    plan_fault(plan, "slow")
    async with open_pipeline(tiny_folder, tmp_path, "infer.slots=16") as pipeline:
        fleet, requests = pipeline.source.rollout.fleet, Counter[int]()
        completed = fleet.completed

        def count_request(number: int, *args: Any) -> None:
            requests[number] += 1
            completed(number, *args)

        fleet.completed = count_request  # type: ignore[method-assign]
        for _ in range(20):
            if not fleet.speeds.slow_workers:
                await pipeline.step()
        assert fleet.speeds.slow_workers
        requests.clear()
        for _ in range(3):
            await pipeline.step()
        slow = list_processes(pipeline).index(taken_by(plan))
        [fault] = find_faults(pipeline, "slow")
        assert (fault.rank, fleet.speeds.slow_workers) == (slow, [slow])
        assert sum(requests.values()) == 48
        assert requests[slow] < 0.75 * requests[1 - slow], requests
