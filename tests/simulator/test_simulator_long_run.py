"""The cost of device failures in a run of weeks, compared with values computed by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollick.cli import app
from rollick.config.load import LoadedRecipe, dump_recipe
from rollick.simulator.long_run import (
    DAY_S,
    FailureConfig,
    LongRun,
    compare_repairs,
    simulate_long_run,
)
from rollick.simulator.scenario import build_scenario

Toy = Callable[..., LoadedRecipe]

CONFIG = FailureConfig(checkpoint_every_s=1800, save_s=10, detect_s=60, restart_s=600)


def make_long_run(
    config: FailureConfig = CONFIG, *, engines: int = 4096, days: float = 14
) -> LongRun:
    learners = engines // 4
    return LongRun(config, engines, learners, engines + learners, step_s=60, days=days)


@pytest.mark.parametrize("restart_all", [True, False])
def test_the_parts_sum_to_the_wall_time_and_a_seed_gives_one_run(restart_all: bool) -> None:
    time = simulate_long_run(make_long_run(), restart_all=restart_all, seed=3)
    assert time.wall_s == pytest.approx(14 * DAY_S)
    assert min(time.progress_s, time.save_s, time.recover_s, time.redo_s) >= 0
    assert time == simulate_long_run(make_long_run(), restart_all=restart_all, seed=3)
    assert time != simulate_long_run(make_long_run(), restart_all=restart_all, seed=4)


def test_the_rate_of_failures_is_that_of_the_large_cluster_by_gpus() -> None:
    assert LongRun(FailureConfig(), 16_384, 0, 16_384, 60).hours_between_failures == 3
    assert make_long_run(engines=1024).hours_between_failures == pytest.approx(3 * 16_384 / 1280)


def test_restarting_everything_costs_the_repair_and_half_an_interval_for_each_failure() -> None:
    report = compare_repairs(make_long_run())
    between_s = 3600 * report.hours_between_failures
    # To first order: the share without saves times the share without repairs.
    expected = 1800 / 1810 * (1 - (660 + 900) / between_s)
    assert report.ettr_restart_all == pytest.approx(expected, abs=0.003)
    assert report.failures == pytest.approx(14 * DAY_S / between_s, rel=0.1)


def test_only_the_loss_of_a_learner_host_costs_as_much_if_the_part_is_rebuilt() -> None:
    report = compare_repairs(make_long_run())
    between_s = 3600 * report.hours_between_failures
    lost_s = 0.2 * 0.78 * (660 + 900) + 0.2 * 0.22 * (60 + 180 + 30) + 0.8 * 360 / 4096
    assert report.ettr == pytest.approx(1800 / 1810 * (1 - lost_s / between_s), abs=0.002)


def test_without_failures_only_saves_cost_time() -> None:
    rare_failures = CONFIG.model_copy(update={"gpu_hours_between_failures": 1e15})
    time = simulate_long_run(make_long_run(rare_failures, days=1), restart_all=True, seed=0)
    assert (time.failures, time.recover_s, time.redo_s) == (0, 0, 0)
    assert time.ettr == pytest.approx(1800 / 1810, abs=1e-3)


def test_repairs_that_are_slower_than_failures_end_with_the_run() -> None:
    frequent_failures = CONFIG.model_copy(update={"gpu_hours_between_failures": 5120 * 0.02})
    time = simulate_long_run(make_long_run(frequent_failures, days=0.5), restart_all=True, seed=0)
    assert time.wall_s == pytest.approx(0.5 * DAY_S)
    assert time.ettr < 0.1


def test_a_load_file_can_change_the_assumptions() -> None:
    scenario = build_scenario({"device_failures": {"detect_s": 5}}, origin="load.yaml")
    assert scenario.device_failures.detect_s == 5


def test_the_command_adds_the_cost_of_failures_to_its_report(toy: Toy, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(toy().recipe), encoding="utf-8")
    command = ["simulate", str(recipe), "--steps", "1", "--engines", "8"]
    plain = CliRunner().invoke(app, [*command, "--json"])
    assert plain.exit_code == 0, plain.output
    assert "long_run" not in json.loads(plain.output)
    result = CliRunner().invoke(app, [*command, "--days", "30", "--json"])
    long_report = json.loads(result.output)["long_run"]
    assert (long_report["days"], long_report["engines"]) == (30, 8)
    assert 0.9 < long_report["ettr_restart_all"] <= long_report["ettr"] < 1
    text = CliRunner().invoke(app, [*command, "--days", "30"]).output
    assert "rebuild part" in text
    assert "restart all" in text
