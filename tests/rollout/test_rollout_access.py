"""A sample's way to the engines: aborts, losses, turns, and the end of the rollout."""

import asyncio
import math

import pytest

from rollick.errors import EngineLost
from rollick.rollout.access import SampleAccess
from rollick.rollout.fleet import Fleet, Want
from rollick.testing.fakes import FakeCodec, FakeEngine, FakeFollower, prompt
from rollick.types import PolicyVersion, Request, SampleId, Sampling, StopReason

UID = SampleId(3, 1)
REQUEST = Request(UID, FakeCodec().encode_prompt(prompt("hi?").turns), Sampling(max_tokens=8), 5)


def abcd(**options):
    return FakeEngine(reply=lambda request: "abcd", **options)


def access_to(*engines):
    """A fleet, and the access of a sample whose first place is on engine 0."""
    fleet = Fleet(engines, launch=lambda uid, engine: None)
    fleet.submit(UID, Want(deadline=0, tokens=1))
    fleet.open()
    follower = FakeFollower()
    return fleet, SampleAccess(UID, fleet, granted=0, follower=follower), follower


async def drawn(engine, count):
    async with asyncio.timeout(10):
        while engine.generated_tokens < count:  # noqa: ASYNC110  (the engine has no event for it)
            await asyncio.sleep(0.001)


def text(completion):
    return FakeCodec().decode(completion.token_ids)


async def test_the_place_is_used_and_given_back():
    fleet, access, follower = access_to(abcd())
    assert text(await access.generate(REQUEST)) == "abcd"
    assert fleet.on() == {}
    assert follower.told == []


async def test_a_further_generation_asks_for_a_place_of_its_own():
    fleet, access, follower = access_to(abcd())
    await access.generate(REQUEST)
    await access.generate(REQUEST)
    assert follower.told == ["waiting for an engine", "on 0"]
    assert fleet.on() == {}


async def test_an_aborted_generation_goes_on_with_its_tokens_and_the_version_of_each():
    engine = abcd(seconds=0.2)
    fleet, access, follower = access_to(engine)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(access.generate(REQUEST))
        await drawn(engine, 2)
        fleet.close()
        await fleet.abort_all()
        await fleet.until_empty()
        kept = engine.generated_tokens
        await engine.commit_shared(PolicyVersion(7))
        fleet.open()
    assert 2 <= kept < 4
    assert text(task.result()) == "abcd"
    assert task.result().versions.tolist() == [0] * kept + [7] * (4 - kept)
    assert engine.generated_tokens == 4
    assert follower.told == ["waiting for an engine", "on 0"]


async def test_what_a_lost_engine_had_is_made_again_by_another():
    first, second = abcd(seconds=math.inf), abcd()
    fleet, access, follower = access_to(first, second)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(access.generate(REQUEST))
        await asyncio.sleep(0.01)
        first.lose()
    assert text(task.result()) == "abcd"
    assert second.requests[0].stream == first.requests[0].stream
    assert follower.told == ["lost", "waiting for an engine", "on 1"]
    assert list(fleet.engines) == [1]
    assert fleet.on() == {}


async def test_the_loss_of_the_last_engine_is_an_error():
    engine = abcd(seconds=math.inf)
    _, access, _ = access_to(engine)
    engine.lose()
    with pytest.raises(EngineLost, match="the fake engine is gone"):
        await access.generate(REQUEST)


async def test_an_engine_that_left_between_the_grant_and_the_request_is_no_error():
    second = abcd()
    fleet, access, _ = access_to(abcd(), second)
    fleet.remove(0)
    assert text(await access.generate(REQUEST)) == "abcd"
    assert len(second.requests) == 1


async def test_a_place_that_was_granted_before_admission_closed_is_not_used():
    engine = abcd()
    fleet, access, follower = access_to(engine)
    fleet.close()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(access.generate(REQUEST))
        await asyncio.sleep(0.01)
        assert engine.requests == []
        assert fleet.on() == {}
        assert follower.told == ["waiting for an engine"]
        fleet.open()
    assert len(engine.requests) == 1


async def test_between_two_turns_the_place_is_free_and_the_wait_has_a_name():
    fleet, access, follower = access_to(abcd())
    with access.doing("tool search"):
        assert fleet.on() == {}
    await access.generate(REQUEST)
    assert follower.told == ["in tool search", "between turns", "waiting for an engine", "on 0"]


async def test_when_the_rollout_ends_the_sample_ends_with_it():
    engine = abcd(seconds=math.inf)
    fleet, access, follower = access_to(engine)
    task = asyncio.create_task(access.generate(REQUEST))
    await asyncio.sleep(0.01)
    follower.goes_on = False
    await fleet.abort_all()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.on() == {}
    with pytest.raises(asyncio.CancelledError):
        await access.generate(REQUEST)
    assert len(engine.requests) == 1


async def test_a_cancelled_sample_frees_its_place_and_its_request():
    engine = abcd(seconds=math.inf)
    fleet, access, _ = access_to(engine)
    task = asyncio.create_task(access.generate(REQUEST))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.on() == {}
    assert engine.load().running == 0


async def test_the_sample_limit_is_no_abort():
    long = FakeEngine(reply=lambda request: "a" * 9)
    _, access, _ = access_to(long)
    assert (await access.generate(REQUEST)).stop is StopReason.LENGTH
