"""The fleet: the engine of each request, and engines that join and leave."""

import asyncio
import math

import pytest
from fakes import FakeEngine

from rollick.errors import EngineError, EngineLost
from rollick.rollout.fleet import Fleet
from rollick.rollout.request_queue import RequestNeeds
from rollick.types import SampleId


class Launches:
    """A fleet whose launched samples stay on their engines until they are released."""

    def __init__(self, *slots, queue=0.0, order="oldest"):
        self.launched = []
        self.engines = [FakeEngine(slots=count) for count in slots]
        self.fleet = Fleet(
            self.engines,
            launch=lambda uid, engine: self.launched.append((uid.index, engine)),
            engine_queue=queue,
            order=order,
        )

    def submit(self, *indices, deadline=0, tokens=1.0):
        for index in indices:
            self.fleet.submit(uid(index), RequestNeeds(deadline, tokens))
        self.fleet.dispatch()


def uid(index):
    return SampleId(0, index)


async def test_nothing_is_sent_before_the_fleet_is_open():
    launches = Launches(2)
    launches.submit(0, 1)
    assert launches.launched == []
    launches.fleet.open()
    assert launches.launched == [(0, 0), (1, 0)]


async def test_a_released_engine_gets_the_next_request_immediately():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0, 1)
    assert len(launches.fleet.queue) == 1
    launches.fleet.release(uid(0), tokens=4)
    assert launches.launched == [(0, 0), (1, 0)]
    assert launches.fleet.engine_of == {uid(1): 0}


async def test_a_running_request_is_served_before_new_ones_of_its_class():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0, 1)
    acquire_task = asyncio.create_task(launches.fleet.acquire(uid(5), RequestNeeds(0, 1)))
    await asyncio.sleep(0)
    launches.fleet.release(uid(0), tokens=4)
    assert await acquire_task == 0
    assert launches.launched == [(0, 0)]


async def test_the_group_that_must_be_trained_first_goes_first():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0)
    launches.submit(1, deadline=3)
    launches.submit(2, deadline=1)
    launches.fleet.release(uid(0), tokens=0)
    assert launches.launched[-1] == (2, 0)


@pytest.mark.parametrize(("order", "first"), [("oldest", 1), ("longest", 2)])
async def test_among_equal_deadlines_the_longest_goes_first_if_configured(order, first):
    launches = Launches(1, order=order)
    launches.fleet.open()
    launches.submit(0)
    launches.submit(1, tokens=10.0)
    launches.submit(2, tokens=90.0)
    launches.fleet.release(uid(0), tokens=0)
    assert launches.launched[-1] == (first, 0)


async def test_an_engine_that_joins_gets_what_waits():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0, 1)
    assert launches.fleet.add(FakeEngine(slots=1)) == 1
    assert launches.launched == [(0, 0), (1, 1)]


async def test_an_engine_that_leaves_gets_nothing_more_and_its_number_is_not_used_again(caplog):
    launches = Launches(2, 2)
    launches.fleet.open()
    launches.submit(0, 1)
    launches.fleet.remove(0, reason="it burned")
    assert (
        "engine 0 is lost, 1 engines left; rerouting 1 requests; reason: it burned" in caplog.text
    )
    launches.fleet.remove(0, reason="it burned")
    assert len(caplog.records) == 1
    with pytest.raises(EngineLost, match="engine 0 left the fleet"):
        launches.fleet.engine(0)
    for index, _ in launches.launched:
        launches.fleet.release(uid(index), tokens=0)
    launches.submit(2, 3, 4)
    assert launches.launched[2:] == [(2, 1), (3, 1)]
    assert launches.fleet.add(FakeEngine()) == 2


async def test_the_first_request_and_the_last_engine_are_reported_and_no_other():
    launches, reports = Launches(2, 2), []
    fleet = launches.fleet
    fleet.on_activity_change = lambda: reports.append((len(fleet.engines), len(fleet.engine_of)))
    fleet.open()
    launches.submit(0, 1, 2)
    assert reports == [(2, 3)]
    fleet.release(uid(0), tokens=1)
    assert fleet.is_generating
    for index in (1, 2):
        fleet.release(uid(index), tokens=1)
    assert reports == [(2, 3), (2, 0)]
    fleet.remove(0)
    fleet.remove(1)
    assert reports == [(2, 3), (2, 0), (0, 0)]
    assert not fleet.is_generating
    fleet.add(FakeEngine(slots=1))
    assert reports == [(2, 3), (2, 0), (0, 0), (1, 0)]


async def test_a_request_that_waits_can_be_withdrawn():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0, 1, 2)
    launches.fleet.end_sample(uid(1))
    launches.fleet.release(uid(0), tokens=0)
    assert launches.launched == [(0, 0), (2, 0)]


async def test_a_wait_that_is_cancelled_leaves_the_queue():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0)
    acquire_task = asyncio.create_task(launches.fleet.acquire(uid(5), RequestNeeds(0, 1)))
    await asyncio.sleep(0)
    acquire_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquire_task
    assert len(launches.fleet.queue) == 0


async def test_a_reservation_of_a_cancelled_wait_goes_to_the_next():
    launches = Launches(1)
    launches.fleet.open()
    launches.submit(0, 1)
    acquire_task = asyncio.create_task(launches.fleet.acquire(uid(5), RequestNeeds(0, 1)))
    await asyncio.sleep(0)
    launches.fleet.release(uid(0), tokens=0)
    assert launches.fleet.engine_of == {uid(5): 0}
    acquire_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquire_task
    assert launches.fleet.engine_of == {uid(1): 0}


async def test_a_session_returns_to_the_engine_that_has_its_cache_until_it_ends():
    launches = Launches(2, 2)
    fleet = launches.fleet
    fleet.open()

    async def engine_of(index, session):
        number = await fleet.acquire(uid(index), RequestNeeds(0, 1, session))
        fleet.release(uid(index), tokens=1)
        return number

    launches.submit(0)
    assert launches.launched == [(0, 0)]
    assert await fleet.acquire(SampleId(1, 0), RequestNeeds(0, 1, "talk")) == 1
    fleet.release(SampleId(1, 0), tokens=1)
    fleet.release(uid(0), tokens=1)
    assert await engine_of(7, "talk") == 1
    assert await engine_of(8, None) == 0


async def test_abort_all_passes_engines_that_cannot_be_reached_and_waits_until_all_is_empty():
    class Unreachable(FakeEngine):
        async def abort(self, uid):
            raise EngineError("no route")

    engines = [FakeEngine(seconds=math.inf), Unreachable()]
    fleet = Fleet(engines, launch=lambda uid, engine: None)
    fleet.open()
    for index in range(4):
        fleet.submit(SampleId(index, 0), RequestNeeds(0, 1))
    fleet.dispatch()
    assert set(fleet.engine_of.values()) == {0, 1}
    await fleet.abort(fleet.engine_of)
    wait_task = asyncio.create_task(fleet.wait_until_empty())
    await asyncio.sleep(0)
    fleet.close()
    for running_uid in list(fleet.engine_of):
        assert not wait_task.done()
        fleet.release(running_uid, tokens=0)
    await asyncio.wait_for(wait_task, 1)
