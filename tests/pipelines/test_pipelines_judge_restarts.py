"""Requests to a judge whose engines are lost: they are retried as soon as an engine is alive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollick.errors import EngineLost, WorkerError
from rollick.observe.faults import FaultLog
from rollick.pipelines.judge import JudgeRestarter


class FakeEngine:
    """Returns its rank after `release`; fails if it was lost before."""

    def __init__(self, rank: int) -> None:
        self.rank, self.name = rank, f"judge {rank}"
        self.failure: WorkerError | None = None
        self.fault, self.failed_at = "killed", None
        self.lost_event, self.release = asyncio.Event(), asyncio.Event()

    def lose(self) -> None:
        self.failure = WorkerError(f"{self.name} died")
        self.lost_event.set()
        self.release.set()

    async def generate(self) -> int:
        await self.release.wait()
        if self.failure is not None:
            raise EngineLost(self.failure.message)
        return self.rank


class FakeJudge:
    """An EngineGroup whose requests go to its first engine that is alive."""

    role = "judge"

    def __init__(self, ranks: int) -> None:
        self.ranks, self.engines = ranks, [FakeEngine(rank) for rank in range(ranks)]
        self.group = SimpleNamespace(device_map=SimpleNamespace(host_of=lambda role, rank: rank))

    @property
    def alive(self) -> list[FakeEngine]:
        return [engine for engine in self.engines if engine.failure is None]

    async def sample(self, request: Any) -> int:
        if not self.alive:
            raise EngineLost("every judge engine is lost")
        return await self.alive[0].generate()

    def has_dedicated_host(self, rank: int) -> bool:
        return True

    async def restart(self, rank: int) -> None:
        raise TypeError("a bug")


def make_restarter(judge: FakeJudge, folder: Path, *, budget: int) -> Any:
    recovery: Any = SimpleNamespace(repairs_of=lambda host: 0)
    group: Any = judge
    return JudgeRestarter(group, recovery, FaultLog(folder), budget)


async def send_two_requests(restarter: Any) -> list[asyncio.Task[Any]]:
    requests = [asyncio.create_task(restarter.generate(None)) for _ in range(2)]
    await asyncio.sleep(0)
    return requests


async def test_all_requests_of_a_lost_judge_engine_go_to_the_other_one(tmp_path: Path) -> None:
    judge = FakeJudge(2)
    restarter = make_restarter(judge, tmp_path, budget=0)
    requests = await send_two_requests(restarter)
    judge.engines[0].lose()
    restarter.on_given_up(0)
    judge.engines[1].release.set()
    async with asyncio.timeout(5):
        assert await asyncio.gather(*requests) == [1, 1]


async def test_requests_fail_if_a_bug_ends_the_restarts_of_the_judge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = FakeJudge(1)
    restarter = make_restarter(judge, tmp_path, budget=3)
    async with restarter.watch(), asyncio.timeout(5):
        requests = await send_two_requests(restarter)
        judge.engines[0].lose()
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert [type(result) for result in results] == [EngineLost, EngineLost]
    assert "judge 0 is not restarted any more" in caplog.text
    assert "TypeError: a bug" in caplog.text
