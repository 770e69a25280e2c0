"""A sample's access to the engines: aborts, lost engines, turns, and the end of the rollout."""

import asyncio
import math

import pytest
from fakes import FakeCodec, FakeEngine, FakeTracker

from rollick.errors import EngineLost
from rollick.rollout.fleet import Fleet
from rollick.rollout.in_flight import SampleAccess
from rollick.rollout.request_queue import RequestNeeds
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, Request, SampleId, Sampling, StopReason

UID = SampleId(3, 1)
REQUEST = Request(UID, FakeCodec().encode_prompt(prompt("hi?").turns), Sampling(max_tokens=8), 5)


def make_abcd_engine(**options):
    return FakeEngine(reply=lambda request: "abcd", **options)


def make_access(*engines):
    """A fleet, the access of a sample that has a reservation on engine 0, and its tracker."""
    fleet = Fleet(engines, launch=lambda uid, engine: None)
    fleet.submit(UID, RequestNeeds(deadline=0, tokens=1))
    fleet.open()
    tracker = FakeTracker()
    return fleet, SampleAccess(UID, fleet, reserved=0, tracker=tracker), tracker


async def wait_for_tokens(engine, count):
    async with asyncio.timeout(10):
        while engine.generated_tokens < count:  # noqa: ASYNC110  (the engine has no event for it)
            await asyncio.sleep(0.001)


def decode_text(completion):
    return FakeCodec().decode(completion.token_ids)


async def test_the_reservation_is_used_and_released():
    fleet, access, tracker = make_access(make_abcd_engine())
    assert decode_text(await access.generate(REQUEST)) == "abcd"
    assert fleet.engine_of == {}
    assert tracker.calls == []


async def test_a_further_generation_acquires_an_engine_again():
    fleet, access, tracker = make_access(make_abcd_engine())
    await access.generate(REQUEST)
    await access.generate(REQUEST)
    assert tracker.calls == ["waiting for an engine", "on 0"]
    assert fleet.engine_of == {}


async def test_an_aborted_generation_should_continue_with_its_tokens_and_the_version_of_each():
    engine = make_abcd_engine(seconds=0.2)
    fleet, access, tracker = make_access(engine)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(access.generate(REQUEST))
        await wait_for_tokens(engine, 2)
        fleet.close()
        await fleet.abort(fleet.engine_of)
        await fleet.wait_until_empty()
        kept = engine.generated_tokens
        await engine.commit_shared(PolicyVersion(7))
        fleet.open()
    assert 2 <= kept < 4
    assert decode_text(task.result()) == "abcd"
    assert task.result().versions.tolist() == [0] * kept + [7] * (4 - kept)
    assert engine.generated_tokens == 4
    assert tracker.calls == ["waiting for an engine", "on 0"]


async def test_requests_of_a_lost_engine_are_repeated_on_another():
    first, second = make_abcd_engine(seconds=math.inf), make_abcd_engine()
    fleet, access, tracker = make_access(first, second)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(access.generate(REQUEST))
        await asyncio.sleep(0.01)
        first.lose()
    assert decode_text(task.result()) == "abcd"
    assert second.requests[0].stream == first.requests[0].stream
    assert tracker.calls == ["lost", "waiting for an engine", "on 1"]
    assert list(fleet.engines) == [1]
    assert fleet.engine_of == {}


async def test_the_loss_of_the_last_engine_is_an_error():
    engine = make_abcd_engine(seconds=math.inf)
    _, access, _ = make_access(engine)
    engine.lose()
    with pytest.raises(EngineLost, match="the fake engine is gone"):
        await access.generate(REQUEST)


async def test_an_engine_that_left_between_the_grant_and_the_request_is_no_error():
    second = make_abcd_engine()
    fleet, access, _ = make_access(make_abcd_engine(), second)
    fleet.remove(0)
    assert decode_text(await access.generate(REQUEST)) == "abcd"
    assert len(second.requests) == 1


async def test_a_reservation_made_before_admission_closed_is_not_used():
    engine = make_abcd_engine()
    fleet, access, tracker = make_access(engine)
    fleet.close()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(access.generate(REQUEST))
        await asyncio.sleep(0.01)
        assert engine.requests == []
        assert fleet.engine_of == {}
        assert tracker.calls == ["waiting for an engine"]
        fleet.open()
    assert len(engine.requests) == 1


async def test_between_two_turns_the_reservation_is_released_and_the_wait_is_named():
    fleet, access, tracker = make_access(make_abcd_engine())
    with access.activity("tool search"):
        assert fleet.engine_of == {}
    await access.generate(REQUEST)
    assert tracker.calls == ["in tool search", "between turns", "waiting for an engine", "on 0"]


async def test_an_agent_is_named_again_after_each_of_its_generations():
    _, access, tracker = make_access(make_abcd_engine())
    with access.activity("agent search.py", limit_s=60):
        await access.generate(REQUEST)
    agent, waits = "in agent search.py", "waiting for an engine"
    assert tracker.calls == [agent, waits, "on 0", agent, "between turns"]


async def test_when_the_rollout_ends_the_sample_ends_with_it():
    engine = make_abcd_engine(seconds=math.inf)
    fleet, access, tracker = make_access(engine)
    task = asyncio.create_task(access.generate(REQUEST))
    await asyncio.sleep(0.01)
    tracker.should_continue = False
    await fleet.abort(fleet.engine_of)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.engine_of == {}
    with pytest.raises(asyncio.CancelledError):
        await access.generate(REQUEST)
    assert len(engine.requests) == 1


async def test_a_cancelled_sample_releases_its_engine_and_its_request():
    engine = make_abcd_engine(seconds=math.inf)
    fleet, access, _ = make_access(engine)
    task = asyncio.create_task(access.generate(REQUEST))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.engine_of == {}
    assert engine.load().running == 0


async def test_the_sample_limit_is_no_abort():
    long_engine = FakeEngine(reply=lambda request: "a" * 9)
    _, access, _ = make_access(long_engine)
    assert (await access.generate(REQUEST)).stop is StopReason.LENGTH
