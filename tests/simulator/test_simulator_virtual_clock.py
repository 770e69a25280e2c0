"""asyncio on the virtual clock: exact times, a deterministic order, and no hangs."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollick.errors import StuckError
from rollick.simulator.virtual_clock import MAX_CANCELLED, VirtualLoop, run_virtual


def _now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_of_sleep_takes_no_time_and_lasts_exactly_a_day():
    async def main() -> float:
        await asyncio.sleep(86_400)
        return _now()

    begun = time.monotonic()
    assert run_virtual(main()) == 86_400
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("start", [0.0, 0.1, 1.7e9, 1e15])
def test_a_timer_fires_at_its_time_to_the_last_bit(start):
    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, float]] = []
        await asyncio.sleep(start)
        expected = [start + 10 * k * 0.1 for k in range(1, 6)]
        for when in expected:
            loop.call_at(when, lambda when=when: seen.append((when, loop.time())))
        await asyncio.sleep(20)
        return seen

    seen = run_virtual(main())
    assert len(seen) == 5
    assert all(when == fired for when, fired in seen)


def test_a_timeout_ends_a_wait_that_has_no_other_end():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.Event().wait()
        return _now()

    assert run_virtual(main()) == 3


def test_a_task_group_runs_its_tasks_side_by_side():
    async def main() -> float:
        async with asyncio.TaskGroup() as tasks:
            for seconds in (5, 2, 3):
                tasks.create_task(asyncio.sleep(seconds))
        return _now()

    assert run_virtual(main()) == 5


def test_ready_tasks_run_before_the_clock_advances():
    async def main() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(1e-9, seen.append, "timer")
        for n in range(3):
            await asyncio.sleep(0)
            seen.append(f"ready {n}")
        await asyncio.sleep(1)
        return seen

    assert run_virtual(main()) == ["ready 0", "ready 1", "ready 2", "timer"]


def test_a_program_in_which_all_tasks_wait_raises_with_their_names():
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.Event().wait(), name="the reward of g3.1")
            await asyncio.sleep(7)

    with pytest.raises(
        StuckError, match=r"at virtual time 7 s.*the reward of g3\.1 \(Event\.wait\)"
    ):
        run_virtual(main())


def test_an_endless_sleep_is_a_wait_that_nothing_ends():
    with pytest.raises(StuckError, match="sleep"):
        run_virtual(asyncio.sleep(float("inf")))


def test_many_stuck_tasks_are_counted():
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for n in range(20):
                tasks.create_task(asyncio.Event().wait(), name=f"sample {n}")

    with pytest.raises(StuckError, match="and 13 more"):
        run_virtual(main())


def test_a_stuck_program_still_cleans_up():
    closed: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("yes")

    with pytest.raises(StuckError):
        run_virtual(main())
    assert closed == ["yes"]


def test_an_error_is_raised_unchanged():
    async def main() -> None:
        await asyncio.sleep(1)
        raise ZeroDivisionError("one")

    with pytest.raises(ZeroDivisionError, match="one"):
        run_virtual(main())


def test_a_thread_raises_because_the_virtual_clock_cannot_wait_for_it():
    async def main() -> None:
        await asyncio.to_thread(time.monotonic)

    with pytest.raises(StuckError, match="needs a thread"):
        run_virtual(main())


def test_the_same_program_gives_the_same_events_in_the_same_order():
    async def main() -> list[tuple[float, int]]:
        seen: list[tuple[float, int]] = []

        async def worker(n: int) -> None:
            for k in range(5):
                await asyncio.sleep((n * 7 + k) % 4 * 0.25)
                seen.append((_now(), n))

        async with asyncio.TaskGroup() as tasks:
            for n in range(50):
                tasks.create_task(worker(n))
        return seen

    first = run_virtual(main())
    assert len(first) == 250
    assert first == sorted(first, key=lambda event: event[0])
    assert run_virtual(main()) == first


def test_timers_of_one_time_fire_in_the_order_in_which_they_were_set():
    async def main() -> list[int]:
        seen: list[int] = []
        for n in range(100):
            asyncio.get_running_loop().call_at(1.0, seen.append, n)
        await asyncio.sleep(2)
        return seen

    assert run_virtual(main()) == list(range(100))


def test_a_cancelled_timer_neither_fires_nor_moves_the_clock():
    async def main() -> float:
        loop = asyncio.get_running_loop()
        fired: list[str] = []
        for n in range(1000):
            loop.call_at(10.0 + n, fired.append, "no").cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert not fired
        return loop.time()

    assert run_virtual(main()) == 5


def test_timeouts_that_were_not_needed_do_not_pile_up():
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(5000):
            async with asyncio.timeout(3600):
                await asyncio.sleep(0.01)
        return len(loop._timers)

    assert run_virtual(main()) <= 2 * MAX_CANCELLED
