"""A simulated run: the real rollout on a virtual clock, with times that are checked by hand."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollick.cli import app
from rollick.errors import ConfigError, DataError
from rollick.observe.sample_stage import SCORING, SampleStage, on_engine
from rollick.rollout.event_loop import rare_garbage_collection
from rollick.simulator.report import SlotTimeline, WaitAttribution
from rollick.simulator.run import (
    add_training_cost,
    make_synchronous,
    set_rollout_share,
    simulate,
)
from rollick.simulator.scenario import (
    Scenario,
    build_scenario,
    read_failures,
    read_lengths,
    read_scenario,
)
from rollick.simulator.workload import SampleWork
from rollick.types import SampleId

ONE_SECOND_STEP = {
    "base_s": 1.0,
    "per_sequence_s": 0.0,
    "per_kv_token_s": 0.0,
    "per_prefill_token_s": 0.0,
}


def make_scenario(**sections: Any) -> Scenario:
    """Two engines with two slots, four groups of two samples, ten tokens in ten seconds each."""
    plain = Scenario().change(
        steps=3,
        warmup_steps=1,
        rollout={"groups_per_step": 2, "group_size": 2, "drop_no_signal": False},
        work={"lengths": {"median": 10, "tail": 1, "max_tokens": 100}, "prompt_tokens": 5},
        devices={"generators": 2, "trainers": 2, "slots": 2, "step_time": ONE_SECOND_STEP},
    )
    return plain.change(**sections)


def make_tailed_scenario(**sections: Any) -> Scenario:
    """A scenario with long-tailed lengths; a synchronous step is 70 % rollout, as in real runs."""
    lengths = {"median": 20, "tail": 10, "max_tokens": 400}
    work = {"lengths": lengths, "prompt_tokens": 5}
    rollout = {"groups_per_step": 8, "group_size": 4, "drop_no_signal": False}
    plain = make_scenario(steps=6, warmup_steps=3, work=work, rollout=rollout)
    return set_rollout_share(plain, 0.7).change(**sections)


def test_a_synchronous_step_is_its_longest_sample_then_the_training_then_the_publish() -> None:
    # 4 samples of 15 tokens at 0.5 device-seconds on 2 devices train for 15 s.
    devices = {"colocated": True, "train_token_s": 0.5, "publish_s": 2.0}
    report = simulate(make_scenario(devices=devices))
    assert report.step_s == pytest.approx(10 + 15 + 2)
    assert report.samples == 3 * 4
    assert report.tokens == 3 * 60
    assert report.rollout_share == pytest.approx(10 / 27)
    assert report.trainer_busy == pytest.approx(15 / 27)
    assert report.slots_used == pytest.approx(10 / 27)
    assert report.age_max == 0


@pytest.mark.parametrize("engines_go_on", [True, False])
def test_engines_generate_while_weights_are_transferred(engines_go_on: bool) -> None:
    """Generation takes longest: 10 s a step, plus the pauses of the engines."""
    seconds = "transfer_s" if engines_go_on else "publish_s"
    devices = {"train_token_s": 0.01, seconds: 2.0}
    report = simulate(make_scenario(devices=devices, rollout={"max_staleness": 1}, steps=12))
    assert report.step_s == pytest.approx(10 if engines_go_on else 12, rel=0.03)


def test_the_bound_is_the_work_over_the_devices() -> None:
    # A token costs 1 s / 2 slots: 4 x 10 x 0.5 = 20 device-seconds, and 4 x 15 x 0.5 = 30 to train.
    report = simulate(make_scenario(devices={"colocated": True, "train_token_s": 0.5}))
    assert report.bound_s == pytest.approx(3 * (20 + 30) / 2)
    assert report.of_bound == pytest.approx(report.bound_s / report.seconds)


def test_attribution_name_the_trainer_s_wait_and_the_engines_empty_slots() -> None:
    report = simulate(make_scenario(devices={"colocated": True, "train_token_s": 0.5}))
    parts = {"prefilling": 3 * 1, "generating": 3 * 9}
    assert report.trainer_waited_s == pytest.approx(parts)
    assert report.slots_empty_s["train"] == pytest.approx(3 * 15 * 4)
    assert report.slots_empty_s["generate"] == pytest.approx(0)


def test_an_environment_takes_its_time_between_turns_and_is_named() -> None:
    work = {"turns": 2, "environment": {"median_s": 7}, "observation_tokens": 3}
    report = simulate(make_scenario(work=work, devices={"colocated": True}))
    assert report.step_s == pytest.approx(10 + 7 + 10)
    assert report.trainer_waited_s[SampleStage.IN_ENVIRONMENT] == pytest.approx(3 * 7)
    assert report.tokens == 3 * 4 * (5 + 10 + 3 + 10)


def test_the_same_scenario_gives_the_same_report_and_another_seed_another() -> None:
    setup = make_tailed_scenario(rollout={"max_staleness": 2})
    assert simulate(setup) == simulate(setup)
    assert simulate(setup) != simulate(setup.change(seed=1))


def test_without_the_barrier_the_same_samples_are_trained_in_less_time() -> None:
    # 32 samples have 64 slots: the synchronous step is as long as its longest sample.
    devices = {"generators": 1, "trainers": 3, "slots": 16}
    setup = set_rollout_share(
        make_tailed_scenario(devices=devices, rollout={"max_staleness": 2}), 0.7
    )
    synchronous, asynchronous = simulate(make_synchronous(setup)), simulate(setup)
    assert asynchronous.samples == synchronous.samples
    assert asynchronous.step_s < 0.8 * synchronous.step_s
    assert asynchronous.age_max <= 2
    assert not asynchronous.dropped


def test_calibration_gives_rollout_the_requested_share() -> None:
    report = simulate(make_synchronous(set_rollout_share(make_tailed_scenario(), 0.6)))
    assert report.rollout_share == pytest.approx(0.6, abs=0.001)


def test_a_given_training_cost_is_kept() -> None:
    setup = make_scenario(devices={"train_token_s": 0.25})
    assert add_training_cost(setup) == setup
    assert add_training_cost(make_scenario()).devices.train_token_s > 0


def test_must_take_has_no_length_bias_and_spares_shorten_what_is_trained() -> None:
    assert simulate(make_tailed_scenario(rollout={"max_staleness": 2})).length_bias == 0
    assert (
        simulate(make_tailed_scenario(rollout={"max_staleness": 2, "spare_samples": 2})).length_bias
        < -0.1
    )


def test_samples_of_a_lost_engine_are_still_trained() -> None:
    lost = make_tailed_scenario(
        rollout={"max_staleness": 1}, failures=[{"engine": 0, "at_s": 50.0, "back_s": 300.0}]
    )
    report = simulate(lost)
    full = simulate(lost.change(failures=()))
    assert report.samples == full.samples
    assert report.seconds > full.seconds
    assert not report.dropped


def test_an_engine_that_does_not_exist_cannot_fail() -> None:
    with pytest.raises(ConfigError, match="engine 7 cannot fail: there are 2"):
        simulate(make_scenario(failures=[{"engine": 7, "at_s": 1.0}]))


def test_a_wait_is_attributed_to_the_sample_that_ended_last() -> None:
    attribution = WaitAttribution()
    first, last = SampleId(0, 0), SampleId(0, 1)
    attribution.add_span(first, on_engine(SampleStage.GENERATING, 0), 0.0, 9.0)
    attribution.add_span(first, SCORING, 9.0, 9.5)
    attribution.add_span(last, on_engine(SampleStage.GENERATING, 1), 0.0, 12.0)
    attribution.add_span(last, SCORING, 12.0, 13.0)
    attribution.add_wait(10.0, 13.0)
    assert dict(attribution.waits) == {"generating": 2.0, "scoring": 1.0}


def test_a_timeline_stays_small_however_long_the_run_is() -> None:
    timeline = SlotTimeline(every_s=1.0)
    for second in range(100_000):
        timeline.add(float(second), running=1, waiting=0)
    assert len(timeline.points) < 1600
    assert timeline.points[0][0] == 0


def test_the_work_of_a_sample_follows_from_its_id() -> None:
    setup = make_tailed_scenario()
    one, other = SampleWork(setup.work, 3), SampleWork(setup.work, 3)
    assert one.tokens(SampleId(5, 1)) == other.tokens(SampleId(5, 1))
    assert SampleWork(setup.work, 4).tokens(SampleId(5, 1)) != one.tokens(SampleId(5, 1))


def test_groups_of_one_prompt_share_its_part_of_the_length() -> None:
    lengths = {"median": 100, "tail": 10, "max_tokens": 9999, "prompt_share": 1.0}
    work = SampleWork(make_scenario(work={"lengths": lengths, "prompts": 4}).work, 0)
    assert work.tokens(SampleId(1, 0)) == work.tokens(SampleId(5, 1))
    assert work.tokens(SampleId(1, 0)) != work.tokens(SampleId(2, 0))


def test_a_load_file_overrides_the_defaults_and_its_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text("devices: {slots: 7}\nseed: 3\n", encoding="utf-8")
    loaded = read_scenario(file, base=make_scenario())
    assert (loaded.devices.slots, loaded.devices.generators, loaded.seed) == (7, 2, 3)
    with pytest.raises(ConfigError, match=r"here: devices\.slotz"):
        build_scenario({"devices": {"slotz": 7}}, origin="here")


def test_lengths_are_two_numbers_or_a_file(tmp_path: Path) -> None:
    assert read_lengths("600,20")["median"] == 600
    file = tmp_path / "trace.jsonl"
    file.write_text('{"tokens": 3}\n5\n', encoding="utf-8")
    assert read_lengths(str(file)) == {"trace": (3, 5)}
    with pytest.raises(DataError, match="has no lengths"):
        read_lengths("nowhere.jsonl")


def test_failure_scripts_are_parsed() -> None:
    once, back = read_failures(["0@300", "1@20-40.5"])
    assert (once.engine, once.at_s, once.back_s) == (0, 300, 0)
    assert (back.engine, back.at_s, back.back_s) == (1, 20, 40.5)
    with pytest.raises(ConfigError, match="'soon' is not a failure"):
        read_failures(["soon"])


def test_garbage_collections_are_rare_inside_the_block_and_normal_after_it() -> None:
    before = gc.get_threshold()
    with rare_garbage_collection(0):
        inside = gc.get_threshold()
        with rare_garbage_collection(0):
            assert gc.get_threshold() == inside
        assert inside[0] > before[0]
    assert gc.get_threshold() == before


def test_the_more_samples_are_in_flight_the_rarer_collections_are() -> None:
    with rare_garbage_collection(1_000):
        few = gc.get_threshold()
        with rare_garbage_collection(1_000_000):
            assert gc.get_threshold() == (32_000_000, *few[1:])
        assert gc.get_threshold() == few == (50_000, 50, 200)


def test_the_command_prints_a_report_and_draws_a_picture(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "smollm2_sums.yaml"
    picture = tmp_path / "timeline.png"
    options = ["--engines", "2", "--slots", "8", "--steps", "2", "--lengths", "8,3"]
    setup = ["simulate", str(recipe), "rollout.max_staleness=1", *options]
    result = CliRunner().invoke(app, [*setup, "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "waited for" in result.output
    assert picture.stat().st_size > 1000
    report_json = json.loads(CliRunner().invoke(app, [*setup, "--json"]).output)
    assert report_json["steps"] == 2
    assert report_json["samples"] == 2 * 16 * 8
    assert report_json["age_max"] <= 1


def test_the_timeline_ends_with_the_run_and_shows_slots_in_use() -> None:
    timeline = SlotTimeline()
    report = simulate(make_scenario(devices={"colocated": True}), timeline)
    assert timeline.points[-1][0] <= timeline.phases[-1][0]
    assert max(running for _, running, _ in timeline.points) == 4
    assert report == simulate(make_scenario(devices={"colocated": True}))
