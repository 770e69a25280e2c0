"""Advice for a run that does not learn: each symptom is provoked, and a healthy run has none."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest
from rich.console import Console

from rollick import RunResult
from rollick.observe.learning_advice import FLAT_AFTER, SYMPTOMS, WINDOW, find_advice
from rollick.observe.live_view import LiveView

HEALTHY = {
    "score/mean": 0.3,
    "train/grad_norm": 0.1,
    "train/loss": 0.0,  # On-policy, the loss of an RL run is about 0.
    "train/lr": 1e-6,
    "rollout/groups": 8,
    "rollout/dropped/no_signal": 1,
    "rollout/truncated": 0.1,
    "rollout/response_length": 20.0,
}


def run(steps: int = WINDOW, **changes: float | None) -> list[dict[str, float]]:
    """Rows of a run with the same metrics at each step. None removes a metric."""
    row = HEALTHY | {name.replace("__", "/"): value for name, value in changes.items()}
    kept = {name: value for name, value in row.items() if value is not None}
    return [{"step": step, **kept} for step in range(1, steps + 1)]


SFT = {"score__mean": None, "rollout__groups": None, "rollout__truncated": None}
PROVOKED = {
    "flat_score": (run(FLAT_AFTER), "not risen in 20 steps: from 0.3 to 0.3"),
    "flat_score at zero": (run(score__mean=0.0), "every score has been 0 for 5 steps"),
    "no_gradient": (run(train__grad_norm=0.0), "the gradient has been 0 for 5 steps"),
    "no_gradient without a rate": (run(train__lr=0.0), "the learning rate has been 0"),
    "no_gradient of sft": (run(**SFT), "the loss has been 0 for 5 steps"),
    "equal_scores": (
        run(rollout__groups=2, **{"rollout__dropped__no_signal": 6}),
        "the same in 75% of the groups (mean score 0.3); try: easier prompts",
    ),
    "equal_scores that are kept": (
        run(**{"rollout__kept_no_signal": 7, "rollout__dropped__no_signal": 0}),
        "the same in 88% of the groups",
    ),
    "at_limit": (
        run(rollout__truncated=0.8),
        "80% of the answers reach the token limit (mean length 20 tokens)",
    ),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_symptom_is_named_with_its_values_and_what_to_try(name: str) -> None:
    rows, expected = PROVOKED[name]
    [(symptom, message)] = find_advice(rows).items()
    assert symptom == name.split()[0]
    assert expected in message
    assert "try: " in message


def test_groups_with_equal_scores_are_counted_where_they_are_kept(
    run_toy: Callable[..., RunResult],
) -> None:
    # Scores 1 for every answer.
    length_reward = {"name": "length", "options": {"max_length": 1000}}
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": [length_reward]}
    options = ["rollout.drop_no_signal=false", "evaluate.every=0"]
    data = {"domains": {"letters": domain}}
    run = run_toy(*options, data=data, steps=1)
    assert run.metrics["rollout/kept_no_signal"] == run.metrics["rollout/groups"] == 4
    baseline = run_toy(*options, "algorithm=reinforce++", data=data, steps=1)
    assert "rollout/kept_no_signal" not in baseline.metrics


def test_a_healthy_a_short_and_a_solved_run_get_no_advice() -> None:
    assert find_advice([]) == {}
    assert find_advice(run(FLAT_AFTER - 1)) == {}
    assert find_advice(run(WINDOW - 1, score__mean=0.0, train__grad_norm=0.0)) == {}
    assert find_advice(run(2 * FLAT_AFTER, score__mean=0.97)) == {}
    rising = [{**row, "score/mean": row["step"] / 40} for row in run(40)]
    assert find_advice(rising) == {}
    # This run learns in spite of easy prompts and long answers.
    costly = {"rollout/truncated": 0.9, "rollout/dropped/no_signal": 90}
    assert find_advice([{**row, **costly} for row in rising]) == {}
    supervised = run(**SFT, train__loss=0.5)
    assert find_advice(supervised) == {}


def test_a_symptom_that_is_over_is_not_named() -> None:
    recovered = [*run(10, rollout__truncated=0.9), *run(WINDOW)]
    assert find_advice(recovered) == {}


def test_validation_rows_between_the_steps_change_nothing() -> None:
    rows = [
        row for each in run(train__grad_norm=0.0) for row in ({"step": 0, "eval/score": 0.1}, each)
    ]
    assert list(find_advice(rows)) == ["no_gradient"]


def test_the_live_view_shows_advice_and_logs_each_symptom_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    console = Console(file=io.StringIO(), width=200)
    view = LiveView("run", 5, mode="off", console=console)
    with caplog.at_level(logging.WARNING, logger="rollick"):
        for advice in ({"at_limit": "80%; try: more"}, {}, {"at_limit": "90%; try: more"}):
            view.advise(advice)
    assert caplog.messages == ["at_limit: 80%; try: more"]
    console.print(view.render())
    assert "90%; try: more" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "at_limit" in SYMPTOMS
