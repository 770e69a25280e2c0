"""Selection: which groups are worth a gradient."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.selection import (
    PromptBelief,
    has_signal,
    is_retired,
    judge_group,
    nearest_half,
    signal_weight,
)
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
def test_a_group_has_signal_if_its_judged_scores_differ_by_more_than_the_spread(
    scores: list[float | None], signal: bool
):
    assert has_signal(group(scores), min_spread=0.125) is signal


@pytest.mark.parametrize(
    ("scores", "reason"),
    [([0, 1], None), ([1, 1], "no_signal"), ([1, None], "no_signal"), ([None, None], "no_scores")],
)
def test_a_group_is_dropped_with_a_reason(scores: list[float | None], reason: str | None):
    assert judge_group(group(scores), min_spread=0.01) == reason


def test_groups_without_signal_can_be_kept_but_never_those_without_scores():
    assert judge_group(group([1, 1]), min_spread=0.01, drop_no_signal=False) is None
    assert judge_group(group([None]), min_spread=0.01, drop_no_signal=False) == "no_scores"


def test_a_belief_counts_passes_and_fails_of_judged_samples():
    belief = PromptBelief().updated(group([1, 0.5, None, 0, 1]), pass_score=0.999)
    assert belief == PromptBelief(passes=2, fails=2)
    assert belief.pass_rate == 0.5
    assert PromptBelief().pass_rate == 0


def test_what_was_known_before_decays():
    old = PromptBelief(passes=8, fails=4)
    assert old.updated(group([0, 1]), pass_score=1, decay=0.5) == PromptBelief(5, 3)
    assert old.updated(group([None]), pass_score=1) == old


def test_a_belief_survives_json():
    belief = PromptBelief(2.5, 1)
    assert PromptBelief.from_state(json.loads(json.dumps(belief.to_state()))) == belief


@pytest.mark.parametrize(
    ("passes", "fails", "retired"),
    [(9, 1, True), (8, 0, True), (7, 0, False), (8, 1, False), (0, 0, False), (0, 99, False)],
)
def test_a_prompt_retires_at_nine_passes_in_ten_over_enough_samples(
    passes: float, fails: float, retired: bool
):
    assert is_retired(PromptBelief(passes, fails)) is retired


def test_both_bounds_of_retirement_can_be_set():
    assert is_retired(PromptBelief(1, 1), pass_rate=0.5, min_tries=2)
    assert not is_retired(PromptBelief(1, 0), pass_rate=0.5, min_tries=2)


def test_the_weight_is_the_mean_variance_of_a_pass():
    # Beta(1, 1): the integral of 4 p (1 - p) is 2/3. Beta(2, 1): that of 8 p^2 (1 - p) is 2/3, too.
    assert signal_weight(PromptBelief()) == pytest.approx(2 / 3)
    assert signal_weight(PromptBelief(1, 0)) == pytest.approx(2 / 3)
    assert signal_weight(PromptBelief(1e6, 1e6)) == pytest.approx(1, abs=1e-5)
    assert signal_weight(PromptBelief(1e6, 0)) == pytest.approx(0, abs=1e-5)


@settings(derandomize=True, database=None, deadline=None, max_examples=25)
@given(passes=st.integers(0, 20), fails=st.integers(0, 20))
def test_the_weight_agrees_with_an_integral_and_is_the_same_for_passes_and_fails(
    passes: int, fails: int
):
    grid = (np.arange(2000) + 0.5) / 2000
    density = grid**passes * (1 - grid) ** fails
    expected = float((4 * grid * (1 - grid) * density).sum() / density.sum())
    weight = signal_weight(PromptBelief(passes, fails))
    assert weight == pytest.approx(expected, rel=1e-3)
    assert weight == signal_weight(PromptBelief(fails, passes))


def test_prompts_near_a_pass_rate_of_a_half_are_drawn_first_and_none_twice():
    beliefs = [PromptBelief(900, 10), PromptBelief(500, 500), PromptBelief(5, 900)]
    generator = np.random.default_rng(0)
    assert nearest_half(beliefs, 1, generator=generator) == [1]
    assert sorted(nearest_half(beliefs, 9, generator=generator)) == [0, 1, 2]
    assert nearest_half([], 3, generator=generator) == []


def test_the_same_random_state_draws_the_same_prompts_and_an_unknown_one_has_its_chance():
    beliefs = [PromptBelief(30, 20), PromptBelief()]
    draws = [nearest_half(beliefs, 1, generator=np.random.default_rng(n))[0] for n in range(50)]
    again = [nearest_half(beliefs, 1, generator=np.random.default_rng(n))[0] for n in range(50)]
    assert draws == again
    assert 0 < sum(draws) < 25
