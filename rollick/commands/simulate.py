"""Back end of `rollick simulate`."""

from __future__ import annotations

from pathlib import Path

from rollick.config.schema import Recipe
from rollick.observe.report import draw_timeline
from rollick.simulator.calibrate import calibrate_run
from rollick.simulator.long_run import LongRun, LongRunReport, compare_repairs
from rollick.simulator.report import Report, SlotTimeline
from rollick.simulator.run import add_training_cost, simulate
from rollick.simulator.scenario import Scenario, recipe_scenario


def build_scenario(recipe: Recipe, run: Path | None) -> tuple[Scenario, list[tuple[str, str]]]:
    """The recipe's scenario, calibrated on `run` if given, and a description of the calibration."""
    scenario = recipe_scenario(recipe)
    if run is None:
        return scenario, []
    calibration = calibrate_run(run)
    return calibration.apply(scenario), calibration.describe()


def simulate_failures(scenario: Scenario, report: Report, *, days: float) -> LongRunReport:
    """ETTR of a run of `days` whose steps take as long as those of the report."""
    devices = scenario.devices
    run = LongRun(
        failures=scenario.device_failures,
        engines=devices.generators,
        learners=devices.trainers,
        gpus=devices.count,
        step_s=report.step_s,
        days=days,
    )
    return compare_repairs(run)


def run_simulation(scenario: Scenario, *, picture: Path | None = None) -> Report:
    """Simulate the scenario; if `picture` is given, draw the timeline to that file."""
    scenario, timeline = add_training_cost(scenario), SlotTimeline()
    report = simulate(scenario, timeline)
    if picture is not None:
        slots = scenario.devices.generators * scenario.devices.slots
        title = f"step {report.step_s:.3g} s, slots {report.slots_used:.0%} in use"
        draw_timeline(picture, timeline.points, timeline.phases, slots=slots, title=title)
    return report
