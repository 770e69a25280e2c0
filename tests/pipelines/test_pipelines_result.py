"""The last lines of a run: training and held-out scores, and the step that export takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollick import RunResult
from rollick.commands.export import find_checkpoint
from rollick.pipelines.state import HeldOutScore

RunToy = Callable[..., RunResult]


def make_result(*held_out: HeldOutScore, saved: int | None, step: int = 60) -> RunResult:
    metrics = {"score/mean": 0.75, "eval/pass@1": 0.5}
    return RunResult(Path("runs/x"), step, metrics, held_out=held_out, best_checkpoint=saved)


def test_the_end_of_a_run_reports_before_best_and_last_and_what_export_takes() -> None:
    scores = [HeldOutScore(0, 0.25, 0.25), HeldOutScore(40, 0.8, 0.8), HeldOutScore(60, 0.5, 0.5)]
    assert str(make_result(*scores, saved=40)).splitlines() == [
        "runs/x: step 60",
        "  training score   0.75 in the last step",
        "  held-out score   0.25 before (step 0) → 0.8 best (step 40) → 0.5 last (step 60)",
        "  next             rollick export runs/x OUT takes step 60; with --best, step 40",
    ]


def test_pass_at_1_is_reported_for_scores_between_0_and_1() -> None:
    scores = [HeldOutScore(0, 0.5, 0.0), HeldOutScore(60, 0.75, 0.5)]
    held_out = [
        line for line in str(make_result(*scores, saved=60)).splitlines() if "held-out" in line
    ]
    assert held_out == [
        "  held-out score   0.5 before (step 0) → 0.75 best (step 60) → 0.75 last (step 60)",
        "  held-out pass@1  0 before (step 0) → 0.5 best (step 60) → 0.5 last (step 60)",
    ]


def test_where_no_sample_passes_the_best_validation_has_the_highest_score(run_toy: RunToy) -> None:
    scores = [HeldOutScore(0, 0.1, 0.0), HeldOutScore(40, 0.3, 0.0), HeldOutScore(60, 0.2, 0.0)]
    [line] = [
        line for line in str(make_result(*scores, saved=40)).splitlines() if "score   0.1" in line
    ]
    assert line.endswith("0.1 before (step 0) → 0.3 best (step 40) → 0.2 last (step 60)")
    # The learning rate is so high that the score falls. No sample reaches the threshold.
    options = ["evaluate.every=1", "checkpoint.every=1", "rollout.drop_no_signal=false"]
    run = run_toy(
        *options, "evaluate.pass_threshold=2", "train.optimizer.lr=0.03", "run.seed=1", steps=4
    )
    assert {entry.pass_at_1 for entry in run.held_out} == {0.0}
    highest = max(run.held_out, key=lambda entry: (entry.score, entry.step))
    assert highest.step < run.step
    assert run.best_checkpoint == find_checkpoint(run.folder, best=True).step == highest.step


def test_a_best_step_that_was_not_saved_is_named() -> None:
    scores = [HeldOutScore(50, 0.9, 0.9), HeldOutScore(60, 0.5, 0.5)]
    last = str(make_result(*scores, saved=60)).splitlines()[-1]
    assert last.endswith("takes step 60 (step 50 was not saved: lower checkpoint.every)")


def test_a_run_without_validation_reports_only_its_training_score() -> None:
    metrics = {"score/mean": float("nan"), "score/trained": 0.5}
    assert str(RunResult(Path("runs/x"), 3, metrics)).splitlines() == [
        "runs/x: step 3",
        "  training score   0.5 in the last step",
        "  next             rollick export runs/x OUT takes step 3",
    ]


def test_a_run_validates_before_its_first_step_if_it_can(run_toy: RunToy) -> None:
    run = run_toy("evaluate.every=1", "checkpoint.every=1", "evaluate.at_start=null", steps=2)
    assert [entry.step for entry in run.held_out] == [0, 1, 2]
    assert run.best is not None
    assert run.best.pass_at_1 == max(entry.pass_at_1 for entry in run.held_out)
    assert run.best_checkpoint == find_checkpoint(run.folder, best=True).step
    assert run.training_score == run.metrics["score/mean"]


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_step_line_of_an_asynchronous_run_says_nan(
    run_toy: RunToy, capfd: pytest.CaptureFixture[str], staleness: int
) -> None:
    run_toy(f"rollout.max_staleness={staleness}", "observe.live=auto", steps=4)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert all("score" in line and "length" in line for line in lines)
    assert not any("nan" in line or "length 0" in line for line in lines)
