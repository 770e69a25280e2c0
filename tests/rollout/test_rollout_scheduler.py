"""The rollout on fake engines: the contents of batches, and the errors that stop a run."""

import asyncio
import json
import math
import random
import re
from contextlib import asynccontextmanager
from dataclasses import fields
from itertools import count

import pytest
from fakes import FakeCodec, FakeEngine
from ledger_audit import audit, check_ledger, count_complete, ledger_counts

from rollick.config.schema import RolloutConfig
from rollick.episodes.single_turn import single_turn
from rollick.errors import CheckpointError, EngineError, EngineLost, RewardError, StuckError
from rollick.observe.metric_table import is_documented
from rollick.rollout.deps import RolloutDeps, SavedRollout
from rollick.rollout.ledger.group_record import LedgerError
from rollick.rollout.ledger.log import LogContents
from rollick.rollout.sample_prompts import open_prompt_sampling
from rollick.rollout.scheduler import Rollout
from rollick.testing.fakes import prompt
from rollick.types import PolicyVersion, SampleId, Sampling, Score


def make_numbered_prompts():
    numbers = count()

    def draw():
        number = next(numbers)
        return prompt(f"{number}?", uid=f"toy/{number}", number=number)

    return draw


async def score_by_index(sample):
    """Members of a group score 0, 1, 2, …"""
    return Score(float(sample.uid.index))


def drop_equal_scores(group):
    """The reason to drop a group with equal scores."""
    values = [member.score.value for member in group.members if member.score.ok]
    return None if len(set(values)) > 1 else "no_signal"


@asynccontextmanager
async def open_rollout(engines, *, version=0, saved=None, **settings):
    """A rollout of 2 groups of 2; settings are those of RolloutDeps and of its config."""
    names = {field.name for field in fields(RolloutDeps)}
    deps = {
        "next_prompt": make_numbered_prompts(),
        "episode": single_turn(FakeCodec(), Sampling(max_tokens=8), seed=1),
        "score": score_by_index,
        "stuck_after_s": 20.0,
        "drop_reason": drop_equal_scores,
        **{name: settings.pop(name) for name in names & settings.keys()},
    }
    config = RolloutConfig(**{"groups_per_step": 2, "group_size": 2, **settings})
    deps = RolloutDeps(config=config, **deps)
    async with Rollout.open(deps, engines, version=version, saved=saved) as rollout:
        yield rollout
        check_ledger(rollout.ledger)


async def train(rollout, groups, engines=()):
    """Train on a batch and publish the new version, as a pipeline does."""
    version = PolicyVersion(rollout.version + 1)
    rollout.trained(groups, version)
    for engine in engines:
        await engine.commit_shared(version)
    rollout.published(version)


