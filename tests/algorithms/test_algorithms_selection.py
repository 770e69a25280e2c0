"""Selection: which groups are trained on."""

from __future__ import annotations

import pytest

from rollick.algorithms.selection import group_drop_reason, has_signal
from rollick.testing.fakes import group


@pytest.mark.parametrize(
    ("scores", "signal"),
    [
        ([0, 1, 0], True),
        ([1, 1, 1], False),
        ([1], False),
        ([], False),
        ([1, None], False),
        ([1, None, 0], True),
        ([0.5, 0.6], False),
        ([0.5, 0.625], False),
        ([0.5, 0.75], True),
    ],
)
def test_a_group_has_signal_if_its_valid_scores_differ_by_more_than_the_spread(
    scores: list[float | None], signal: bool
):
    assert has_signal(group(scores), min_spread=0.125) is signal


@pytest.mark.parametrize(
    ("scores", "reason"),
    [([0, 1], None), ([1, 1], "no_signal"), ([1, None], "no_signal"), ([None, None], "no_scores")],
)
def test_a_group_is_dropped_with_a_reason(scores: list[float | None], reason: str | None):
    assert group_drop_reason(group(scores), min_spread=0.01) == reason


def test_groups_without_signal_can_be_kept_but_never_those_without_scores():
    assert group_drop_reason(group([1, 1]), min_spread=0.01, drop_no_signal=False) is None
    assert group_drop_reason(group([None]), min_spread=0.01, drop_no_signal=False) == "no_scores"
