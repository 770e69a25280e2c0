"""Deadlines that follow from measured times, on a virtual clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from rollick.cluster.deadlines import FLOOR_S, GRACE_S, RECENT, Deadlines
from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup
from rollick.config.devices import parse_devices
from rollick.errors import WorkerHung, WorkerLost
from rollick.simulator.virtual_clock import run_virtual
from rollick.testing.batches import random_batch

T = TypeVar("T")
CEILING_S = 1800.0


def measured(*seconds: float, method: str = "train", **options: Any) -> Deadlines:
    deadlines = Deadlines(CEILING_S, **options)
    for duration_s in seconds:
        deadlines.observe("policy", method, duration_s)
    return deadlines


def test_the_first_call_of_each_kind_has_the_ceiling() -> None:
    deadlines = measured(1.0)
    assert deadlines.limit("policy", "logprobs") == CEILING_S
    assert deadlines.limit("critic", "train") == CEILING_S


@pytest.mark.parametrize(
    ("seconds", "limit_s"),
    [((0.1,), FLOOR_S), ((20.0, 4.0), 200.0), ((1000.0,), CEILING_S)],
    ids=["floor", "ten times the slowest", "ceiling"],
)
def test_a_limit_is_ten_times_the_slowest_call_between_floor_and_ceiling(
    seconds: tuple[float, ...], limit_s: float
) -> None:
    assert measured(*seconds).limit("policy", "train") == limit_s


def test_a_role_in_a_new_process_has_the_ceiling_again() -> None:
    deadlines = measured(1.0)
    deadlines.observe("critic", "train", 1.0)
    deadlines.forget("policy")
    assert deadlines.limit("policy", "train") == CEILING_S
    assert deadlines.limit("critic", "train") == FLOOR_S


def test_an_old_slow_call_is_forgotten() -> None:
    deadlines = measured(100.0, *[5.0] * RECENT)
    assert deadlines.limit("policy", "train") == 50.0


def test_work_on_a_batch_is_measured_per_token() -> None:
    deadlines = Deadlines(CEILING_S)
    deadlines.observe("policy", "train", 10.0, size=1000)
    assert deadlines.limit("policy", "train", size=4000) == pytest.approx(400.0)


@pytest.mark.parametrize(
    ("method", "cpu_s", "gpu_s"), [("poll_results", 5, 20), ("train", 30, 120), ("save", 300, 1200)]
)
def test_floors_depend_on_the_work_and_the_device(method: str, cpu_s: float, gpu_s: float) -> None:
    assert measured(0.01, method=method).limit("policy", method) == cpu_s
    assert measured(0.01, method=method, on_gpu=True).limit("policy", method) == gpu_s


def test_a_lower_floor_makes_the_limits_of_its_method_earlier() -> None:
    deadlines = measured(0.1)
    deadlines.floors_s["train"] = 2.0
    assert deadlines.limit("policy", "train") == 2.0


def test_in_one_process_every_limit_is_the_ceiling() -> None:
    assert (
        measured(1.0, method="poll_results", measured=False).limit("policy", "poll_results")
        == CEILING_S
    )


class ScriptedTransport:
    """A transport whose calls take as many seconds as their last argument."""

    def share(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    async def send(self, host: Any, call: Any, args: tuple[Any, ...]) -> str:
        await asyncio.sleep(args[-1])
        return "done"


def run_in_virtual_time(scenario: Callable[[WorkerGroup], Awaitable[T]]) -> T:
    devices = DeviceMap({"policy": parse_devices("cpu:0"), "generators": parse_devices("cpu:1")})

    async def main() -> T:
        transport: Any = ScriptedTransport()
        return await scenario(WorkerGroup(devices, transport, Deadlines(CEILING_S)))

    return run_virtual(main())


def test_a_hung_call_is_lost_after_ten_times_the_slowest_before_it() -> None:
    async def scenario(group: WorkerGroup) -> float:
        now = asyncio.get_running_loop().time
        for seconds in (7.0, 9.0):
            assert await group.call("policy", "train", seconds) == "done"
        started_at = now()
        with pytest.raises(WorkerLost, match="did not finish 'train' within 90 s"):
            await group.call("policy", "train", 1e6)
        return now() - started_at

    assert run_in_virtual_time(scenario) == 90.0 + GRACE_S


def test_the_first_call_may_take_as_long_as_the_ceiling() -> None:
    async def scenario(group: WorkerGroup) -> str:
        return await group.call("policy", "train", CEILING_S - 1)

    assert run_in_virtual_time(scenario) == "done"


def test_a_larger_batch_has_a_later_deadline() -> None:
    small, large = random_batch([10]), random_batch([10] * 50)

    async def scenario(group: WorkerGroup) -> list[str]:
        await group.call("policy", "train", small, 4.0)
        return await group.broadcast("policy", "train", large, 300.0)

    assert run_in_virtual_time(scenario) == ["done"]


def test_the_calls_to_a_lost_rank_end_at_once() -> None:
    async def scenario(group: WorkerGroup) -> float:
        now = asyncio.get_running_loop().time
        hung = asyncio.create_task(group.call("generators", "receive", 1e6))
        other = asyncio.create_task(group.call("policy", "train", 20.0))
        await asyncio.sleep(3)
        group.abandon("generators", 0)
        with pytest.raises(WorkerHung, match="did not finish 'receive' within 3 s"):
            await hung
        ended = now()
        assert await other == "done"
        return ended

    assert run_in_virtual_time(scenario) == 3.0


async def test_a_reply_that_came_while_the_event_loop_was_blocked_is_no_hang() -> None:
    """The reply is ready after 20 ms; the loop sees it only after the deadline of 50 ms."""
    devices = DeviceMap({"policy": parse_devices("cpu:0")})
    transport: Any = ScriptedTransport()
    group = WorkerGroup(devices, transport, Deadlines(CEILING_S))
    call = asyncio.create_task(group.call("policy", "train", 0.02, timeout_s=0.05))
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251
    assert await call == "done"