async def wait_until(condition):
    """Waits until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  (any condition, not an event)
            await asyncio.sleep(0.001)


def make_latency(seconds):
    """A latency function from seconds by sample id; other samples take no time."""
    return lambda request: seconds.get(tuple(request.uid), 0.0)


def group_ids(groups):
    return [group.uid for group in groups]


def has_only_this_task():
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_batch_has_scored_groups_in_the_order_of_ids():
    async with open_rollout([FakeEngine(seconds=make_latency({(0, 0): 0.02}))]) as rollout:
        groups = await rollout.take()
    assert group_ids(groups) == [0, 1]
    assert [group.scores for group in groups] == [(0, 1), (0, 1)]
    assert [group.prompt.uid for group in groups] == ["toy/0", "toy/1"]
    assert [s.uid for s in groups[1].samples] == [SampleId(1, 0), SampleId(1, 1)]
    assert groups[0].start_version == 0


async def test_without_staleness_nothing_starts_between_a_batch_and_its_publishing():
    engine = FakeEngine()
    async with open_rollout([engine]) as rollout:
        groups = await rollout.take()
        rollout.trained(groups, 1)
        await asyncio.sleep(0.01)
        assert len(engine.requests) == 4
        await engine.commit_shared(PolicyVersion(1))
        rollout.published(1)
        later = await rollout.take()
        assert len(engine.requests) == 8
    assert group_ids(later) == [2, 3]
    assert {group.start_version for group in later} == {1}
    assert {v for group in later for s in group.samples for v in s.versions[s.loss_mask]} == {1}


@pytest.mark.parametrize("seed", range(6))
async def test_without_staleness_the_batch_does_not_depend_on_the_order_of_completion(seed):
    """Groups whose number is divisible by 3 have no signal, in any order of completion."""

    async def score(sample):
        number = sample.prompt.row["number"]
        return Score(float(sample.uid.index) if number % 3 else 0.0)

    async def run(seconds):
        batches = []
        engines = [FakeEngine(seconds=seconds, slots=3) for _ in range(2)]
        async with open_rollout(engines, score=score, groups_per_step=4) as rollout:
            for _ in range(2):
                groups = await rollout.take()
                batches.append([(s.uid, s.text) for group in groups for s in group.samples])
                await train(rollout, groups, engines)
        return batches

    latency_rng = random.Random(seed)
    batches = await run(lambda request: latency_rng.random() * 0.004)
    assert [uid.group for uid, _ in batches[0]] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert batches == await run(0.0)


async def test_a_dropped_group_is_counted_and_refilled_one_for_one():
    async def score(sample):
        return Score(float(sample.uid.index) if sample.uid.group >= 3 else 1.0)

    engine = FakeEngine()
    async with open_rollout([engine], score=score) as rollout:
        groups = await rollout.take()
        counts = ledger_counts(rollout.ledger)
        stats = rollout.stats
    assert group_ids(groups) == [3, 4]
    assert counts.dropped_by_reason == {"no_signal": 3}
    assert len(engine.requests) == 10
    assert stats.dropped == {"no_signal": 3}
    assert stats.metrics["rollout/domain/toy/samples"] == 10
    assert stats.metrics["score/mean"] == pytest.approx((6 * 1 + 2 * 0.5 * 2) / 10)
    assert stats.metrics["score/trained"] == 0.5


async def test_groups_without_signal_are_kept_without_a_drop_reason():
    async def score(sample):
        return Score(1.0)

    async with open_rollout([FakeEngine()], score=score, drop_reason=None) as rollout:
        assert group_ids(await rollout.take()) == [0, 1]


async def test_after_the_allowed_drops_the_batch_is_smaller():
    async def score(sample):
        return Score(float(sample.uid.index) if sample.uid.group == 1 else 1.0)

    async with open_rollout([FakeEngine()], score=score, max_drops_per_step=3) as rollout:
        groups = await rollout.take()
        dropped = rollout.stats.dropped
        await train(rollout, groups)
        assert rollout.ledger.state()["drops_in_step"] == 0
    assert group_ids(groups) == [1]
    assert dropped == {"no_signal": 4}


async def test_a_step_without_any_signal_raises_with_the_mean_score():
    async def score(sample):
        return Score(0.25)

    with pytest.raises(StuckError, match=r"all 5 groups .* mean score 0.25") as stuck:
        async with open_rollout([FakeEngine()], score=score, max_drops_per_step=3) as rollout:
            await rollout.take()
    assert "easier prompts" in stuck.value.fix


async def test_failed_scores_are_members_but_masked_and_counted():
    async def score(sample):
        if sample.uid == (1, 2):
            return Score.failed("the judge is down")
        return await score_by_index(sample)

    async with open_rollout([FakeEngine()], score=score, group_size=3) as rollout:
        groups = await rollout.take()
        stats = rollout.stats
    masked = groups[1].members[2]
    assert not masked.score.ok
    assert not masked.sample.loss_mask.any()
    assert masked.sample.response_length > 0
    assert groups[1].members[1].sample.loss_mask.any()
    assert stats.metrics["rollout/domain/toy/samples"] == 6
    assert stats.metrics["rollout/failed_scores"] == pytest.approx(1 / 6)


async def test_too_many_failed_scores_stop_the_run_with_the_first_failure():
    async def score(sample):
        failed = sample.uid.index == 0
        return Score.failed("no route to judge") if failed else Score(float(sample.uid.group))

    with pytest.raises(RewardError, match=r"2 of 4 samples of step 1 .* g0.0: no route to judge"):
        async with open_rollout(
            [FakeEngine()], score=score, drop_reason=lambda group: None
        ) as rollout:
            await rollout.take()


async def test_a_reward_that_always_fails_stops_the_run_after_one_step_of_samples():
    async def score(sample):
        return Score.failed("no route to judge")

    engine = FakeEngine(seconds=0.001, slots=2)
    with pytest.raises(RewardError, match="no route to judge"):
        async with open_rollout([engine], score=score, max_drops_per_step=1000) as rollout:
            await rollout.take()
    assert len(engine.requests) < 20


async def test_a_sample_is_scored_the_moment_it_ends():
    scored = []

    async def score(sample):
        scored.append(tuple(sample.uid))
        return await score_by_index(sample)

    engine = FakeEngine(seconds=make_latency({(0, 0): math.inf}))
    async with open_rollout([engine], score=score):
        await wait_until(lambda: len(scored) == 3)
    assert sorted(scored) == [(0, 1), (1, 0), (1, 1)]


async def test_a_freed_slot_is_refilled_while_other_samples_still_run():
    engine = FakeEngine(seconds=make_latency({(0, 0): math.inf}), slots=2)
    async with open_rollout([engine], groups_per_step=4):
        await wait_until(lambda: len(engine.requests) == 8 and engine.load().running == 1)
    assert engine.peak <= 4


async def test_a_sample_that_is_being_scored_holds_no_slot():
    async def score(sample):
        await asyncio.Event().wait()
        raise AssertionError

    engine = FakeEngine(slots=1)
    async with open_rollout([engine], score=score, groups_per_step=4) as rollout:
        await wait_until(lambda: len(engine.requests) == 8)
        assert ledger_counts(rollout.ledger).samples.running == 8


async def test_samples_that_no_engine_has_room_for_stay_with_the_controller():
    engine = FakeEngine(seconds=math.inf, slots=1)
    async with open_rollout([engine], groups_per_step=3) as rollout:
        await wait_until(lambda: len(engine.requests) == 2)
        assert ledger_counts(rollout.ledger).samples.waiting == 4
    assert len(engine.requests) == 2
    assert has_only_this_task()


async def test_a_wait_that_is_too_long_names_what_it_waits_for():
    engine = FakeEngine(seconds=make_latency({(1, 1): math.inf}))
    with pytest.raises(
        StuckError, match=r"step 1 waits for group 1: sample 1 generating on engine 0 for 0.\d+ s"
    ):
        async with open_rollout([engine], stuck_after_s=0.1) as rollout:
            await rollout.take()
    assert engine.aborted == [(1, 1)]


async def test_a_wait_for_a_reward_is_named_too_and_long_lists_are_cut():
    async def score(sample):
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(
        StuckError, match=r"sample 0 being scored .*; group 1: .*; and 2 more samples"
    ):
        async with open_rollout(
            [FakeEngine()], score=score, groups_per_step=3, stuck_after_s=0.1
        ) as rollout:
            await rollout.take()
    assert has_only_this_task()


@pytest.mark.parametrize("slow", ["engine", "reward"])
async def test_events_of_samples_put_the_deadline_off(slow):
    seconds = {(0, index): 0.15 * (index + 1) for index in range(4)}

    async def score(sample):
        await asyncio.sleep(seconds[tuple(sample.uid)] if slow == "reward" else 0)
        return await score_by_index(sample)

    async with open_rollout(
        [FakeEngine(seconds=make_latency(seconds) if slow == "engine" else 0.0)],
        score=score,
        groups_per_step=1,
        group_size=4,
        stuck_after_s=0.4,
    ) as rollout:
        assert group_ids(await rollout.take()) == [0]


async def test_a_long_sample_whose_tokens_grow_is_not_stuck():
    engine = FakeEngine(reply=lambda request: "abcdefgh", seconds=1.2)
    async with open_rollout([engine], stuck_after_s=0.6) as rollout:
        assert group_ids(await rollout.take()) == [0, 1]


async def test_an_engine_that_stops_in_the_middle_of_a_sample_is_stuck():
    engine = FakeEngine(reply=lambda request: "abcdefgh", seconds=0.4)
    async with open_rollout([engine], stuck_after_s=0.3) as rollout:
        await wait_until(lambda: engine.generated_tokens >= 8)
        await engine.pause()
        with pytest.raises(StuckError, match="generating on engine 0"):
            await rollout.take()


async def test_a_tool_that_works_within_its_own_limit_is_not_stuck():
    run_episode = single_turn(FakeCodec(), Sampling(max_tokens=8), seed=1)

    async def run_search(uid, sample_prompt, access):
        with access.activity("tool search", limit_s=30):
            await asyncio.sleep(0.4)
        return await run_episode(uid, sample_prompt, access)

    async with open_rollout([FakeEngine()], episode=run_search, stuck_after_s=0.1) as rollout:
        assert group_ids(await rollout.take()) == [0, 1]


async def test_a_tool_that_outlasts_its_own_limit_is_stuck():
    async def run_search(uid, sample_prompt, access):
        with access.activity("tool search", limit_s=0.3):
            await asyncio.sleep(math.inf)

    with pytest.raises(StuckError, match=r"in tool search for 0\.\d+ s"):
        async with open_rollout([FakeEngine()], episode=run_search, stuck_after_s=0.1) as rollout:
            await rollout.take()


async def test_a_reward_that_works_within_its_own_limit_is_not_stuck():
    async def score(sample):
        await asyncio.sleep(0.4)
        return await score_by_index(sample)

    async with open_rollout(
        [FakeEngine()], score=score, stuck_after_s=0.1, score_limit_s=30
    ) as rollout:
        assert group_ids(await rollout.take()) == [0, 1]


async def test_a_reward_that_outlasts_its_own_limit_is_stuck():
    async def score(sample):
        await asyncio.sleep(math.inf)

    with pytest.raises(StuckError, match=r"being scored for 0\.\d+ s"):
        async with open_rollout(
            [FakeEngine()], score=score, stuck_after_s=0.1, score_limit_s=0.2
        ) as rollout:
            await rollout.take()


async def test_a_take_that_waits_for_a_publish_is_named():
    async with open_rollout([FakeEngine()], stuck_after_s=0.05) as rollout:
        rollout.trained(await rollout.take(), 1)
        with pytest.raises(StuckError, match="step 2 waits for version 1 to be published"):
            await rollout.take()


async def test_an_engine_that_dies_is_the_one_root_cause():
    failure = EngineError("engine 0 died", fix="see its log")
    engine = FakeEngine(seconds=0.005)
    engine.fail_with = failure
    other = FakeEngine(seconds=math.inf)
    with pytest.raises(EngineError) as raised:
        async with open_rollout([engine, other]) as rollout:
            await rollout.take()
    assert raised.value is failure
    assert len(other.aborted) == len(other.requests)
    assert has_only_this_task()


async def test_a_failure_that_take_did_not_raise_is_raised_at_the_end():
    async def score(sample):
        raise EngineError("the scorer is gone")

    with pytest.raises(EngineError, match="the scorer is gone"):
        async with open_rollout([FakeEngine()], score=score):
            await asyncio.sleep(0.02)


async def test_an_error_of_the_block_is_raised_unchanged_and_nothing_is_left():
    engine = FakeEngine(seconds=math.inf)

    async def run():
        async with open_rollout([engine]):
            await wait_until(lambda: len(engine.requests) == 4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run()
    assert sorted(engine.aborted) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert has_only_this_task()


async def test_leaving_aborts_running_requests():
    engine = FakeEngine(seconds=math.inf)
    async with open_rollout([engine]):
        await wait_until(lambda: len(engine.requests) == 4)
    assert len(engine.aborted) == 4
    assert engine.load().running == 0
    assert has_only_this_task()


async def test_a_cancelled_run_leaves_nothing_behind():
    engine = FakeEngine(seconds=math.inf)

    async def run():
        async with open_rollout([engine]) as rollout:
            await rollout.take()

    task = asyncio.create_task(run())
    await wait_until(lambda: len(engine.requests) == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.aborted) == 4
    assert has_only_this_task()


async def test_no_engine_is_refused():
    with pytest.raises(EngineError, match="no engine"):
        async with open_rollout([]):
            pass


async def test_with_staleness_one_tokens_are_at_most_one_version_old_and_know_it():
    """The second sample of group 1 is still being generated when version 1 is published."""
    engine = FakeEngine(reply=lambda request: "abcd", seconds=make_latency({(1, 1): 0.4}))
    async with open_rollout([engine], max_staleness=1) as rollout:
        first = await rollout.take()
        assert group_ids(first) == [0, 2]
        assert rollout.stats.metrics["rollout/age_max"] == 0
        await wait_until(lambda: engine.generated_tokens >= 7 * 4 + 1)
        await train(rollout, first, [engine])
        second = await rollout.take()
        stats = rollout.stats
        assert group_ids(second) == [1, 3]
        versions = second[0].samples[1].versions[2:].tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        assert stats.metrics["rollout/age_max"] == 1
        assert 0 < stats.metrics["rollout/age_mean"] <= 1
        await train(rollout, second, [engine])
        third = await rollout.take()
    assert group_ids(third) == [4, 5]
    assert {group.start_version for group in third} == {1}
    assert rollout.stats.metrics["rollout/age_mean"] == 1


@pytest.mark.parametrize("staleness", [0, 0.5, 1, 2])
async def test_nothing_is_lost_and_no_token_too_old_over_many_steps(staleness):
    rng = random.Random(5)
    engines = [FakeEngine(seconds=lambda request: rng.random() * 0.01, slots=2) for _ in range(2)]

    async def score(sample):
        await asyncio.sleep(0.001 * sample.uid.index)
        return Score(float(sample.uid.index * (sample.uid.group % 4 > 0)))

    trained_ids = []
    async with open_rollout(engines, score=score, max_staleness=staleness) as rollout:
        for _ in range(12):
            groups = await rollout.take()
            assert len(groups) == 2
            assert rollout.stats.metrics["rollout/age_max"] <= math.ceil(staleness)
            trained_ids += group_ids(groups)
            await train(rollout, groups, engines)
            check_ledger(rollout.ledger)
        counts = ledger_counts(rollout.ledger).groups
    assert len(set(trained_ids)) == 24
    assert not any(uid % 4 == 0 for uid in trained_ids)
    assert counts.trained == 24
    assert counts.submitted == counts.trained + counts.dropped + counts.waiting + counts.running


async def test_a_token_that_is_too_old_is_refused():
    with pytest.raises(LedgerError, match="2 versions old"):
        async with open_rollout([FakeEngine(version=0)], version=2) as rollout:
            await rollout.take()


async def test_paused_admission_starts_nothing_and_is_reported():
    engine = FakeEngine()
    async with open_rollout([engine], stuck_after_s=0.05) as rollout:
        groups = await rollout.take()
        rollout.pause_admission()
        await train(rollout, groups, [engine])
        with pytest.raises(StuckError, match="admission is paused"):
            await rollout.take()
        assert len(engine.requests) == 4
        rollout.resume_admission()
        assert group_ids(await rollout.take()) == [2, 3]


async def test_interrupted_samples_continue_with_their_tokens_after_admission_resumes():
    engine = FakeEngine(reply=lambda request: "abcd", seconds=0.4)
    async with open_rollout([engine]) as rollout:
        await wait_until(lambda: engine.generated_tokens >= 4)
        await rollout.interrupt()
        await engine.sleep()
        num_generated = engine.generated_tokens
        rollout.resume_admission()
        groups = await rollout.take()
    assert [s.text for group in groups for s in group.samples] == ["abcd"] * 4
    assert 4 <= num_generated < 16
    assert engine.generated_tokens == 16
    assert len(engine.requests) == 8


async def test_samples_that_are_moved_at_a_publish_have_tokens_of_both_versions():
    """Group 1 runs on a slow engine when version 1 is published, and continues on a fast one."""
    slow = FakeEngine(
        reply=lambda request: "abcd", seconds=make_latency({(1, 0): 2.0, (1, 1): 2.0})
    )
    quick = FakeEngine(reply=lambda request: "abcd")
    async with open_rollout([slow], max_staleness=1, groups_per_step=1) as rollout:
        first = await rollout.take()
        await wait_until(lambda: slow.generated_tokens >= 8 + 2)
        rollout.fleet.add(quick)
        await rollout.interrupt()
        rollout.fleet.remove(0)
        num_generated = slow.generated_tokens - 8
        await train(rollout, first, [quick])
        rollout.resume_admission()
        (second,) = await rollout.take()
        stats = rollout.stats
    carried = {r.uid: len(r.continue_from.token_ids) for r in quick.requests if r.uid.group == 1}
    assert (second.uid, second.start_version) == (1, 0)
    assert sum(carried.values()) == num_generated
    for moved in second.samples:
        kept = carried[moved.uid]
        assert kept < 4
        assert moved.versions[2:].tolist() == [0] * kept + [1] * (4 - kept)
        assert moved.text == "abcd"
    assert stats.metrics["rollout/age_max"] == 1


async def test_interrupt_finds_samples_that_were_sent_in_the_same_iteration():
    engine = FakeEngine(seconds=math.inf)
    async with open_rollout([engine], stuck_after_s=1.0) as rollout:
        await rollout.interrupt()
        assert engine.requests == []
        assert rollout.fleet.engine_of == {}
        rollout.resume_admission()
        await wait_until(lambda: len(engine.requests) == 4)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_samples_of_a_lost_engine_are_trained_once_under_the_same_ids(staleness):
    engines = [FakeEngine(seconds=0.02, slots=2) for _ in range(3)]
    events, trained = [], []
    async with open_rollout(
        engines, max_staleness=staleness, groups_per_step=4, record_event=events.append
    ) as rollout:
        for step in range(6):
            if step in (1, 3):
                await wait_until(lambda: engines[0].load().running > 0)
                engines.pop(0).lose()
            groups = await rollout.take()
            trained += [s.uid for group in groups for s in group.samples]
            await train(rollout, groups, engines)
            check_ledger(rollout.ledger)
        counts = ledger_counts(rollout.ledger)
        assert len(rollout.fleet.engines) == 1
    assert len(trained) == len(set(trained)) == 48
    assert counts.groups.trained == 24
    assert counts.groups.dropped == 0
    assert audit(LogContents(tuple(events))).groups.trained == 24


async def test_the_loss_of_all_engines_ends_the_run():
    engine = FakeEngine(seconds=math.inf)

    async def run():
        async with open_rollout([engine]) as rollout:
            await wait_until(lambda: len(engine.requests) == 4)
            engine.lose()
            await rollout.take()

    with pytest.raises(EngineLost, match="the fake engine is gone"):
        await run()
    assert has_only_this_task()


async def test_an_engine_that_joins_later_gets_work():
    first, second = FakeEngine(seconds=math.inf, slots=1), FakeEngine(slots=1)
    async with open_rollout([first], engine_queue=0, groups_per_step=3) as rollout:
        await wait_until(lambda: len(first.requests) == 1)
        rollout.fleet.add(second)
        await wait_until(lambda: len(second.requests) == 5)
    assert {r.uid for r in second.requests}.isdisjoint({r.uid for r in first.requests})


async def test_the_wait_for_an_engine_that_hangs_names_it_among_others():
    hanging_engine = FakeEngine(seconds=math.inf, slots=1)
    with pytest.raises(StuckError, match=r"group 0: sample 1 generating on engine 1 for"):
        async with open_rollout(
            [FakeEngine(slots=1), hanging_engine], engine_queue=0, stuck_after_s=0.1
        ) as rollout:
            await rollout.take()


async def test_a_wait_names_the_tool_that_a_sample_is_in():
    async def run_search(uid, sample_prompt, access):
        with access.activity("tool search"):
            await asyncio.sleep(math.inf)

    async with open_rollout([FakeEngine()], episode=run_search, groups_per_step=1) as rollout:
        await wait_until(lambda: "tool search" in rollout.describe_waits())
        assert re.fullmatch(
            r"group 0: sample 0 in tool search for \S+ s, sample 1 in tool search for \S+ s",
            rollout.describe_waits(),
        )
        rollout.pause_admission()
        assert rollout.describe_waits().endswith("; groups to start, but admission is paused")


async def test_spares_that_were_not_needed_are_counted():
    """Of three samples the first two make the group; the third never ends."""
    engine = FakeEngine(seconds=make_latency({(0, 2): math.inf, (1, 0): math.inf}))
    async with open_rollout([engine], spare_samples=1) as rollout:
        groups = await rollout.take()
        stats = rollout.stats
        await wait_until(lambda: engine.load().running == 0)
        assert rollout.fleet.engine_of == {}
    assert [[s.uid.index for s in group.samples] for group in groups] == [[0, 1], [1, 2]]
    assert stats.metrics["rollout/cancelled"] == 2
    assert stats.metrics["rollout/cancelled_share"] == pytest.approx(2 / 6)
    assert stats.metrics["rollout/bias/length"] == 0


async def test_the_bias_of_dropping_stale_groups_is_measured():
    """The second sample of group 1 never ends, so the group is dropped with its first sample."""
    letters = {0: "aa", 1: "bbbbbbbb"}
    engine = FakeEngine(
        reply=lambda request: letters.get(request.uid.group, "cccc"),
        seconds=make_latency({(1, 1): math.inf}),
    )
    scored_groups = []
    async with open_rollout(
        [engine],
        max_staleness=1,
        staleness_rule="drop_stale",
        groups_per_step=1,
        on_group_scored=lambda group: scored_groups.append((group.uid, len(group.members))),
    ) as rollout:
        for _ in range(2):
            await train(rollout, await rollout.take(), [engine])
        (group,) = await rollout.take()
        stats = rollout.stats
        counts = ledger_counts(rollout.ledger)
    assert counts.dropped_by_reason == {"stale": 1}
    assert stats.dropped == {"stale": 1}
    assert (
        stats.metrics["rollout/bias/length_kept"],
        stats.metrics["rollout/bias/length_dropped"],
    ) == (4, 8)
    # Kept: 4, 4; dropped: 8 (score 0).
    assert stats.metrics["rollout/bias/length"] == pytest.approx(4 - 16 / 3)
    assert (stats.metrics["score/trained"], stats.metrics["rollout/bias/score_dropped"]) == (0.5, 0)
    assert stats.metrics["rollout/bias/score"] == pytest.approx(0.5 - 1 / 3)
    assert stats.metrics["rollout/cancelled"] == 1
    assert (1, 0) in scored_groups
    assert group.uid not in (0, 1)
    assert all(is_documented(name) for name in stats.metrics)


async def test_masked_tokens_are_counted():
    engine = FakeEngine(reply=lambda request: "abcd", seconds=make_latency({(1, 1): 0.2}))
    async with open_rollout(
        [engine], staleness_rule="mask_stale_tokens", max_staleness=0.5, group_size=2
    ) as rollout:
        masked = trained = 0
        for _ in range(6):
            groups = await rollout.take()
            masked += rollout.stats.metrics["rollout/masked_tokens"]
            trained += sum(int(s.loss_mask.sum()) for group in groups for s in group.samples)
            await asyncio.sleep(0.06)
            await train(rollout, groups, [engine])
    assert masked > 0
    assert masked + trained == 6 * 2 * 2 * 4


async def test_groups_of_the_log_start_again_with_their_prompts_and_then_new_ones_follow():
    """The checkpoint has groups 0 and 1; the log also has 2 and 3."""
    engine = FakeEngine()
    async with open_rollout([engine]) as rollout:
        groups = await rollout.take()
        state, saved = rollout.state(), rollout.untrained()
        await train(rollout, groups, [engine])
    requested_uids = []

    def find(uid):
        requested_uids.append(uid)
        return prompt(uid=uid)

    resumed_engine = FakeEngine()
    started_groups = [(0, "toy/0"), (1, "toy/1"), (2, "old/2"), (3, "old/3")]
    async with open_rollout(
        [resumed_engine], saved=SavedRollout(state, saved, started_groups), find_prompt=find
    ) as rollout:
        batches = []
        for _ in range(3):
            batch = await rollout.take()
            batches.append([(group.uid, group.prompt.uid) for group in batch])
            await train(rollout, batch, [resumed_engine])
    assert batches[0] == [(0, "toy/0"), (1, "toy/1")]
    assert batches[1] == [(2, "old/2"), (3, "old/3")]
    assert batches[2] == [(4, "toy/0"), (5, "toy/1")]
    assert requested_uids == ["old/2", "old/3"]


async def test_without_a_checkpoint_the_groups_of_the_log_start_again_too():
    async with open_rollout(
        [FakeEngine()],
        saved=SavedRollout(started=[(0, "old/0")]),
        find_prompt=lambda uid: prompt(uid=uid),
    ) as rollout:
        groups = await rollout.take()
    assert [group.prompt.uid for group in groups] == ["old/0", "toy/0"]


async def test_a_resumed_run_samples_groups_in_flight_again_under_the_same_ids():
    engine = FakeEngine(
        seconds=make_latency({(1, 1): math.inf, (2, 0): math.inf, (2, 1): math.inf})
    )
    async with open_rollout([engine], groups_per_step=3) as rollout:
        await wait_until(
            lambda: len(rollout.untrained()) == 2 and len(rollout.untrained()[0].members) == 2
        )
        await wait_until(lambda: len(rollout.untrained()[1].members) == 1)
        state = json.loads(json.dumps(rollout.state()))
        saved = rollout.untrained()
    assert [(g.uid, len(g.members)) for g in saved] == [(0, 2), (1, 1)]

    resumed_engine = FakeEngine()
    streams_before = {r.uid: r.stream for r in engine.requests}
    async with open_rollout(
        [resumed_engine], groups_per_step=3, saved=SavedRollout(state, saved)
    ) as rollout:
        groups = await rollout.take()
        assert ledger_counts(rollout.ledger).groups.submitted == 3
        # Samples scored before the save count in the step's metrics too: scores are 0 and 1.
        assert rollout.stats.metrics["rollout/domain/toy/samples"] == 6
        assert rollout.stats.metrics["score/mean"] == 0.5
    assert group_ids(groups) == [0, 1, 2]
    assert groups[0] is saved[0]
    assert groups[1].members[0] is saved[1].members[0]
    assert [group.prompt.uid for group in groups] == ["toy/0", "toy/1", "toy/2"]
    assert {r.uid: r.stream for r in resumed_engine.requests} == {
        uid: streams_before[uid] for uid in [(1, 1), (2, 0), (2, 1)]
    }


async def test_a_resumed_run_without_its_finished_samples_is_refused():
    async with open_rollout([FakeEngine()]) as rollout:
        await rollout.take()
        state = rollout.state()
    with pytest.raises(CheckpointError, match=r"samples \[0, 1\] of group 0"):
        async with open_rollout([FakeEngine()], saved=SavedRollout(state)):
            pass


async def test_a_run_cannot_be_resumed_with_less_staleness_than_its_samples_have():
    engine = FakeEngine()
    async with open_rollout([engine], max_staleness=1) as rollout:
        await wait_until(lambda: count_complete(rollout.ledger) == 4)
        await train(rollout, await rollout.take(), [engine])
        state, saved = rollout.state(), rollout.untrained()
    with pytest.raises(CheckpointError, match=r"1 versions old.*resume with rollout.max_staleness"):
        async with open_rollout(
            [FakeEngine(version=1)], saved=SavedRollout(state, saved), version=1
        ):
            pass


async def test_an_interrupted_and_resumed_run_trains_the_same_batches():
    async def run(steps_per_run):
        batches, state, saved, version = [], None, [], 0
        prompts = make_numbered_prompts()
        for steps in steps_per_run:
            engine = FakeEngine(version=version)
            async with open_rollout(
                [engine], next_prompt=prompts, saved=SavedRollout(state, saved), version=version
            ) as rollout:
                for _ in range(steps):
                    groups = await rollout.take()
                    batches.append([(s.uid, s.text) for g in groups for s in g.samples])
                    await train(rollout, groups, [engine])
                await asyncio.sleep(0)
                state, saved, version = rollout.state(), rollout.untrained(), rollout.version
        return batches

    assert await run([1, 2, 1]) == await run([4])


async def test_stats_cover_all_samples_that_ended_in_the_step_under_documented_names():
    prompts = iter([prompt(domain="sums"), prompt(domain="words"), *[prompt()] * 4])

    async def score(sample):
        return Score(sample.uid.index + (1.0 if sample.prompt.domain == "words" else 0.0))

    engine = FakeEngine(reply=lambda request: "x" * (9 if request.uid == (0, 0) else 3))
    async with open_rollout([engine], score=score, next_prompt=lambda: next(prompts)) as rollout:
        assert rollout.stats.metrics["rollout/groups"] == 0
        await rollout.take()
        stats = rollout.stats
    assert stats.metrics["score/domain/sums"] == 0.5
    assert stats.metrics["score/domain/words"] == 1.5
    assert stats.metrics["score/mean"] == 1.0
    assert stats.metrics["rollout/tokens"] == 8 + 3 * 3
    assert stats.metrics["rollout/truncated"] == 0.25
    assert (stats.metrics["rollout/groups"], stats.metrics["rollout/samples"]) == (2, 4)
    assert stats.metrics["time/sample_generate"] >= 0
    assert all(is_documented(name) for name in stats.metrics)


async def test_evaluation_gives_a_group_for_each_prompt_in_their_order():
    latency_rng = random.Random(3)
    engines = [FakeEngine(seconds=lambda request: latency_rng.random() * 0.005, slots=1)] * 2
    reported = []
    prompts = [prompt(f"{number}", uid=f"toy/{number}") for number in range(7)]
    async with open_prompt_sampling(
        prompts,
        engines,
        samples=2,
        episode=single_turn(FakeCodec(), Sampling(), seed=0, purpose="eval"),
        score=score_by_index,
        stuck_after_s=600,
        on_progress=lambda done, total: reported.append((done, total)),
    ) as rollout:
        groups = await rollout.take()
    assert [group.prompt.uid for group in groups] == [
        expected_prompt.uid for expected_prompt in prompts
    ]
    assert [group.uid for group in groups] == [-1, -2, -3, -4, -5, -6, -7]
    assert all(group.scores == (0, 1) for group in groups)
    assert reported == [(done, 14) for done in range(1, 15)]
    assert has_only_this_task()


async def test_evaluation_keeps_failed_scores_and_groups_without_signal():
    async def score(sample):
        return Score.failed("down") if sample.uid.group == -1 else Score(1.0)

    async with open_prompt_sampling(
        [prompt(), prompt()],
        [FakeEngine(version=3)],
        samples=1,
        episode=single_turn(FakeCodec(), Sampling(), seed=0, purpose="eval"),
        score=score,
        stuck_after_s=600,
    ) as rollout:
        groups = await rollout.take()
    assert [group.members[0].score.ok for group in groups] == [False, True]
    assert groups[0].start_version == 3
