"""Single-turn samples, and the fake engine that the other tests use."""

import asyncio
import math
from dataclasses import replace

import pytest
from fakes import FakeCodec, FakeEngine, FakeTracker

from rollick.episodes.base import CachingCodec, SingleEngineAccess, random_stream
from rollick.episodes.single_turn import single_turn
from rollick.errors import EngineError
from rollick.rollout.fleet import Fleet
from rollick.rollout.in_flight import SampleAccess
from rollick.rollout.request_queue import RequestNeeds
from rollick.testing.fakes import group, prompt, sample
from rollick.types import (
    NOT_SAMPLED,
    PolicyVersion,
    Request,
    SampleId,
    Sampling,
    StopReason,
    stable_hash,
)

UID = SampleId(3, 1)


def generate_sample(access, *, max_tokens=8):
    sampling = Sampling(temperature=0.7, max_tokens=max_tokens)
    return single_turn(FakeCodec(), sampling, seed=1)(UID, prompt("hi?"), access)


def run_episode(engine, *, max_tokens=8):
    return generate_sample(SingleEngineAccess(engine), max_tokens=max_tokens)


def open_access(*engines):
    """A fleet of these engines, and a sample's access to it with a slot reserved on the first."""
    fleet = Fleet(engines, launch=lambda uid, engine: None)
    fleet.submit(UID, RequestNeeds(deadline=0, tokens=1))
    fleet.open()
    return fleet, SampleAccess(UID, fleet, reserved=0, tracker=FakeTracker())


async def tokens(engine, count):
    """Wait until the engine has generated `count` tokens."""
    while engine.generated_tokens < count:  # noqa: ASYNC110  (the engine sets no event)
        await asyncio.sleep(0.002)


async def test_a_sample_has_the_prompt_and_then_the_drawn_tokens():
    engine = FakeEngine(reply=lambda request: "ok", version=4, logprob=-0.5)
    generated = await run_episode(engine)
    assert generated.uid == UID
    assert generated.text == "ok"
    assert generated.token_ids.tolist() == [ord(character) for character in "hi?ok"]
    assert generated.loss_mask.tolist() == [False, False, False, True, True]
    assert generated.versions.tolist() == [NOT_SAMPLED] * 3 + [4, 4]
    assert generated.logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert generated.temperature == 0.7
    assert generated.stop is StopReason.STOP
    arrays = (generated.token_ids, generated.logprobs, generated.versions, generated.loss_mask)
    assert not any(array.flags.writeable for array in arrays)
    assert engine.requests[0].group == 3
    assert engine.requests[0].stream == random_stream(1, "train", UID)


async def test_a_sample_that_reaches_the_token_limit_is_truncated():
    generated = await run_episode(FakeEngine(reply=lambda request: "abcdef"), max_tokens=4)
    assert generated.text == "abcd"
    assert generated.truncated


async def test_with_one_engine_an_aborted_sample_ends_there():
    engine = FakeEngine(seconds=math.inf, reply=lambda request: "abcd")
    async with asyncio.TaskGroup() as tasks:
        pending = tasks.create_task(run_episode(engine))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort(UID)
    assert pending.result().stop is StopReason.ABORTED
    assert pending.result().text == ""


async def test_an_aborted_sample_should_continue_elsewhere_with_the_versions_of_all_its_tokens():
    first = FakeEngine(seconds=0.2, reply=lambda request: "abcd")
    second = FakeEngine(reply=lambda request: "abcd", version=7)

    async with asyncio.TaskGroup() as tasks:
        fleet, access = open_access(first, second)
        pending = tasks.create_task(generate_sample(access))
        await tokens(first, 2)
        fleet.remove(0)
        await first.abort(UID)
    partial = second.requests[0].continue_from
    assert second.requests[0].stream == first.requests[0].stream
    assert partial is not None
    num_kept = len(partial.token_ids)
    assert num_kept >= 2
    assert pending.result().text == "abcd"
    assert pending.result().stop is StopReason.STOP
    assert pending.result().versions.tolist() == [-1] * 3 + [0] * num_kept + [7] * (4 - num_kept)


def test_the_random_stream_follows_from_seed_purpose_and_id_alone():
    assert random_stream(1, "train", UID) == stable_hash(1, "train", 3, 1)
    others = [(2, "train", UID), (1, "eval", UID), (1, "train", SampleId(1, 3))]
    assert all(random_stream(*other) != random_stream(1, "train", UID) for other in others)


def test_a_prompt_is_encoded_once_for_all_members_of_a_group():
    class CountingCodec(FakeCodec):
        calls = 0

        def encode_prompt(self, turns):
            self.calls += 1
            return super().encode_prompt(turns)

    counting_codec = CountingCodec()
    codec = CachingCodec(counting_codec)
    ids = [codec.encode_prompt(prompt("same").turns).tolist() for _ in range(3)]
    assert ids == [[ord(character) for character in "same"]] * 3
    assert counting_codec.calls == 1
    assert codec.decode([104, 105]) == "hi"


async def test_the_fake_engine_draws_each_token_from_the_version_of_its_time():
    engine = FakeEngine(seconds=0.2, reply=lambda request: "abcd")
    async with asyncio.TaskGroup() as tasks:
        pending = tasks.create_task(run_episode(engine))
        await tokens(engine, 1)
        await engine.pause()
        tokens_before_pause = engine.generated_tokens
        await engine.commit_shared(PolicyVersion(1))
        with pytest.raises(EngineError, match="cannot sleep"):
            await engine.sleep()
        await engine.resume()
    versions = pending.result().versions.tolist()[3:]
    assert versions[0] == 0
    assert versions[-1] == 1
    assert versions == sorted(versions)
    assert tokens_before_pause < 4


async def test_the_fake_engine_aborts_a_request_that_waits_for_a_slot():
    engine = FakeEngine(seconds=math.inf, slots=1)
    first = Request(SampleId(0, 0), FakeCodec().encode_prompt(()), Sampling(), 0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.generate(first))
        await asyncio.sleep(0)
        waiting = tasks.create_task(engine.generate(replace(first, uid=SampleId(0, 1))))
        await asyncio.sleep(0)
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        await engine.abort(SampleId(0, 1))
        assert (await waiting).stop is StopReason.ABORTED
        assert not running.done()
        await engine.abort(SampleId(0, 0))
    assert running.result().stop is StopReason.ABORTED


def test_builders_make_the_nouns():
    built = group([1.0, None], uid=4, start_version=2, texts=["yes", "no"])
    assert built.samples[1].uid == SampleId(4, 1)
    assert built.samples[0].text == "yes"
    assert set(built.samples[0].versions) == {NOT_SAMPLED, 2}
    assert [member.score.ok for member in built.members] == [True, False]
    assert sample("abc").response_length == 3
    assert prompt(answer=2).row == {"answer": 2}
