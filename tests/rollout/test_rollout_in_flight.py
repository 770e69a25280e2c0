"""The text that names the samples a batch waits for."""

import pytest

from rollick.observe.sample_stage import (
    BETWEEN_TURNS,
    SCORING,
    SampleActivity,
    SampleStage,
    on_engine,
)
from rollick.rollout.in_flight import describe_activities
from rollick.types import SampleId

SEARCHING = SampleActivity(SampleStage.IN_ENVIRONMENT, label="tool search")


def describe_samples(*samples, now=100.0):
    """The text for samples given as (group, index, activity, since)."""
    activities = {SampleId(g, n): (activity, since) for g, n, activity, since in samples}
    return describe_activities(activities, now=now)


def test_a_wait_names_the_group_the_sample_its_activity_and_for_how_long():
    assert (
        describe_samples((37, 3, SEARCHING, 90.0)) == "group 37: sample 3 in tool search for 10 s"
    )


def test_samples_are_listed_by_group():
    generating = on_engine(SampleStage.GENERATING, 2)
    text = describe_samples(
        (4, 0, generating, 99.5), (4, 2, SCORING, 88.0), (5, 1, BETWEEN_TURNS, 100.0)
    )
    assert text == (
        "group 4: sample 0 generating on engine 2 for 0.5 s, sample 2 being scored for 12 s; "
        "group 5: sample 1 between turns for 0 s"
    )


@pytest.mark.parametrize(
    ("count", "end"), [(4, "sample 3 being scored for 1 s"), (6, "and 2 more samples")]
)
def test_of_many_samples_the_first_are_named_and_the_others_counted(count, end):
    text = describe_samples(*[(0, index, SCORING, 99.0) for index in range(count)])
    assert text.endswith(end)
    assert text.count("sample ") == 4


def test_long_waits_are_printed_in_seconds_without_decimals():
    assert describe_samples((0, 0, SEARCHING, 0.0), now=310.4) == (
        "group 0: sample 0 in tool search for 310 s"
    )
    assert describe_samples((0, 0, SEARCHING, 0.0), now=12345.0).endswith("for 12345 s")
