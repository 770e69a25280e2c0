"""Engines that are slower than the others: when they are reported, how much work they get."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import count

import pytest
from fakes import FakeCodec, step_time

from rollick.config.schema import RolloutConfig
from rollick.episodes.single_turn import single_turn
from rollick.rollout.deps import RolloutDeps
from rollick.rollout.relative_speeds import MIN_WEIGHT, SLOW_STEPS, RelativeSpeeds
from rollick.rollout.router import Router
from rollick.rollout.scheduler import Rollout
from rollick.simulator.engine import SimulatedEngine
from rollick.simulator.virtual_clock import run_virtual
from rollick.testing.fakes import prompt
from rollick.types import EngineLoad, PolicyVersion, Sample, SampleId, Sampling, Score


def make_speeds(engines: int) -> RelativeSpeeds:
    speeds = RelativeSpeeds()
    for engine in range(engines):
        speeds.add(engine)
    return speeds


def measure_step(speeds: RelativeSpeeds, *tokens_per_s: float, tokens: int = 100) -> list[int]:
    for engine, rate in enumerate(tokens_per_s):
        speeds.observe(engine, tokens=tokens, seconds=tokens / rate)
    return speeds.end_step()


def test_an_engine_at_half_speed_is_named_once() -> None:
    speeds = make_speeds(4)
    reported = [measure_step(speeds, 100, 50, 104, 97) for _ in range(20)]
    assert reported == [[]] * (SLOW_STEPS - 1) + [[1]] + [[]] * (20 - SLOW_STEPS)
    assert speeds.slow_workers == [1]
    assert speeds.weight(1) == pytest.approx(0.5)
    assert [speeds.weight(engine) for engine in (0, 2, 3)] == [1, 1, 1]


def test_of_two_engines_the_slower_one_is_named() -> None:
    speeds = make_speeds(2)
    reported = [engine for _ in range(5) for engine in measure_step(speeds, 30, 70)]
    assert reported == [0]


def test_one_slow_step_names_no_engine() -> None:
    speeds = make_speeds(3)
    reported = [measure_step(speeds, 100, 20 if number == 7 else 100, 100) for number in range(20)]
    assert not any(reported)
    assert speeds.slow_workers == []


def test_an_engine_that_is_a_bit_slower_gets_full_work() -> None:
    speeds = make_speeds(3)
    for _ in range(20):
        assert measure_step(speeds, 100, 85, 100) == []
    assert speeds.weight(1) == 1


def test_an_engine_that_recovered_gets_full_work_and_can_be_named_again() -> None:
    speeds = make_speeds(3)
    reported = [measure_step(speeds, 100, rate, 100) for rate in (40, 100, 40) for _ in range(12)]
    assert [engine for slow_engines in reported for engine in slow_engines] == [1, 1]


def test_too_few_tokens_are_ignored() -> None:
    speeds = make_speeds(2)
    for _ in range(20):
        assert measure_step(speeds, 100, 10, tokens=4) == []


def test_a_very_slow_engine_still_gets_some_work() -> None:
    speeds = make_speeds(3)
    for _ in range(5):
        measure_step(speeds, 100, 1, 100)
    assert speeds.weight(1) == MIN_WEIGHT


def test_an_engine_with_half_the_weight_gets_half_the_requests() -> None:
    router = Router(engine_queue=1.0, margin=0.0, mean_tokens=10)
    for engine in range(2):
        router.add(engine, EngineLoad(slots=16))
    router.set_weight(1, 0.5)
    chosen = Counter(
        router.choose(SampleId(number, 0), session=None, tokens=10) for number in range(12)
    )
    assert chosen == {0: 8, 1: 4}


def test_fewer_requests_queue_inside_a_slow_engine() -> None:
    router = Router(engine_queue=1.0, mean_tokens=10)
    router.add(0, EngineLoad(slots=4))
    router.set_weight(0, 0.5)
    chosen = [router.choose(SampleId(n, 0), session=None, tokens=10) for n in range(8)]
    assert chosen == [0] * 6 + [None] * 2


async def score_by_index(sample: Sample) -> Score:
    return Score(float(sample.uid.index))


async def run_steps(steps: int, *, slow_after: int) -> tuple[list[int], list[Counter[int]]]:
    """Run a rollout on three engines, the last of which becomes twice as slow. Returns the steps
    that reported it as slow, and each step's requests by engine."""
    numbers = count()
    engines = [SimulatedEngine(step_time(0.02), lambda _: 50, slots=16) for _ in range(3)]
    deps = RolloutDeps(
        config=RolloutConfig(groups_per_step=6, group_size=4),
        next_prompt=lambda: prompt(uid=f"toy/{next(numbers)}"),
        episode=single_turn(FakeCodec(), Sampling(max_tokens=64), seed=1),
        score=score_by_index,
        stuck_after_s=600,
    )
    reported: list[int] = []
    requests: list[Counter[int]] = []
    async with Rollout.open(deps, engines) as rollout:
        fleet, completed = rollout.fleet, rollout.fleet.completed

        def count_request(number: int, *args: object) -> None:
            requests[-1][number] += 1
            completed(number, *args)  # type: ignore[arg-type]

        fleet.completed = count_request  # type: ignore[method-assign]
        for number in range(steps):
            if number == slow_after:
                engines[2].slow_down(2)
            requests.append(Counter())
            groups = await rollout.take()
            if fleet.end_step() == [2]:
                reported.append(number)
            version = PolicyVersion(number + 1)
            rollout.trained(groups, version)
            for engine in engines:
                await engine.commit_shared(version)
            rollout.published(version)
    return reported, requests


def test_an_engine_that_becomes_twice_as_slow_is_named_and_gets_less_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "rollick"):
        reported, requests = run_virtual(run_steps(30, slow_after=5))
    [step_reported] = reported
    assert 5 < step_reported < 25
    assert requests[4] == {0: 8, 1: 8, 2: 8}
    assert requests[-1][2] <= 6
    assert sum(requests[-1].values()) == 24
    assert caplog.text.count("engine 2 decodes at 50% of the median speed") == 1
