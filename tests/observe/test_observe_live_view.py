"""The live view: the progress of a run and the time left."""

from __future__ import annotations

import logging
from io import StringIO
from math import inf, nan

import pytest
from rich.console import Console

from rollick.observe.live_view import PROGRESS_EVERY_S, LiveView, format_seconds


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_without_logging_the_lines_go_to_the_console(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rollick")
    output, clock = StringIO(), FakeClock()
    console = Console(file=output)
    with LiveView("toy", 20, mode="auto", console=console, clock=clock.now) as view:
        view.finish_step(0, {"eval/score": 0.125})
        clock.seconds = 90
        view.finish_step(1, {"score/mean": 0.25, "eval/score": 0.5})
    assert output.getvalue().splitlines() == [
        "step  0/20  held-out 0.125",
        "step  1/20  score 0.25  held-out 0.5  28 min 30 s left",
    ]


def test_a_long_step_prints_its_phase_its_samples_and_the_time_left() -> None:
    output, clock = StringIO(), FakeClock()
    with LiveView("toy", 9, mode="auto", console=Console(file=output), clock=clock.now) as view:
        view.begin_phase("generate")
        for done in range(1, 33):
            clock.seconds += 1
            view.count_samples("generate", done, 64)
            view.count_samples("validate", 1, 1)
        clock.seconds += PROGRESS_EVERY_S
        view.begin_phase("train")
    assert output.getvalue().splitlines() == [
        "step 1/9  generate  samples 15/64",
        "step 1/9  generate  samples 30/64, 34 s left",
        "step 1/9  train",
    ]


def test_samples_scored_before_the_phase_are_not_taken_for_speed() -> None:
    clock = FakeClock()
    view = LiveView("toy", 9, mode="off", clock=clock.now)
    view.begin_phase("generate")
    clock.seconds = 10
    view.count_samples("generate", 51, 100)
    assert view.pace.samples_left_s == 490


def test_a_notebook_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    view = LiveView("toy", 2, mode="auto")
    assert (view.is_live, view.console.is_jupyter) == (False, False)


def test_a_step_without_new_samples_shows_those_it_trained_on() -> None:
    view = LiveView("toy", 2, mode="off")
    view.finish_step(
        1,
        {
            "score/mean": nan,
            "score/trained": 0.5,
            "rollout/response_length": nan,
            "rollout/bias/length_kept": 7.0,
            "train/loss": 0.0,
            "speed/tokens_per_s": 0.0,
        },
    )
    assert view.summary() == "score 0.5  loss 0  length 7"


def test_time_before_the_run_is_not_counted_as_a_step() -> None:
    output, clock = StringIO(), FakeClock()
    view = LiveView("toy", 3, mode="auto", console=Console(file=output), clock=clock.now)
    view.announce("runs/toy: starting the workers")
    clock.seconds = 100
    with view:
        clock.seconds = 110
        view.finish_step(1, {})
    assert output.getvalue().splitlines() == [
        "runs/toy: starting the workers",
        "step 1/3  20 s left",
    ]


def test_the_time_left_is_at_most_the_limit_of_the_run() -> None:
    clock = FakeClock()
    with LiveView("toy", 100, mode="off", clock=clock.now, limit_s=300) as view:
        clock.seconds = 60
        view.finish_step(1, {})
    assert view.pace.run_left_s == 240


def test_a_score_that_is_not_a_number_is_not_shown() -> None:
    view = LiveView("run", 2, mode="off")
    view.finish_step(1, {"score/mean": nan, "score/trained": 0.5, "train/loss": inf})
    assert view.summary() == "score 0.5"
