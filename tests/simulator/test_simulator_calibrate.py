"""Calibration: a run's records become the scenario of other runs."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import step_time
from typer.testing import CliRunner

from rollick import LoadedRecipe, RunResult
from rollick.cli import app
from rollick.config.load import dump_recipe
from rollick.errors import DataError
from rollick.observe.sample_stage import SCORING, SampleActivity, SampleStage, on_engine
from rollick.observe.trace import Trace, read_trace
from rollick.run_folder import ENGINE_STEPS, RunFolder
from rollick.simulator.calibrate import calibrate_run
from rollick.simulator.run import simulate
from rollick.simulator.scenario import recipe_scenario
from rollick.types import SampleId

Toy = Callable[..., LoadedRecipe]
RunToy = Callable[..., RunResult]

STEP_TIME = step_time(0.004, 1e-4, 1e-6, 2e-5)
TRAIN_BASE_S, TRAIN_TOKEN_S = 0.3, 0.001
PUBLISH_S, CONTROLLER_S, CALL_S, REWARD_S = 0.05, 0.02, 0.01, 0.125
PROMPT_TOKENS = 10


@dataclass
class RecordedRun:
    """A run's folder with synthetic records, and the lengths that a calibration finds in it."""

    path: Path
    lengths: list[int]


@pytest.fixture
def recorded_run(toy: Toy, tmp_path: Path) -> RecordedRun:
    """The records of seven steps of four groups of two samples, with known times."""
    (tmp_path / "recipe.yaml").write_text(dump_recipe(toy().recipe), encoding="utf-8")
    trace = Trace(tmp_path, clock=lambda: 0.0, limit_bytes=10**6, zero=1000.0)
    draw, lengths, rows, now = random.Random(0), [], [], 0.0
    for step in range(1, 8):
        samples = [[4 * step + n // 2, n % 2, PROMPT_TOKENS, draw.randint(1, 50)] for n in range(8)]
        response_tokens = sum(sample[3] for sample in samples)
        lengths += [sample[3] for sample in samples] if 2 < step < 7 else []
        engine_times = [[group, index, 1.0] for group, index, _, _ in samples]
        for group, index, _, _ in samples:
            uid, generated_at = SampleId(group, index), now + 1.0 + CALL_S
            trace.record_span(uid, on_engine(SampleStage.GENERATING, 0), now, generated_at)
            trace.record_span(uid, SCORING, generated_at, generated_at + REWARD_S)
        taken = now + 1.0 + CALL_S + REWARD_S
        trained = taken + TRAIN_BASE_S + TRAIN_TOKEN_S * (8 * PROMPT_TOKENS + response_tokens)
        trace.record_phase("generate", now, taken, step=step)
        trace.record_phase("train", taken, trained, step=step)
        trace.record_phase("publish", trained, trained + PUBLISH_S, step=step)
        now = trained + PUBLISH_S + CONTROLLER_S
        step_shapes = [
            (draw.randint(1, 8), draw.randint(9, 400), draw.randint(0, 60)) for _ in range(30)
        ]
        engines = [[0, *work, STEP_TIME.seconds(*work), 1000.0, 0] for work in step_shapes]
        train = [trained - taken, TRAIN_BASE_S]
        rows.append({"step": step, "engines": engines, "answers": engine_times, "samples": samples})
        rows[-1]["train"] = train
    trace.flush()
    metrics = [{"step": n, "rollout/groups": 4, "rollout/dropped/no_signal": 1} for n in range(7)]
    for name, lines in ((ENGINE_STEPS, rows), ("metrics.jsonl", metrics)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return RecordedRun(tmp_path, lengths)


def test_the_constants_of_a_recorded_run_are_found(recorded_run: RecordedRun) -> None:
    calibration = calibrate_run(recorded_run.path)
    # The first two steps are the warm-up, the last one's end is not in the trace.
    assert calibration.steps == 4
    fitted = calibration.engine.step_time.model_dump()
    assert fitted == pytest.approx(STEP_TIME.model_dump(), rel=1e-6)
    assert calibration.engine.mean_error < 1e-6
    assert calibration.train.base_s == pytest.approx(TRAIN_BASE_S, abs=1e-5)
    assert calibration.train.token_s == pytest.approx(TRAIN_TOKEN_S, abs=1e-6)
    assert calibration.train.worst_error < 1e-4
    assert calibration.devices.transfer_s + calibration.devices.publish_s == pytest.approx(
        PUBLISH_S, abs=1e-5
    )
    assert calibration.devices.controller_s == pytest.approx(CONTROLLER_S, abs=1e-5)
    assert calibration.devices.call_s == pytest.approx(CALL_S, abs=1e-5)
    assert calibration.work.reward.trace == pytest.approx([REWARD_S] * 56, abs=1e-5)
    assert sorted(calibration.work.lengths.trace) == sorted(recorded_run.lengths)
    assert calibration.work.prompt_tokens == PROMPT_TOKENS
    assert calibration.work.flat == pytest.approx(1 / 5)


def test_samples_that_continue_during_a_publish_are_not_lost(recorded_run: RecordedRun) -> None:
    phases = {
        (step, name): 1000.0 + begin / 1e6
        for line in read_trace(recorded_run.path)
        for step, name, begin, _ in line.get("phases", ())
    }
    rows = [
        json.loads(line) for line in (recorded_run.path / ENGINE_STEPS).read_text().splitlines()
    ]
    seconds = STEP_TIME.seconds(8, 400, 0)
    for row in rows:
        # The engine runs for one and a half steps of each publish, then pauses.
        begin_s = phases[row["step"], "publish"] - seconds / 2
        row["engines"] += [[0, 8, 400, 0, seconds, begin_s + n * seconds, 0] for n in range(2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (recorded_run.path / ENGINE_STEPS).write_text(text, encoding="utf-8")
    calibration = calibrate_run(recorded_run.path)
    assert calibration.devices.publish_s == pytest.approx(PUBLISH_S - 1.5 * seconds, abs=1e-4)
    devices = calibration.apply(recipe_scenario(calibration.recipe)).devices
    assert devices.publish_s == calibration.devices.publish_s
    assert devices.transfer_s == pytest.approx(1.5 * seconds, abs=1e-4)


def test_the_recipe_gives_the_batch_and_the_run_gives_the_times(
    recorded_run: RecordedRun, toy: Toy
) -> None:
    recipe = toy("rollout.groups_per_step=3", "rollout.max_staleness=2", "infer.slots=5").recipe
    scenario = calibrate_run(recorded_run.path).apply(recipe_scenario(recipe))
    assert scenario.rollout.groups_per_step == 3
    assert scenario.rollout.max_staleness == 2
    assert scenario.devices.slots == 5
    assert scenario.devices.publish_s == pytest.approx(PUBLISH_S, abs=1e-5)
    assert scenario.work.prompt_tokens == PROMPT_TOKENS
    assert scenario.work.lengths.max_tokens == recipe.sampling.max_tokens


def test_a_synchronous_step_is_the_sum_of_its_parts(recorded_run: RecordedRun, toy: Toy) -> None:
    """One group of two with one token each: prefill, one engine step, reward, train, publish."""
    small_recipe = toy(
        "rollout.groups_per_step=1", "rollout.group_size=2", "sampling.max_tokens=1"
    ).recipe
    calibration = calibrate_run(recorded_run.path)
    scenario = calibration.apply(recipe_scenario(small_recipe)).change(work={"flat": 0.0})
    scenario = scenario.change(devices={"colocated": False, "generators": 1, "trainers": 1})
    step = calibration.engine.step_time.seconds(2, 2 * PROMPT_TOKENS, PROMPT_TOKENS)
    parts = step + CALL_S + REWARD_S + TRAIN_BASE_S + 22 * TRAIN_TOKEN_S + PUBLISH_S + CONTROLLER_S
    assert simulate(scenario).step_s == pytest.approx(parts, rel=1e-3)


def test_the_slowdown_of_a_step_by_training_is_measured_and_removed(
    recorded_run: RecordedRun,
) -> None:
    """Sixty engine steps while the learner waits, and sixty with larger batches that take 1.5 times
    as long while it trains."""
    path = recorded_run.path / ENGINE_STEPS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    phases = {
        (step, name): (1000 + begin / 1e6, 1000 + end / 1e6)
        for line in read_trace(recorded_run.path)
        for step, name, begin, end in line.get("phases", ())
    }
    for row in rows:
        row["engines"] = []
        for name, slowdown in (("generate", 1.0), ("train", 1.5)):
            begin, end = phases[row["step"], name]
            for n in range(15):
                at = begin + (end - begin) * (n + 0.5) / 16
                batch = 1 + n % 4 if name == "generate" else 3 + n % 4
                row["engines"].append([0, batch, 10 + n, 0, 0.002 * batch * slowdown, at, 0])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    calibration = calibrate_run(recorded_run.path)
    assert calibration.devices.contention == pytest.approx(1.5, rel=1e-3)
    assert calibration.engine.step_time.seconds(2, 15) == pytest.approx(0.004, rel=0.01)


def test_a_run_without_records_names_the_option_that_records_them(run_toy: RunToy) -> None:
    run = run_toy(steps=1).folder
    with pytest.raises(DataError, match=r"observe\.engine_steps=true"):
        calibrate_run(run)


def test_a_run_without_a_trace_names_the_option_that_records_it(recorded_run: RecordedRun) -> None:
    (recorded_run.path / "trace.jsonl").unlink()
    with pytest.raises(DataError, match=r"observe\.trace_mb"):
        calibrate_run(recorded_run.path)


def test_a_run_that_is_too_short_reports_the_required_length(recorded_run: RecordedRun) -> None:
    path = recorded_run.path / ENGINE_STEPS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(DataError, match="4 steps or more"):
        calibrate_run(recorded_run.path)


def test_a_run_of_several_turns_is_refused(recorded_run: RecordedRun) -> None:
    trace = Trace(recorded_run.path, clock=lambda: 0.0, limit_bytes=10**6, zero=1000.0)
    trace.record_span(SampleId(12, 0), SampleActivity(SampleStage.IN_ENVIRONMENT), 1.0, 2.0)
    trace.flush()
    with pytest.raises(DataError, match="several turns"):
        calibrate_run(recorded_run.path)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run's folder"):
        calibrate_run(tmp_path)


def test_a_real_run_can_be_calibrated_on_and_simulated(run_toy: RunToy, toy: Toy) -> None:
    run = run_toy(
        "observe.engine_steps=true",
        "sampling.max_tokens=6",
        "rollout.drop_no_signal=false",
        steps=5,
    ).folder
    rows = [json.loads(line) for line in (run / ENGINE_STEPS).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(len(row["samples"]) == len(row["answers"]) == 16 for row in rows)
    calibration = calibrate_run(run)
    assert calibration.steps == 2
    assert 1 <= min(calibration.work.lengths.trace) <= max(calibration.work.lengths.trace) <= 6
    assert calibration.engine.step_time.seconds(16, 200) > 0
    assert calibration.train.token_s > 0
    result = CliRunner().invoke(
        app, ["simulate", str(run / "recipe.yaml"), "--from", str(run), "--steps", "3"]
    )
    assert result.exit_code == 0, result.output
    assert "engine step" in result.output
    assert "  simulated" in result.output


def test_records_of_repeated_steps_are_removed(toy: Toy, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, toy().recipe)
    folder.append_rows(ENGINE_STEPS, [{"step": step} for step in (1, 2, 3)])
    folder.drop_rows_after(2)
    assert (tmp_path / ENGINE_STEPS).read_text().count("step") == 2
