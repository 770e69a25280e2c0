"""The statistics of a step: its ended samples, its trained samples, and the bias between them."""

import json
import math

import pytest

from rollick.observe.metric_table import is_documented
from rollick.rollout.stats import StepWindow, token_ages
from rollick.testing.fakes import group
from rollick.types import PolicyVersion


def make_stats(window, batch, version=0):
    return window.to_stats(batch, version=PolicyVersion(version), wait_s=0.5)


def test_where_nothing_is_dropped_there_is_no_bias():
    stats = make_stats(StepWindow(), [group([0, 1], texts=["ab", "abcd"])])
    assert (
        stats.metrics["rollout/bias/length"],
        stats.metrics["rollout/bias/score"],
        stats.metrics["rollout/cancelled"],
    ) == (0, 0, 0)
    assert (stats.metrics["rollout/bias/length_kept"], stats.metrics["score/trained"]) == (3, 0.5)
    assert math.isnan(stats.metrics["rollout/bias/length_dropped"])


def test_the_bias_is_the_mean_of_the_kept_minus_the_mean_of_all_that_ended():
    window = StepWindow()
    window.add_dropped(group([1, None], texts=["a" * 10, "a" * 6]).members)
    stats = make_stats(window, [group([0, 1], texts=["ab", "abcd"])])
    assert (
        stats.metrics["rollout/bias/length_kept"],
        stats.metrics["rollout/bias/length_dropped"],
    ) == (3, 8)
    assert stats.metrics["rollout/bias/length"] == 3 - (2 + 4 + 10 + 6) / 4
    # Failed scores do not count: kept are 0 and 1, dropped is 1.
    assert stats.metrics["rollout/bias/score"] == pytest.approx(0.5 - 2 / 3)
    assert stats.metrics["rollout/bias/score_dropped"] == 1


def test_cancelled_samples_are_counted_with_their_share():
    window = StepWindow()
    full = group([0, 1])
    for member in full.members:
        window.add(member, generate_s=1.0, reward_s=2.0)
    window.cancelled += 6
    metrics = make_stats(window, [full]).metrics
    assert metrics["rollout/cancelled"] == 6
    assert metrics["rollout/cancelled_share"] == 0.75
    assert metrics["time/sample_generate"] == 1


def test_all_metrics_have_documented_names():
    window = StepWindow()
    window.dropped["stale"] += 1
    metrics = make_stats(window, [group([0, 1])]).metrics
    assert {name for name in metrics if not is_documented(name)} == set()


def test_the_sums_of_a_step_survive_a_resume():
    window, restored = StepWindow(), StepWindow()
    for member in group([0.25, None]).members:
        window.add(member, generate_s=1.0, reward_s=0.0)
    window.dropped["surplus"] += 2
    window.add_dropped(group([1.0], texts=["abc"]).members)
    window.cancelled, window.masked_tokens = 3, 4
    restored.restore(json.loads(json.dumps(window.state())))
    batch = [group([0, 1])]
    assert make_stats(restored, batch) == make_stats(window, batch)
    assert make_stats(restored, batch).dropped == {"surplus": 2}


def test_ages_are_those_of_tokens_that_can_be_trained_on():
    batch = [group([0, 1], texts=["ab", "a"], start_version=2)]
    assert token_ages(batch, PolicyVersion(5)).tolist() == [3, 3, 3]
    assert make_stats(StepWindow(), batch, version=5).metrics["rollout/age_max"] == 3


def test_a_step_in_which_no_sample_ended_has_no_mean_length():
    assert math.isnan(make_stats(StepWindow(), [group([0, 1])]).metrics["rollout/response_length"])


def test_the_mean_score_does_not_depend_on_the_order_in_which_samples_end():
    members = group([1e16, -1e16, 1.0]).members
    windows = StepWindow(), StepWindow()
    for window, ordered in zip(windows, (members, members[1:] + members[:1]), strict=True):
        for member in ordered:
            window.add(member, generate_s=0, reward_s=0)
    assert windows[0].mean_score == windows[1].mean_score
