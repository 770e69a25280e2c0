"""The simulated engine, with schedules computed by hand, and the simulated workload, which does not
depend on the schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fakes import step_time
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.errors import ConfigError, DataError, EngineError
from rollick.infer.engine import InferenceClient
from rollick.simulator.batching import HEADROOM, EngineUsage, total_usage
from rollick.simulator.engine import SimulatedEngine
from rollick.simulator.step_time import StepTime, fit_step_time
from rollick.simulator.virtual_clock import run_virtual
from rollick.simulator.workload import (
    Latencies,
    Lengths,
    SimulatedReward,
    constant,
    log_normal,
    recorded,
)
from rollick.testing.fakes import sample
from rollick.types import (
    Completion,
    PolicyVersion,
    Request,
    SampleId,
    Sampling,
    StepRecord,
    StopReason,
    frozen_array,
)

ONE_SECOND = step_time(1.0)
"""Every step takes a second, whatever it does."""

QUARTERS = step_time(1.0, per_sequence_s=0.5, per_kv_token_s=0.25, per_prefill_token_s=0.125)


def _make_request(
    index: int = 0,
    *,
    group_uid: int = 0,
    prompt: int = 2,
    max_tokens: int = 1000,
    grouped: bool = False,
    continue_from: Completion | None = None,
) -> Request:
    return Request(
        SampleId(group_uid, index),
        frozen_array(np.zeros(prompt), np.int32),
        Sampling(max_tokens=max_tokens),
        stream=0,
        group=group_uid if grouped else None,
        continue_from=continue_from,
    )


def _length_by_index(*tokens: int) -> Callable[[Request], int]:
    """Response lengths by the index of the sample in its group."""
    return lambda request: tokens[request.uid.index]


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _run_at(time: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    await asyncio.sleep(time - _now())
    return await coroutine


async def _generate_timed(
    engine: InferenceClient, request: Request, *, at: float = 0.0
) -> tuple[float, Completion]:
    """Send a request at time `at`. Returns the end time and the completion."""
    completion = await _run_at(at, engine.generate(request))
    return _now(), completion


async def _run_all(*coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in running]


def test_two_sequences_end_at_the_computed_times():
    async def main() -> list[float]:
        engine = SimulatedEngine(QUARTERS, _length_by_index(2, 1), slots=2)
        generations = (
            _generate_timed(engine, _make_request(0, prompt=2)),
            _generate_timed(engine, _make_request(1, prompt=3)),
        )
        return [when for when, _ in await _run_all(*generations)]

    # Step 1: 1 + 2 * 0.5 + 5 * 0.25 (cache) + 5 * 0.125 (prefill). Step 2: 1 + 0.5 + 3 * 0.25.
    assert run_virtual(main()) == [3.875 + 2.25, 3.875]


def test_a_faster_engine_divides_every_time():
    async def main() -> float:
        engine = SimulatedEngine(QUARTERS, _length_by_index(2), slots=2, speed=2.0)
        return (await _generate_timed(engine, _make_request()))[0]

    # (1 + 0.5 + 2 * 0.25 + 2 * 0.125) + (1 + 0.5 + 3 * 0.25)
    assert run_virtual(main()) == (2.25 + 2.25) / 2


def test_a_request_that_arrives_during_a_step_joins_at_its_end():
    async def main() -> list[float]:
        engine = SimulatedEngine(ONE_SECOND, _length_by_index(5, 2), slots=2)
        ends = await _run_all(
            _generate_timed(engine, _make_request(0)),
            _generate_timed(engine, _make_request(1), at=2.5),
        )
        return [when for when, _ in ends]

    assert run_virtual(main()) == [5, 3 + 2]


def test_a_free_slot_is_filled_at_the_moment_it_is_free():
    async def main() -> list[float]:
        engine = SimulatedEngine(ONE_SECOND, _length_by_index(3, 2, 4), slots=1)
        ends = await _run_all(*(_generate_timed(engine, _make_request(n)) for n in range(3)))
        assert engine.usage().slot_share == 1.0
        return [when for when, _ in ends]

    assert run_virtual(main()) == [3, 5, 9]


def test_a_waiter_that_returns_at_the_end_of_a_step_loses_no_step():
    async def main() -> float:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 2, slots=1)
        for turn in range(5):
            await engine.generate(_make_request(turn))
            await asyncio.sleep(0)
        return _now()

    assert run_virtual(main()) == 10


def test_a_prompt_is_prefilled_once_for_a_group():
    step = step_time(1.0, per_prefill_token_s=0.5)

    async def main(grouped: bool) -> tuple[float, int]:
        engine = SimulatedEngine(step, lambda _: 1, slots=4)
        planned = (_make_request(n, prompt=4, grouped=grouped) for n in range(4))
        await _run_all(*(engine.generate(request) for request in planned))
        return _now(), engine.usage().prefilled_tokens

    assert run_virtual(main(True)) == (1 + 4 * 0.5, 4)
    assert run_virtual(main(False)) == (1 + 16 * 0.5, 16)


def test_the_next_turn_of_a_sample_prefills_only_what_is_new():
    async def main() -> list[int]:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 3, slots=2)
        prefilled: list[int] = []
        for prompt in (10, 10 + 3 + 5):
            await engine.generate(_make_request(0, prompt=prompt))
            prefilled.append(engine.usage().prefilled_tokens)
        return prefilled

    assert run_virtual(main()) == [10, 10 + 5]


def test_a_publish_makes_cached_prompts_useless_to_new_sequences():
    async def main() -> int:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 1, slots=1)
        await engine.generate(_make_request(0, prompt=10, grouped=True))
        await engine.commit_shared(PolicyVersion(1))
        await engine.generate(_make_request(1, prompt=10, grouped=True))
        return engine.usage().prefilled_tokens

    assert run_virtual(main()) == 20


def test_tokens_carry_the_version_that_drew_them():
    async def main() -> Completion:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 6, slots=1, version=3)
        updates = (
            _run_at(1.5, engine.commit_shared(PolicyVersion(4))),
            _run_at(4.0, engine.commit_shared(PolicyVersion(5))),
        )
        return (await _run_all(engine.generate(_make_request()), *updates))[0]

    # The update of 1.5 s waits for the end of the second step.
    assert run_virtual(main()).versions.tolist() == [3, 3, 4, 4, 5, 5]


PREFILLS = step_time(1.0, per_prefill_token_s=0.5)


@pytest.mark.parametrize(("keep_cache", "recomputed"), [(False, 10 + 2), (True, 0)])
def test_at_a_publish_the_cache_is_recomputed_or_kept_and_flagged(keep_cache, recomputed):
    async def main() -> tuple[float, EngineUsage, Completion]:
        engine = SimulatedEngine(PREFILLS, lambda _: 4, slots=1)
        # The prefill of 10 tokens takes 5 s, and two steps 2 s.
        update = _run_at(7.0, engine.commit_shared(PolicyVersion(1), keep_cache=keep_cache))
        completion, _ = await _run_all(engine.generate(_make_request(prompt=10)), update)
        return _now(), engine.usage(), completion

    time, usage, completion = run_virtual(main())
    assert usage.recomputed_tokens == recomputed
    assert usage.prefilled_tokens == 10 + recomputed
    assert time == 5 + 4 + recomputed / 2
    flags = None if completion.kept_cache is None else completion.kept_cache.tolist()
    assert flags == ([False, False, True, True] if keep_cache else None)


def test_only_tokens_over_an_older_cache_are_flagged():
    async def main() -> list[Completion]:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 6, slots=1)
        changes = [
            _run_at(2.0, engine.commit_shared(PolicyVersion(1), keep_cache=True)),
            _run_at(3.0, engine.commit_shared(PolicyVersion(1))),
            _run_at(4.0, engine.commit_shared(PolicyVersion(1), keep_cache=True)),
            _run_at(5.0, engine.commit_shared(PolicyVersion(2), keep_cache=True)),
        ]
        first, second, *_ = await _run_all(
            *map(engine.generate, (_make_request(0), _make_request(1))), *changes
        )
        complete = replace(_make_request(0), continue_from=first, sampling=Sampling(max_tokens=8))
        return [first, second, await engine.generate(complete)]

    first, second, continued = run_virtual(main())
    assert first.versions.tolist() == [0, 0, 1, 1, 1, 2]
    assert first.kept_cache.tolist() == [False, False, True, False, False, True]
    assert second.kept_cache is None, "it began after the last publish"
    assert continued.kept_cache.tolist() == first.kept_cache.tolist()


def test_a_completion_reports_its_time_in_queue_and_prefill():
    async def main() -> list[Completion]:
        engine = SimulatedEngine(PREFILLS, lambda _: 4, slots=1)
        requests = [_make_request(n, prompt=10, grouped=True) for n in range(2)]
        return await _run_all(*map(engine.generate, requests))

    first, second = run_virtual(main())
    assert (first.queued_s, first.prefill_s, first.seconds) == (0, 6, 9)
    assert (second.queued_s, second.prefill_s, second.seconds) == (9, 1, 13), "the group's prompt"


def test_when_the_cache_is_full_the_youngest_waits_and_computes_its_tokens_again():
    capacity = 10 + 10 + 3 * HEADROOM

    async def main() -> tuple[list[Any], EngineUsage]:
        engine = SimulatedEngine(
            ONE_SECOND, _length_by_index(40, 40), slots=2, kv_capacity=capacity
        )
        ends = await _run_all(
            *(_generate_timed(engine, _make_request(n, prompt=10)) for n in range(2))
        )
        return ends, engine.usage()

    (first, second), usage = run_virtual(main())
    # Both grow to 10 + 24 tokens; then there is no room for one more each.
    assert first[0] == 40
    assert second[0] == 40 + (40 - 24)
    assert len(first[1].token_ids) == len(second[1].token_ids) == 40
    assert (usage.preempted, usage.recomputed_tokens) == (1, 10 + 24)
    assert usage.generated_tokens == 80


def test_a_cache_without_room_for_a_prompt_lets_it_wait():
    async def main() -> tuple[list[float], EngineUsage]:
        engine = SimulatedEngine(ONE_SECOND, _length_by_index(4, 3), slots=2, kv_capacity=60)
        ends = await _run_all(
            *(_generate_timed(engine, _make_request(n, prompt=40)) for n in range(2))
        )
        return [when for when, _ in ends], engine.usage()

    ends, usage = run_virtual(main())
    assert ends == [4, 7]
    assert usage.preempted == 0


def test_a_response_that_no_cache_could_hold_is_cut_like_any_too_long_one():
    async def main() -> list[Completion]:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 500, slots=1, kv_capacity=30)
        return [
            await engine.generate(_make_request(0, prompt=10)),
            await engine.generate(_make_request(1, prompt=10, max_tokens=5)),
        ]

    full, short = run_virtual(main())
    assert (len(full.token_ids), full.stop) == (20, StopReason.LENGTH)
    assert (len(short.token_ids), short.stop) == (5, StopReason.LENGTH)


def test_an_aborted_sequence_continues_on_another_engine_with_its_tokens_and_length():
    async def main() -> tuple[Completion, Completion, int]:
        one = SimulatedEngine(ONE_SECOND, lambda _: 10, slots=1, version=0)
        other = SimulatedEngine(ONE_SECOND, lambda _: 10, slots=1, version=1)
        part, _ = await _run_all(
            one.generate(_make_request()), _run_at(3.5, one.abort(SampleId(0, 0)))
        )
        assert _now() == 4
        complete = await other.generate(_make_request(prompt=2, continue_from=part))
        assert one.load().running == 0
        return part, complete, other.usage().prefilled_tokens

    part, complete, prefilled = run_virtual(main())
    assert (part.stop, len(part.token_ids)) == (StopReason.ABORTED, 4)
    assert (complete.stop, len(complete.token_ids)) == (StopReason.STOP, 10)
    assert complete.versions.tolist() == [0] * 4 + [1] * 6
    assert prefilled == 2 + 4
    assert not complete.versions.flags.writeable


def test_a_waiting_sequence_is_aborted_immediately_and_an_unknown_one_ignored():
    async def main() -> Completion:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 100, slots=1)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(engine.generate(_make_request(0)))
            waiting = tasks.create_task(engine.generate(_make_request(1)))
            await asyncio.sleep(2.5)
            await engine.abort(SampleId(9, 9))
            await engine.abort(SampleId(0, 1))
            assert _now() == 2.5
            await engine.abort(SampleId(0, 0))
            assert len((await running).token_ids) == 3
        return waiting.result()

    completion = run_virtual(main())
    assert (completion.stop, len(completion.versions)) == (StopReason.ABORTED, 0)


def test_a_finished_sequence_that_is_continued_ends_immediately():
    async def main() -> tuple[float, Completion]:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 3, slots=1)
        complete = await engine.generate(_make_request())
        continued = await engine.generate(_make_request(continue_from=complete))
        return _now(), continued

    time, continued = run_virtual(main())
    assert (time, len(continued.token_ids), continued.stop) == (3, 3, StopReason.STOP)


def test_a_cancelled_caller_leaves_its_slot_at_the_end_of_the_step():
    async def main() -> float:
        engine = SimulatedEngine(ONE_SECOND, _length_by_index(100, 2), slots=1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(engine.generate(_make_request(0)))
            second = tasks.create_task(engine.generate(_make_request(1)))
            await asyncio.sleep(4.5)
            first.cancel()
            await second
        return _now()

    assert run_virtual(main()) == 5 + 2


def test_a_pause_waits_for_the_step_and_time_stands_still_until_resume():
    async def main() -> list[float]:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 4, slots=1)
        seen: list[float] = []

        async def pause_and_resume() -> None:
            await asyncio.sleep(1.5)
            await engine.pause()
            seen.append(_now())
            await asyncio.sleep(10)
            assert engine.load().generated_tokens == 2
            await engine.resume()

        end, _ = await _run_all(_generate_timed(engine, _make_request()), pause_and_resume())
        assert engine.usage().busy_s == 4
        return [*seen, end[0]]

    assert run_virtual(main()) == [2, 14]


def test_a_failure_reaches_current_and_later_waiters():
    async def main() -> list[str]:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 100, slots=1)
        engine.fail_at(2.5)
        waits = (engine.generate(_make_request(n)) for n in range(2))
        errors = await asyncio.gather(*waits, return_exceptions=True)
        assert _now() == 2.5
        assert errors[0] is not errors[1]
        with pytest.raises(EngineError, match=r"failed at 2\.5 s"):
            await engine.generate(_make_request(5))
        with pytest.raises(EngineError, match=r"failed at 2\.5 s"):
            await engine.pause()
        assert (engine.usage().busy_s, engine.usage().generated_tokens) == (2.5, 2)
        return [type(error).__name__ for error in errors]

    assert run_virtual(main()) == ["EngineLost", "EngineLost"]


def test_a_load_shows_the_tokens_of_this_moment():
    async def main() -> None:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 8, slots=2, kv_capacity=1000)
        async with asyncio.TaskGroup() as tasks:
            for n in range(3):
                tasks.create_task(engine.generate(_make_request(n, prompt=10)))
            await asyncio.sleep(3.5)
            load = engine.load()
        assert (load.running, load.waiting, load.slots, load.version) == (2, 1, 2, 0)
        assert (load.generated_tokens, load.kv_tokens, load.busy_seconds) == (6, 26, 3.5)
        assert (load.kv_capacity, load.preempted) == (1000, 0)
        assert engine.load().kv_tokens == 0

    run_virtual(main())


def test_usage_counts_the_seconds_of_devices_and_of_slots():
    async def main() -> EngineUsage:
        engine = SimulatedEngine(ONE_SECOND, _length_by_index(4, 2), slots=4)
        idle = SimulatedEngine(ONE_SECOND, _length_by_index(4, 2), slots=4)
        await _run_all(*(engine.generate(_make_request(n)) for n in range(2)))
        await asyncio.sleep(4)
        return total_usage([engine.usage(), idle.usage()])

    usage = run_virtual(main())
    assert (usage.busy_s, usage.slot_s) == (4, 4 + 2)
    assert (usage.busy_share, usage.slot_share) == (4 / 16, 6 / 64)


def test_an_engine_refuses_what_it_cannot_do():
    async def main() -> None:
        engine = SimulatedEngine(ONE_SECOND, lambda _: 5, slots=1, kv_capacity=20)
        for prompt in (0, 20):
            with pytest.raises(EngineError, match=f"prompt of {prompt} tokens"):
                await engine.generate(_make_request(prompt=prompt))
        pending = asyncio.ensure_future(engine.generate(_make_request()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already"):
            await engine.generate(_make_request())
        await pending

    run_virtual(main())


@dataclass
class _PlannedRequest:
    at: float
    prompt: int
    length: int
    drawn: int = 0
    ended: float = 0.0


def _simulate_steps(
    jobs: Sequence[_PlannedRequest], *, slots: int, capacity: int
) -> tuple[list[float], int]:
    """The reference: a plain loop over all steps."""
    now, preempted = 0.0, 0
    arriving, waiting, running = (
        sorted(jobs, key=lambda job: job.at),
        list[_PlannedRequest](),
        list[_PlannedRequest](),
    )
    while arriving or waiting or running:
        if not waiting and not running:
            now = max(now, arriving[0].at)
        while arriving and arriving[0].at <= now:
            waiting.append(arriving.pop(0))
        kv = sum(job.prompt + job.drawn for job in running)
        while kv + len(running) > capacity:
            waiting.insert(0, running.pop())
            kv -= waiting[0].prompt + waiting[0].drawn
            preempted += 1
        prefill = 0
        while waiting and len(running) < slots:
            context = waiting[0].prompt + waiting[0].drawn
            if running and kv + context + HEADROOM * (len(running) + 1) > capacity:
                break
            running.append(waiting.pop(0))
            kv += context
            prefill += context
        now += QUARTERS.seconds(len(running), kv, prefill)
        for job in running:
            job.drawn += 1
            job.ended = now
        running = [job for job in running if job.drawn < job.length]
    return [job.ended for job in jobs], preempted


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        # The order of requests that arrive at the same time is undefined.
        st.tuples(st.integers(0, 2000), st.integers(1, 40), st.integers(1, 60)),
        min_size=1,
        max_size=12,
        unique_by=lambda job: job[0],
    ),
    slots=st.integers(1, 5),
    capacity=st.integers(100, 300),
)
def test_the_closed_form_equals_a_step_by_step_simulation(jobs, slots, capacity):
    async def main() -> tuple[list[float], int]:
        engine = SimulatedEngine(
            QUARTERS, lambda r: jobs[r.uid.index][2], slots=slots, kv_capacity=capacity
        )
        coroutines = (
            _generate_timed(engine, _make_request(n, prompt=prompt), at=at / 10)
            for n, (at, prompt, _) in enumerate(jobs)
        )
        ends = await _run_all(*coroutines)
        assert engine.usage().generated_tokens == sum(length for *_, length in jobs)
        return [when for when, _ in ends], engine.load().preempted

    planned = [_PlannedRequest(at / 10, prompt, length) for at, prompt, length in jobs]
    ends, preempted = _simulate_steps(planned, slots=slots, capacity=capacity)
    actual, engine_preempted = run_virtual(main())
    assert engine_preempted == preempted
    np.testing.assert_allclose(actual, ends, rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_workload_does_not_depend_on_order_or_interruptions(data):
    lengths = Lengths(7, log_normal(20, 5), 80)
    uids = [SampleId(g, n) for g in range(3) for n in range(3)]
    order = data.draw(st.permutations(uids))
    aborts = data.draw(st.lists(st.tuples(st.floats(0, 90), st.sampled_from(uids)), max_size=8))
    commits = data.draw(st.lists(st.floats(0, 90), max_size=3))

    async def main() -> dict[SampleId, Completion]:
        engines = [
            SimulatedEngine(
                QUARTERS,
                lambda request: lengths.tokens(request.uid),
                slots=2,
                kv_capacity=150,
                speed=speed,
            )
            for speed in (1.0, 3.0)
        ]

        async def generate_until_done(engine_index: int, uid: SampleId) -> Completion:
            request = _make_request(uid.index, group_uid=uid.group, grouped=True)
            completion = await engines[engine_index % 2].generate(request)
            while completion.stop is StopReason.ABORTED:
                engine_index += 1
                request = replace(request, continue_from=completion)
                completion = await engines[engine_index % 2].generate(request)
            return completion

        coroutines = [
            generate_until_done(engine_index, uid) for engine_index, uid in enumerate(order)
        ]
        for at, uid in aborts:
            coroutines += [_run_at(at, engine.abort(uid)) for engine in engines]
        for n, at in enumerate(sorted(commits)):
            coroutines += [_run_at(at, e.commit_shared(PolicyVersion(n + 1))) for e in engines]
        done = (await _run_all(*coroutines))[: len(order)]
        drawn = total_usage(engine.usage() for engine in engines).generated_tokens
        assert drawn == sum(len(completion.token_ids) for completion in done)
        assert all(e.load().kv_tokens == 0 and e.load().running == 0 for e in engines)
        return {completion.uid: completion for completion in done}

    done = run_virtual(main())
    assert {uid: len(c.token_ids) for uid, c in done.items()} == {
        uid: lengths.tokens(uid) for uid in uids
    }
    for completion in done.values():
        assert len(completion.versions) == len(completion.logprobs) == len(completion.token_ids)
        assert (np.diff(completion.versions) >= 0).all()


def test_a_thousand_engines_run_to_the_end_in_seconds():
    lengths = Lengths(0, log_normal(600, 12), 8192)
    step = step_time(0.02, 1e-4, 4e-8, 2e-6)

    async def main() -> EngineUsage:
        engines = [
            SimulatedEngine(step, lambda request: lengths.tokens(request.uid), slots=32)
            for _ in range(1024)
        ]
        requests = (
            _make_request(n % 8, group_uid=n // 8, prompt=200, max_tokens=8192) for n in range(8192)
        )
        coroutines = (engines[n % 1024].generate(request) for n, request in enumerate(requests))
        await asyncio.gather(*coroutines)
        return total_usage(engine.usage() for engine in engines)

    usage = run_virtual(main())
    assert usage.generated_tokens == sum(
        lengths.tokens(SampleId(n // 8, n % 8)) for n in range(8192)
    )
    assert usage.prefilled_tokens == 8192 * 200


def test_log_normal_lengths_have_the_requested_median_and_tail():
    lengths = Lengths(1, log_normal(600, 10), 100_000)
    drawn = np.array([lengths.tokens(SampleId(n, 0)) for n in range(20_000)])
    assert np.median(drawn) == pytest.approx(600, rel=0.03)
    assert np.quantile(drawn, 0.999) == pytest.approx(6000, rel=0.25)


def test_lengths_are_cut_follow_the_id_and_the_turn_and_are_never_zero():
    lengths = Lengths(1, log_normal(3, 100), 10)
    uids = [SampleId(n, 0) for n in range(500)]
    drawn = [lengths.tokens(uid) for uid in uids]
    assert (min(drawn), max(drawn)) == (1, 10)
    assert drawn == [lengths.tokens(uid) for uid in reversed(uids)][::-1]
    assert drawn != [lengths.tokens(uid, 1) for uid in uids]
    assert drawn != [replace(lengths, seed=2).tokens(uid) for uid in uids]


def test_recorded_lengths_are_drawn_uniformly_from_the_record():
    lengths = Lengths(0, recorded((30, 10, 20)), 25)
    drawn = [lengths.tokens(SampleId(n, 0)) for n in range(3000)]
    assert {tokens: round(drawn.count(tokens) / 1000) for tokens in set(drawn)} == {
        10: 1,
        20: 1,
        25: 1,
    }


def test_samples_of_a_group_can_correlate_without_changing_the_distribution():
    shared = Lengths(0, log_normal(600, 10), 100_000, prompt_share=0.8)
    logs = np.log([[shared.tokens(SampleId(g, n)) for n in range(4)] for g in range(2000)])
    assert np.exp(np.median(logs)) == pytest.approx(600, rel=0.05)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.8, abs=0.05)
    independent = replace(shared, prompt_share=0.0)
    others = np.log([[independent.tokens(SampleId(g, n)) for n in range(2)] for g in range(2000)])
    assert np.corrcoef(others[:, 0], others[:, 1])[0, 1] == pytest.approx(0.0, abs=0.06)
    assert logs.std() == pytest.approx(others.std(), rel=0.1)


def test_latencies_have_the_named_distributions():
    uids = [SampleId(n, 0) for n in range(2000)]
    assert {Latencies(0, constant(1.5)).seconds(uid) for uid in uids} == {1.5}
    long_tailed = Latencies(0, log_normal(0.2, 20))
    assert np.median([long_tailed.seconds(uid) for uid in uids]) == pytest.approx(0.2, rel=0.1)
    assert long_tailed.seconds(uids[0]) != replace(long_tailed, purpose="env").seconds(uids[0])
    assert long_tailed.seconds(uids[0], 0) != long_tailed.seconds(uids[0], 1)


def test_a_reward_takes_its_time_and_scores_by_id():
    async def main() -> tuple[float, list[float]]:
        reward = SimulatedReward(Latencies(0, constant(2.0)), seed=3)
        scores = await _run_all(*(reward.score(sample(uid=(0, n))) for n in range(4)))
        return _now(), [score.value for score in scores]

    time, values = run_virtual(main())
    assert time == 2
    assert len(set(values)) == 4
    assert run_virtual(main()) == (2, values)


def test_shares_of_groups_without_signal_and_of_failures_are_as_configured():
    async def main() -> list[list[Any]]:
        reward = SimulatedReward(Latencies(0, constant(0.0)), flat=0.3, failed=0.1)
        return [[await reward.score(sample(uid=(g, n))) for n in range(3)] for g in range(1500)]

    groups = run_virtual(main())
    failed = sum(not score.ok for scores in groups for score in scores)
    assert failed / 4500 == pytest.approx(0.1, abs=0.02)
    complete = [scores for scores in groups if all(score.ok for score in scores)]
    flat = [scores for scores in complete if len({score.value for score in scores}) == 1]
    assert len(flat) / len(complete) == pytest.approx(0.3, abs=0.05)
    assert {scores[0].value for scores in flat} == {0.0, 1.0}


def _make_records(time: StepTime, *, noise: float, count: int = 400) -> list[StepRecord]:
    draw = np.random.default_rng(0)
    step_records: list[StepRecord] = []
    for _ in range(count):
        batch = int(draw.integers(1, 65))
        kv = batch * int(draw.integers(100, 4000))
        prefill = int(draw.integers(0, 4000)) * int(draw.random() < 0.3)
        seconds = time.seconds(batch, kv, prefill) * (1 + noise * draw.standard_normal())
        step_records.append(StepRecord(batch, kv, prefill, seconds))
    return step_records


def test_a_fit_finds_the_parts_of_noisy_records():
    true = step_time(0.02, 1e-4, 4e-8, 2e-6)
    fit = fit_step_time(_make_records(true, noise=0.03, count=1600))
    actual = fit.step_time
    assert actual.base_s == pytest.approx(true.base_s, rel=0.03)
    assert actual.per_sequence_s == pytest.approx(true.per_sequence_s, rel=0.15)
    assert actual.per_kv_token_s == pytest.approx(true.per_kv_token_s, rel=0.15)
    assert actual.per_prefill_token_s == pytest.approx(true.per_prefill_token_s, rel=0.05)
    assert fit.mean_error == pytest.approx(0.03 * np.sqrt(2 / np.pi), rel=0.15)
    assert fit.mean_error < fit.worst_error < 0.2
    assert fit.records == 1600


def test_a_fit_without_noise_is_exact():
    true = step_time(0.02, 1e-4, 4e-8, 2e-6)
    fit = fit_step_time(_make_records(true, noise=0.0, count=20))
    assert fit.worst_error < 1e-9
    assert fit.step_time.per_kv_token_s == pytest.approx(true.per_kv_token_s, rel=1e-6)


def test_a_part_that_would_be_negative_is_zero_and_the_others_are_fitted_without_it():
    records = [StepRecord(batch, 10 * batch, 0, 1.0 - 0.01 * batch) for batch in range(1, 20)]
    actual = fit_step_time(records).step_time
    assert (actual.per_sequence_s, actual.per_kv_token_s, actual.per_prefill_token_s) == (0, 0, 0)
    # With the base alone, the least relative error is at sum(1 / t) / sum(1 / t^2).
    inverse = np.array([1 / record.seconds for record in records])
    assert actual.base_s == pytest.approx(inverse.sum() / (inverse**2).sum())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            StepRecord,
            st.integers(1, 64),
            st.integers(1, 100_000),
            st.integers(0, 10_000),
            st.floats(1e-4, 10),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_no_records_make_a_negative_part(records):
    actual = fit_step_time(records).step_time
    parts = (
        actual.base_s,
        actual.per_sequence_s,
        actual.per_kv_token_s,
        actual.per_prefill_token_s,
    )
    assert min(parts) >= 0


def test_records_that_took_no_time_or_are_not_there_are_refused():
    for records in ([], [StepRecord(1, 1, 0, 0.0)]):
        with pytest.raises(DataError, match="cannot be fitted"):
            fit_step_time(records)


def test_a_step_must_take_some_time():
    for parts in ((0.0,), (0.0, 0.0, 0.0, 1.0)):
        with pytest.raises(ConfigError, match="would take no time"):
            step_time(*parts)
    assert step_time(1, 2, 3, 4).seconds(2, 5, 7) == 1 + 4 + 15 + 28
