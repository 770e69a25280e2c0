"""The lag of the event loop: measured, and reported once."""

import asyncio
import time

from rollick.rollout.event_loop import LagMeter


async def block_loop(seconds):
    """Let the meter sleep, then block the loop beyond the time at which the meter should wake."""
    await asyncio.sleep(0.01)
    time.sleep(0.1 + seconds)  # noqa: ASYNC251  (it is what is measured)
    await asyncio.sleep(0.01)


async def test_a_blocked_event_loop_reports_its_lag_and_the_phase(caplog):
    async with LagMeter.open(lambda: "collate") as lag:
        await block_loop(0.2)
        first = lag.take_ms()
        await block_loop(0.2)
    assert 150 < first < 1000
    assert len(caplog.records) == 1
    assert "ms in the phase collate" in caplog.text
    assert "controller/event_loop_lag_ms" in caplog.text


async def test_each_step_has_its_own_longest_lag():
    async with LagMeter.open(lambda: "train") as lag:
        await block_loop(0.2)
        assert lag.take_ms() > 150
        assert lag.take_ms() < 150


async def test_a_lag_that_is_not_over_counts_too():
    async with LagMeter.open(lambda: "train") as lag:
        await asyncio.sleep(0.01)
        time.sleep(0.3)  # noqa: ASYNC251
        assert lag.take_ms() > 150


async def test_models_in_the_same_process_cause_no_warning(caplog):
    async with LagMeter.open(lambda: "train", warn=False) as lag:
        await block_loop(0.2)
        assert lag.take_ms() > 150
    assert caplog.records == []


async def test_the_meter_leaves_no_task_behind():
    before = asyncio.all_tasks()
    async with LagMeter.open(lambda: "train"):
        assert len(asyncio.all_tasks()) == len(before) + 1
    assert asyncio.all_tasks() == before
