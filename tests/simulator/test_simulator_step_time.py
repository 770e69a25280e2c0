"""The fits of a calibration: engine steps, training steps, and the prompt's share of lengths."""

import asyncio

import numpy as np
import pytest
from fakes import step_time

from rollick.errors import DataError
from rollick.simulator.engine import SimulatedEngine
from rollick.simulator.run import simulate
from rollick.simulator.scenario import LatencyConfig, Scenario
from rollick.simulator.step_time import (
    TrainRecord,
    estimate_prompt_share,
    fit_step_time,
    fit_train_time,
)
from rollick.simulator.virtual_clock import run_virtual
from rollick.simulator.workload import Lengths, latency_distribution, log_normal
from rollick.types import Request, SampleId, Sampling, StepRecord


def test_steps_that_were_disturbed_count_in_a_fit_that_keeps_the_total() -> None:
    """One of ten steps takes eleven times as long: the mean step takes twice as long."""
    records = [StepRecord(4, 100, 0, 0.11 if n == 0 else 0.01) for n in range(10)]
    plain, full = fit_step_time(records), fit_step_time(records, keep_total=True)
    assert plain.step_time.seconds(4, 100) < 0.012
    assert full.step_time.seconds(4, 100) == pytest.approx(0.02)


def test_training_is_what_is_fixed_and_the_rest_by_token() -> None:
    fit = fit_train_time([TrainRecord(100, 0.5, 0.3), TrainRecord(200, 0.7, 0.3)])
    assert (fit.base_s, fit.token_s) == pytest.approx((0.3, 0.002))
    assert fit.worst_error == pytest.approx(0.0)


def test_errors_of_a_training_fit_are_relative() -> None:
    """Two equal steps with different times: 1.0 and 3.0, so 2.0 is 100 % and 33 % off."""
    fit = fit_train_time([TrainRecord(10, 1.0, 0.0), TrainRecord(10, 3.0, 0.0)])
    assert fit.worst_error == pytest.approx(1.0)
    assert fit.mean_error == pytest.approx((1 + 1 / 3) / 2)


def test_no_training_step_is_nothing_to_fit() -> None:
    with pytest.raises(DataError, match="0 training steps"):
        fit_train_time([])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_the_share_of_the_prompt_is_found_again(share: float) -> None:
    lengths = Lengths(0, log_normal(100, 20), 4000, share)
    groups = [[lengths.tokens(SampleId(g, n)) for n in range(8)] for g in range(400)]
    assert estimate_prompt_share(groups) == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize("groups", [[], [[5]], [[5, 5], [5, 5]], [[1], [2], [3]]])
def test_the_prompt_share_is_0_if_it_cannot_be_estimated(groups: list[list[int]]) -> None:
    assert estimate_prompt_share(groups) == 0.0


def test_groups_of_equal_lengths_have_a_prompt_share_of_1() -> None:
    assert estimate_prompt_share([[3, 3], [5, 5], [9, 9]]) == pytest.approx(1.0)


def test_recorded_latencies_are_drawn_from() -> None:
    latency = latency_distribution(LatencyConfig(trace=(0.1, 0.4)))
    assert {latency(float(u)) for u in np.linspace(0.01, 0.99, 9)} == {0.1, 0.4}


def test_latencies_and_the_controller_make_a_synchronous_step_longer() -> None:
    plain = Scenario().change(rollout={"groups_per_step": 2, "group_size": 2})
    plain = plain.change(work={"lengths": {"median": 4, "tail": 1}}, steps=3)
    slow = plain.change(devices={"call_s": 0.5, "controller_s": 0.25})
    assert simulate(slow).step_s == pytest.approx(simulate(plain).step_s + 0.75)


def test_a_fit_recognises_padded_steps() -> None:
    """The time of these steps depends on the longest sequence, not on the length of the others."""
    true = step_time(0.002, 0.001, 1e-4, padded=True)
    shapes = [(2, 12, 10), (2, 15, 10), (2, 40, 30), (1, 20, 20), (3, 33, 30), (3, 90, 30)]
    records = [
        StepRecord(batch, kv, 0, true.seconds(batch, batch * longest), longest=longest)
        for batch, kv, longest in shapes
    ]
    fit = fit_step_time(records)
    assert fit.step_time.padded
    assert fit.worst_error < 1e-9
    assert fit.step_time.per_kv_token_s == pytest.approx(1e-4)


def test_a_prefill_of_any_length_adds_time_to_its_step() -> None:
    time = step_time(0.01, per_prefill_token_s=0.001, prefill_base_s=0.005)
    assert time.seconds(1, 1) == pytest.approx(0.01)
    assert time.seconds(1, 1, prefill_tokens=3) == pytest.approx(0.01 + 0.005 + 0.003)


def make_sequential_scenario(*, max_staleness: float = 0, contention: float = 1.0) -> Scenario:
    """One sample at a time, with ten tokens of a second each; training takes five seconds."""
    step_time = {"base_s": 1.0, "per_sequence_s": 0, "per_kv_token_s": 0, "per_prefill_token_s": 0}
    rollout = {"groups_per_step": 1, "group_size": 1, "drop_no_signal": False}
    return Scenario().change(
        rollout={**rollout, "max_staleness": max_staleness},
        work={"lengths": {"trace": [10]}},
        devices={"slots": 1, "step_time": step_time, "train_base_s": 5.0, "contention": contention},
    )


def test_engine_and_trainer_slow_each_other_down_only_while_both_work() -> None:
    assert simulate(make_sequential_scenario(contention=1.5)).step_s == pytest.approx(15.0)
    assert simulate(make_sequential_scenario(max_staleness=1)).step_s == pytest.approx(10.0)
    # Five engine steps and the training overlap and take 7.5 s; the other five steps take 5 s.
    slowed = simulate(make_sequential_scenario(max_staleness=1, contention=1.5))
    assert slowed.step_s == pytest.approx(12.5)


@pytest.mark.parametrize(("padded", "first"), [(True, 0.010), (False, 0.006)])
def test_in_a_padded_engine_every_row_costs_as_much_as_the_longest(
    padded: bool, first: float
) -> None:
    """Samples of 1 and 3 tokens with prompts of 1 and 5 tokens: padding makes the 6 cached tokens
    of the first step cost as much as 10. The next two steps have one row, of 6 and 7 tokens."""

    async def main() -> float:
        time = step_time(1e-9, per_kv_token_s=1e-3, padded=padded)
        engine = SimulatedEngine(time, lambda request: 1 + 2 * request.uid.index, slots=2)
        requests = [
            Request(SampleId(n, n), np.zeros(1 + 4 * n, np.int32), Sampling(), 0) for n in (0, 1)
        ]
        await asyncio.gather(*(engine.generate(request) for request in requests))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(first + 0.006 + 0.007, rel=1e-3)
