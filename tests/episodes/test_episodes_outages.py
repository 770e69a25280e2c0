"""Episodes whose server is unavailable: they restart when it replies again, and fail at the time
limit of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes import FakeCodec, FakeEngine

from rollick.envs.child import EnvStatus
from rollick.envs.pool import EnvLimits, EnvPool
from rollick.episodes import environment
from rollick.episodes.base import SingleEngineAccess
from rollick.episodes.environment import MAX_EPISODE_ATTEMPTS, EnvEpisodeRunner
from rollick.episodes.transcript import EnvTask
from rollick.testing.fakes import prompt
from rollick.types import Sample, SampleId, Sampling, ScoreStatus

ENVS = '''
from pathlib import Path
from rollick import TextEnv
from rollick.errors import ServiceUnavailable

class Remote(TextEnv):
    """Its first `outages` calls do not reach the server: of reset, or of step."""
    def __init__(self, *, counter, outages, call="reset"):
        self.counter, self.outages, self.call = Path(counter), outages, call
    def reach(self, call):
        if call == self.call:
            with self.counter.open("a") as file:
                file.write(".")
            if len(self.counter.read_text()) <= self.outages:
                raise ServiceUnavailable("the server is away")
    def reset(self, seed):
        self.reach("reset")
        return f"<{seed}>", {}
    def step(self, action):
        self.reach("step")
        return "", 1.0, True, False, {}
'''
NEVER = 10_000


@asynccontextmanager
async def open_pool(folder: Path, *, step_s: float) -> AsyncGenerator[EnvPool]:
    (folder / "mine.py").write_text(ENVS)
    names, limits = {"Remote": "mine.py:Remote"}, EnvLimits(step_s=step_s)
    async with EnvPool.open(
        names, processes=1, base=folder, output=folder / "log", limits=limits
    ) as pool:
        yield pool


async def run_sample(pool: EnvPool, folder: Path, *, outages: int, call: str = "reset") -> Sample:
    options = {"counter": str(folder / "calls"), "outages": outages, "call": call}
    runner = EnvEpisodeRunner(
        codec=FakeCodec(),
        pool=pool,
        task_for=lambda _: EnvTask("Remote", options, 7, 1, 0, 0),
        sampling=lambda _: Sampling(temperature=0.7, max_tokens=5),
        max_length=100,
        seed=1,
    )
    access = SingleEngineAccess(FakeEngine(reply=lambda request: "a", version=4))
    return await runner.run(SampleId(3, 1), prompt("task 7"), access)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "OUTAGE_PAUSE_S", 0.05)


@pytest.mark.parametrize(("call", "outages"), [("reset", 5), ("step", MAX_EPISODE_ATTEMPTS - 1)])
async def test_an_episode_whose_server_returns_gives_the_sample_of_one_without_an_outage(
    tmp_path: Path, call: str, outages: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pool(tmp_path, step_s=60) as pool:
        uninterrupted = await run_sample(pool, tmp_path, outages=0)
        (tmp_path / "calls").unlink(missing_ok=True)
        with caplog.at_level(logging.WARNING, "rollick"):
            restarted = await run_sample(pool, tmp_path, outages=outages, call=call)
        assert pool.stats.episode_restarts == outages
        assert pool.stats.failures == {EnvStatus.UNAVAILABLE: outages}
    assert uninterrupted.episode is not None
    assert restarted.episode is not None
    assert restarted.episode.score == uninterrupted.episode.score
    assert restarted.token_ids.tolist() == uninterrupted.token_ids.tolist()
    assert "the server is away; its episodes start again when it answers" in caplog.text


async def test_an_episode_whose_server_stays_away_is_unavailable_after_the_time_of_a_step(
    tmp_path: Path,
) -> None:
    async with open_pool(tmp_path, step_s=1) as pool:
        started_at = time.monotonic()
        unavailable = await run_sample(pool, tmp_path, outages=NEVER)
        assert 1 < time.monotonic() - started_at < 10
    assert unavailable.episode is not None
    score = unavailable.episode.score
    assert (score.ok, score.status) == (False, ScoreStatus.UNAVAILABLE)
    assert score.detail == "environment Remote unavailable: the server is away"


async def test_an_episode_that_keeps_losing_its_connection_ends_after_three_attempts(
    tmp_path: Path,
) -> None:
    async with open_pool(tmp_path, step_s=60) as pool:
        unavailable = await run_sample(pool, tmp_path, outages=NEVER, call="step")
        assert pool.stats.failures == {EnvStatus.UNAVAILABLE: MAX_EPISODE_ATTEMPTS}
    assert unavailable.episode is not None
    assert unavailable.episode.score.status is ScoreStatus.UNAVAILABLE
