"""Reward-hacking alarms: each rule is provoked, and an honest run raises none."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from rollick.observe.live_view import LiveView
from rollick.observe.metric_table import METRICS, is_documented
from rollick.observe.reward_hacking import RULES, WINDOW, alarm_metrics, find_alarms, metric_change

STEPS = 20


def make_rows(**metrics: tuple[float, float]) -> list[dict[str, float]]:
    """Rows of a run whose metrics change linearly from one value to another. `score/mean` rises."""
    ranges = {"score__mean": (0.2, 0.8), **metrics}
    return [
        {
            name.replace("__", "/"): first + (last - first) * step / (STEPS - 1)
            for name, (first, last) in ranges.items()
        }
        for step in range(STEPS)
    ]


def list_alarms(rows: list[dict[str, float]]) -> list[str]:
    return list(find_alarms(rows))


PROVOKED = {
    "length": make_rows(rollout__response_length=(100, 400)),
    "length_by_truncation": make_rows(
        rollout__response_length=(100, 120), rollout__truncated=(0.0, 0.9)
    ),
    "repetition": make_rows(rollout__repetition=(0.05, 0.6)),
    "format_only": make_rows(score__part__math=(0.2, 0.2), score__part__tags=(0.1, 0.9)),
    "identical": make_rows(rollout__identical=(0.1, 0.9)),
    "judge": make_rows(score__part__judge=(0.2, 0.9), reward__mean__judge__spread=(0.05, 0.5)),
    "judge_against_a_rule": make_rows(
        score__part__judge=(0.2, 0.9),
        reward__mean__judge__spread=(0.0, 0.0),
        score__part__math=(0.6, 0.1),
    ),
    "held_out": make_rows(eval__score=(0.6, 0.2)),
}


@pytest.mark.parametrize("name", PROVOKED)
def test_a_rule_detects_what_gets_worse_while_the_score_rises(name: str):
    [(rule, message)] = find_alarms(PROVOKED[name]).items()
    assert rule == name.removesuffix("_by_truncation").removesuffix("_against_a_rule")
    assert " to " in message


@pytest.mark.parametrize("name", PROVOKED)
def test_no_alarm_is_raised_while_the_score_does_not_rise(name: str):
    rows = [{**row, "score/mean": 0.5, "score/part/judge": 0.5} for row in PROVOKED[name]]
    assert list_alarms(rows) == []


def test_every_rule_is_provoked():
    assert {rule for rows in PROVOKED.values() for rule in list_alarms(rows)} == set(RULES)


HONEST = {
    "nothing_else_changes": make_rows(
        rollout__response_length=(100, 110), rollout__identical=(0.1, 0.1)
    ),
    "answers_grow_a_little": make_rows(rollout__response_length=(100, 150)),
    "format_and_content_rise": make_rows(
        score__part__math=(0.2, 0.8), score__part__tags=(0.1, 0.9)
    ),
    "a_run_of_format_alone": make_rows(score__part__tags=(0.1, 0.9)),
    "answers_were_alike_from_the_start": make_rows(rollout__identical=(0.6, 0.7)),
    "votes_come_together": make_rows(
        score__part__judge=(0.2, 0.9), reward__mean__judge__spread=(0.5, 0.1)
    ),
    "validation_rises": make_rows(eval__score=(0.2, 0.7)),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_run_raises_no_alarm(name: str):
    assert list_alarms(HONEST[name]) == []


def test_a_part_of_a_reward_is_distinguished_from_the_reward():
    parts = {"score__part__math": (0.2, 0.7), "score__part__math/format": (0.0, 1.0)}
    assert list_alarms(make_rows(**parts, **{"score__part__math/correct": (0.2, 0.2)})) == [
        "format_only"
    ]
    assert list_alarms(make_rows(**parts, **{"score__part__math/correct": (0.2, 0.7)})) == []


def test_a_rise_within_the_noise_does_not_count():
    noisy = [{"score/mean": 0.5 + 0.3 * (-1) ** n + 0.002 * n} for n in range(STEPS)]
    change = metric_change(noisy, "score/mean")
    assert change is not None
    assert not change.rose


def test_a_short_run_gets_no_advice():
    assert metric_change(PROVOKED["length"][: 2 * WINDOW - 1], "score/mean") is None
    assert find_alarms(PROVOKED["length"][: 2 * WINDOW - 1]) == {}
    assert find_alarms([]) == {}


def test_steps_without_the_metric_are_skipped():
    rows = [
        row for step in PROVOKED["held_out"] for row in ({"score/mean": step["score/mean"]}, step)
    ]
    assert list_alarms(rows) == ["held_out"]
    assert list_alarms([{**row, "eval/score": float("nan")} for row in rows]) == []


def test_alarms_are_metrics_that_are_documented():
    metrics = alarm_metrics({"length": "longer"})
    assert metrics == {f"reward_hacking/{rule}": float(rule == "length") for rule in RULES}
    assert all(is_documented(name) for name in metrics)
    assert all(rule in METRICS["reward_hacking/*"][1] for rule in RULES)


def test_the_live_view_shows_alarms_and_logs_each_once(caplog: pytest.LogCaptureFixture):
    console = Console(file=io.StringIO(), width=120)
    view = LiveView("run", 5, mode="off", console=console)
    with caplog.at_level(logging.WARNING, logger="rollick"):
        view.warn({"length": "answers grew"})
        view.warn({"length": "answers grew more"})
    assert [record.getMessage() for record in caplog.records] == [
        "reward-hacking alarm length: answers grew"
    ]
    console.print(view.render())
    assert "answers grew more" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    view.warn({})
    assert view.alarms == {}
