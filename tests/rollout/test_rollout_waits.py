"""Who is waited for, in words."""

import pytest

from rollick.rollout.waits import Doing, generating, name_waits
from rollick.types import SampleId


def waits(*samples, now=100.0):
    """Samples as (group, index, what, since)."""
    doing = {SampleId(g, n): Doing(what, since) for g, n, what, since in samples}
    return name_waits(doing, now=now)


def test_a_wait_names_the_group_the_sample_what_it_does_and_for_how_long():
    said = waits((37, 3, "in tool search", 90.0))
    assert said == "group 37: sample 3 in tool search for 10 s"


def test_samples_of_one_group_are_named_together_and_groups_apart():
    said = waits(
        (4, 0, generating(2), 99.5), (4, 2, "being scored", 88.0), (5, 1, "between turns", 100.0)
    )
    assert said == (
        "group 4: sample 0 generating on engine 2 for 0.5 s, sample 2 being scored for 12 s; "
        "group 5: sample 1 between turns for 0 s"
    )


@pytest.mark.parametrize(("count", "end"), [(4, "sample 3 x for 1 s"), (6, "and 2 more samples")])
def test_of_many_the_first_are_named_and_the_others_counted(count, end):
    said = waits(*[(0, index, "x", 99.0) for index in range(count)])
    assert said.endswith(end)
    assert said.count("sample ") == 4


def test_long_waits_are_told_in_whole_seconds():
    assert waits((0, 0, "in tool search", 0.0), now=310.4) == (
        "group 0: sample 0 in tool search for 310 s"
    )
    assert waits((0, 0, "in tool search", 0.0), now=12345.0).endswith("for 12345 s")
