"""The pool with real child processes: bad environments, exact counts, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollick.envs.base import seeded_random
from rollick.envs.child import EnvCallResult, EnvStatus
from rollick.envs.frozen_lake import FrozenLake
from rollick.envs.pool import EnvLimits, EnvPool, EnvSession
from rollick.errors import EnvError
from rollick.observe.faults import FaultLog
from rollick.types import Turn

ENVS = '''
import os, time
from rollick import TextEnv
from rollick.types import Turn
from rollick.envs.base import seeded_random

class Counting(TextEnv):
    """Says how many steps it had; ends after `last` of them. Actions are what happens."""
    def __init__(self, last=3, messages=False):
        self.last, self.messages, self.steps = last, messages, 0
    def reset(self, seed):
        self.seed = seed
        return ([Turn("system", "count"), {"role": "user", "content": f"{seed}"}]
                if self.messages else f"{seed}:0"), {"pid": os.getpid()}
    def step(self, action):
        self.steps += 1
        if action == "raise":
            raise ValueError("no good")
        if action == "hang":
            time.sleep(600)
        if action == "die":
            os._exit(3)
        if action == "nap":
            time.sleep(0.2)
        if action == "exit":
            raise SystemExit(1)
        if action == "garbage":
            return "only text"
        if action == "nan":
            return "", float("nan"), False, False, {}
        if action == "write":
            print("a line for the log"); os.write(1, b"raw")
        return f"{self.seed}:{self.steps}", 0.5, self.steps == self.last, False, {"n": self.steps}

class Flaky(Counting):
    """Raises in 3 of 10 resets, and counts on otherwise."""
    def reset(self, seed):
        if seeded_random("flaky", seed).random() < 0.3:
            raise RuntimeError("bad luck")
        return super().reset(seed)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(ENVS)
    return tmp_path


def open_pool(folder: Path, *, limits: EnvLimits | None = None, **settings: Any) -> Any:
    names = {"count": "mine.py:Counting", "flaky": "mine.py:Flaky"}
    settings = {"processes": 1, "base": folder, "output": folder / "log"} | settings
    return EnvPool.open(names, limits=limits, **settings)


async def send_actions(session: EnvSession, *actions: str) -> list[EnvCallResult]:
    return [await session.step(action) for action in actions]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def get_pid(session: EnvSession) -> int:
    assert session.opening.response is not None
    return session.opening.response.info["pid"]


def count_open_episodes(pool: EnvPool) -> int:
    return sum(len(worker.sessions) for worker in pool._workers)


async def test_an_episode_is_played_to_its_end(folder: Path) -> None:
    async with open_pool(folder) as pool:
        session = await pool.reset("count", {"last": 2}, 7)
        assert session.opening.response.observation == "7:0"
        first, last = await send_actions(session, "a", "b")
        assert (first.response.observation, first.response.reward, first.response.done) == (
            "7:1", 0.5, False,
        )  # fmt: skip
        assert (last.response.terminated, last.response.info) == (True, {"n": 2})
        assert (session.done, session.status) == (True, EnvStatus.OK)
        with pytest.raises(EnvError, match="is over"):
            await session.step("c")
        assert pool.stats.failures == {}
        assert count_open_episodes(pool) == 0


async def test_messages_arrive_as_turns(folder: Path) -> None:
    async with open_pool(folder) as pool:
        session = await pool.reset("count", {"messages": True}, 5)
        assert session.opening.response.observation == (Turn("system", "count"), Turn("user", "5"))


async def test_a_thousand_episodes_share_two_processes(folder: Path) -> None:
    async with open_pool(folder, processes=2) as pool:
        sessions = await asyncio.gather(*(pool.reset("count", {}, n) for n in range(1000)))
        assert count_open_episodes(pool) == 1000
        episodes_per_process = Counter(get_pid(session) for session in sessions)
        assert sorted(episodes_per_process.values()) == [500, 500]
        replies = await asyncio.gather(*(session.step("x") for session in sessions))
        seen = [reply.response.observation for reply in replies]
        assert seen == [f"{n}:1" for n in range(1000)]
        for session in sessions:
            session.close()
        assert count_open_episodes(pool) == 0


async def test_an_environment_that_raises_three_times_in_ten_is_counted_exactly(
    folder: Path,
) -> None:
    failing = sum(seeded_random("flaky", seed).random() < 0.3 for seed in range(200))
    assert 40 < failing < 80
    async with open_pool(folder, processes=2) as pool:

        async def episode(seed: int) -> EnvStatus:
            session = await pool.reset("flaky", {}, seed)
            while not session.done:
                await session.step("x")
            return session.status

        counts = Counter(await asyncio.gather(*(episode(seed) for seed in range(200))))
        assert counts == {EnvStatus.OK: 200 - failing, EnvStatus.FAILED: failing}
        assert pool.stats.failures == {EnvStatus.FAILED: failing}
        assert pool.stats.restarts == 0


@pytest.mark.parametrize(
    ("action", "status", "detail"),
    [
        ("raise", EnvStatus.FAILED, "ValueError: no good (mine.py:"),
        ("exit", EnvStatus.FAILED, "SystemExit: 1"),
        ("garbage", EnvStatus.GARBAGE, "step() must return (observation, reward, terminated"),
        ("nan", EnvStatus.GARBAGE, "the reward must be a finite number, not float nan"),
    ],
)
async def test_a_bad_answer_ends_its_own_episode_only(
    folder: Path, action: str, status: EnvStatus, detail: str
) -> None:
    async with open_pool(folder) as pool:
        bad, good = await pool.reset("count", {}, 1), await pool.reset("count", {}, 2)
        reply = await bad.step(action)
        assert reply.status == bad.status == status
        assert detail in reply.detail
        assert (await good.step("x")).ok
        assert (pool.stats.failures, pool.stats.restarts) == ({status: 1}, 0)


async def test_a_hang_costs_its_process_and_only_the_episodes_in_it(folder: Path) -> None:
    limits = EnvLimits(step_s=0.5)
    async with open_pool(folder, processes=2, limits=limits) as pool:
        sessions = [await pool.reset("count", {}, n) for n in range(6)]
        bad = sessions[0]
        same_process = [s for s in sessions[1:] if get_pid(s) == get_pid(bad)]
        other_process = [s for s in sessions if get_pid(s) != get_pid(bad)]
        assert (len(same_process), len(other_process)) == (2, 3)
        reply = await bad.step("hang")
        assert reply.status is EnvStatus.TIMEOUT
        assert reply.detail == "no answer within 0.5 s; its process was killed"
        assert not is_alive(get_pid(bad))
        assert [(await session.step("x")).status for session in same_process] == [
            EnvStatus.LOST
        ] * 2
        assert [(await session.step("x")).status for session in other_process] == [EnvStatus.OK] * 3
        new_sessions = [await pool.reset("count", {}, n) for n in range(6)]
        assert len({get_pid(session) for session in new_sessions}) <= 2
        assert all(session.opening.ok for session in new_sessions)
        assert pool.stats.failures == {EnvStatus.TIMEOUT: 1, EnvStatus.LOST: 2}
        assert pool.stats.restarts == 1


async def test_a_crash_names_the_one_that_ran_and_loses_those_that_waited(folder: Path) -> None:
    async with open_pool(folder) as pool:
        sessions = [await pool.reset("count", {}, n) for n in range(3)]
        actions = ("x", "die", "x")
        steps = (session.step(action) for session, action in zip(sessions, actions, strict=True))
        replies = await asyncio.gather(*steps)
        statuses = [reply.status for reply in replies]
        assert statuses == [EnvStatus.OK, EnvStatus.CRASHED, EnvStatus.LOST]
        assert replies[1].detail == "its process died (exit code 3)"
        # The episode whose step had ended is lost, too; its next step reports it.
        assert (await sessions[0].step("x")).status is EnvStatus.LOST
        assert pool.stats.failures == {EnvStatus.CRASHED: 1, EnvStatus.LOST: 2}
        assert (await pool.reset("count", {}, 9)).opening.ok


async def test_an_idle_process_that_is_killed_is_replaced(folder: Path) -> None:
    async with open_pool(folder) as pool:
        session = await pool.reset("count", {}, 0)
        os.kill(get_pid(session), signal.SIGKILL)
        assert (await session.step("x")).status is EnvStatus.LOST
        assert (await pool.reset("count", {}, 1)).opening.ok
        assert (pool.stats.restarts, pool.stats.failures) == (1, {EnvStatus.LOST: 1})


async def test_a_stopped_process_is_detected_because_it_does_not_respond(folder: Path) -> None:
    async with open_pool(folder, limits=EnvLimits(step_s=0.3)) as pool:
        session = await pool.reset("count", {}, 0)
        os.kill(get_pid(session), signal.SIGSTOP)
        assert (await session.step("x")).status is EnvStatus.LOST
        assert (await pool.reset("count", {}, 1)).opening.ok


async def test_the_steps_of_an_episode_have_a_deadline_together(folder: Path) -> None:
    async with open_pool(folder, limits=EnvLimits(step_s=60, episode_s=0.3)) as pool:
        slow, other = await pool.reset("count", {}, 0), await pool.reset("count", {}, 1)
        first = await slow.step("nap")
        assert first.ok
        reply = await slow.step("hang")
        assert (reply.status, slow.done) == (EnvStatus.TIMEOUT, True)
        assert reply.detail == "the episode took more than 0.3 s; its process was killed"
        assert (await other.step("x")).status is EnvStatus.LOST


async def test_a_hanging_step_failed_when_it_began(folder: Path) -> None:
    faults = FaultLog(folder)
    limits = EnvLimits(step_s=60, episode_s=0.5)
    async with open_pool(folder, limits=limits, faults=faults) as pool:
        session = await pool.reset("count", {}, 0)
        begun_at = time.time()
        await session.step("hang")
    [fault] = faults.faults
    assert begun_at <= fault.failed_at <= fault.detected_at - 0.4


async def test_an_answer_that_comes_too_late_is_a_timeout_counted_once(folder: Path) -> None:
    async with open_pool(folder, limits=EnvLimits(step_s=60, episode_s=0.19)) as pool:
        slow, other = await pool.reset("count", {}, 0), await pool.reset("count", {}, 1)
        # The step takes 0.2 s and ends about when the pool checks the deadline, so the process may
        # be kept or killed.
        reply = await slow.step("nap")
        assert reply.status is EnvStatus.TIMEOUT
        assert (await other.step("x")).status in (EnvStatus.OK, EnvStatus.LOST)
        assert pool.stats.failures[EnvStatus.TIMEOUT] == 1


async def test_threads_let_slow_environments_wait_at_the_same_time(folder: Path) -> None:
    async with open_pool(folder, threads=8) as pool:
        sessions = [await pool.reset("count", {}, n) for n in range(8)]
        begun = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(session.step("nap") for session in sessions))
        assert all(reply.ok for reply in replies)
        assert asyncio.get_running_loop().time() - begun < 8 * 0.2


async def test_resets_wait_for_room(folder: Path) -> None:
    async with open_pool(folder, limits=EnvLimits(episodes=2)) as pool:
        first, _ = await pool.reset("count", {}, 0), await pool.reset("count", {}, 1)
        third = asyncio.create_task(pool.reset("count", {}, 2))
        await asyncio.sleep(0.05)
        assert not third.done()
        first.close()
        assert (await third).opening.ok


async def test_a_cancelled_step_leaves_the_episode(folder: Path) -> None:
    async with open_pool(folder) as pool:
        session = await pool.reset("count", {}, 0)
        step = asyncio.create_task(session.step("nap"))
        await asyncio.sleep(0.05)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert session.done
        assert count_open_episodes(pool) == 0
        assert (await pool.reset("count", {}, 1)).opening.ok
        assert pool.stats.failures == {}


async def test_classes_travel_by_value_and_wrong_options_are_a_failure(folder: Path) -> None:
    class Narrow(FrozenLake):
        def __init__(self) -> None:
            super().__init__(size=3)

    async with EnvPool.open({"lake": FrozenLake, "narrow": Narrow}, processes=1) as pool:
        session = await pool.reset("narrow", {}, 0)
        assert session.opening.response.info["state"].count("\n") == 2
        wrong = await pool.reset("lake", {"sise": 3}, 0)
        assert wrong.opening.status is EnvStatus.FAILED
        assert "lake cannot be created with {'sise': 3}" in wrong.opening.detail
        with pytest.raises(EnvError, match="the pool has no environment 'pond'"):
            await pool.reset("pond", {}, 0)


async def test_an_environment_that_cannot_be_loaded_is_an_error_at_once(folder: Path) -> None:
    with pytest.raises(EnvError, match=r"cannot load x: .*mine\.py has no 'Nobody'"):
        async with EnvPool.open({"x": "mine.py:Nobody"}, base=folder):
            pass


async def test_its_output_goes_to_the_log_and_nothing_is_left_behind(folder: Path) -> None:
    async with open_pool(folder) as pool:
        session = await pool.reset("count", {}, 0)
        assert (await session.step("write")).ok
        pid = get_pid(session)
    assert "a line for the log" in (folder / "log").read_text()
    assert not is_alive(pid)
    with pytest.raises(EnvError, match="closed"):
        await pool.reset("count", {}, 0)
