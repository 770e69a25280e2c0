"""The length predictor: cases computed by hand, log-normal samples, and its state."""

import json
import random
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.rollout.lengths import LengthPredictor


def test_before_any_sample_the_initial_length_is_predicted():
    assert LengthPredictor(initial=300).predict("p", "math") == 300


def test_a_domain_without_samples_is_not_predicted_from_another():
    predictor = LengthPredictor(initial=300)
    predictor.update("p", "math", 10)
    assert predictor.predict("q", "code") == 300
    assert predictor.predict("q", "math") < 300


def test_one_sample_counts_as_much_as_the_initial_length():
    # Logs 2 and 0: mean 1, variance 1.
    predictor = LengthPredictor(initial=exp(2))
    predictor.update("p", "math", 1)
    assert predictor.predict("another", "math") == pytest.approx(exp(1 + 1 / 2))


def test_a_prompt_with_one_sample_is_trusted_by_its_share_of_the_variance():
    # Of the variance 1, 2/3 are taken as inside a prompt, 1/3 as between prompts, so one sample is
    # trusted by 1/3: location 1 + (0 - 1) / 3, variance 2/3 + 2/3 * 1/3.
    predictor = LengthPredictor(initial=exp(2))
    predictor.update("p", "math", 1)
    assert predictor.predict("p", "math") == pytest.approx(exp(2 / 3 + (2 / 3 + 2 / 9) / 2))


def test_samples_of_equal_length_are_predicted_exactly():
    predictor = LengthPredictor(initial=100)
    for _ in range(50):
        predictor.update("p", "math", 100)
    assert predictor.predict("p", "math") == pytest.approx(100)
    assert predictor.predict("new", "math") == pytest.approx(100)


def test_a_sample_that_drew_nothing_counts_as_one_token():
    predictor = LengthPredictor(initial=1)
    predictor.update("p", "math", 0)
    assert predictor.predict("p", "math") == 1


def simulate_lengths(*, prompts, samples, spread_between, spread_within):
    """The log-medians of prompts around 200 tokens, and `samples` lengths of each prompt."""
    rng = random.Random(0)
    medians = {f"p{n}": log(200) + rng.gauss(0, spread_between) for n in range(prompts)}
    samples_of_prompts = [
        (uid, round(exp(median + rng.gauss(0, spread_within))))
        for _ in range(samples)
        for uid, median in medians.items()
    ]
    return medians, samples_of_prompts


def update_predictor(predictor, **shape):
    medians, samples_of_prompts = simulate_lengths(**shape)
    for uid, tokens in samples_of_prompts:
        predictor.update(uid, "math", tokens)
    return medians


def test_an_unseen_prompt_is_expected_at_the_mean_of_its_domain():
    predictor = LengthPredictor(initial=5000)
    update_predictor(predictor, prompts=400, samples=4, spread_between=0.6, spread_within=0.5)
    mean = 200 * exp((0.6**2 + 0.5**2) / 2)
    assert predictor.predict("new", "math") == pytest.approx(mean, rel=0.1)


def test_where_prompts_differ_each_is_expected_at_its_own_length():
    predictor = LengthPredictor(initial=200)
    medians = update_predictor(
        predictor, prompts=300, samples=4, spread_between=1.0, spread_within=0.2
    )
    errors = [
        abs(log(predictor.predict(uid, "math")) - median - 0.2**2 / 2)
        for uid, median in medians.items()
    ]
    assert sum(errors) / len(errors) < 0.12, "four samples leave an error of 0.1"


def test_if_prompts_do_not_differ_short_samples_hardly_change_a_prediction():
    predictor = LengthPredictor(initial=200)
    update_predictor(predictor, prompts=500, samples=4, spread_between=0.0, spread_within=0.5)
    usual = predictor.predict("new", "math")
    for _ in range(2):
        predictor.update("lucky", "math", 20)
    assert predictor.predict("lucky", "math") == pytest.approx(usual, rel=0.2)


def test_shrinkage_beats_the_domain_mean_and_the_prompts_own_mean():
    predictor = LengthPredictor(initial=200)
    shape = {"prompts": 500, "samples": 2, "spread_between": 0.5, "spread_within": 0.5}
    medians = update_predictor(predictor, **shape)
    own: dict[str, list[float]] = {}
    for uid, tokens in simulate_lengths(**shape)[1]:
        own.setdefault(uid, []).append(log(tokens))

    def error(predict):
        return sum((predict(uid) - median) ** 2 for uid, median in medians.items()) / 500

    shrunk = error(lambda uid: log(predictor.predict(uid, "math")) - (0.5**2 + 0.5**2 / 3) / 2)
    assert shrunk < 0.85 * error(lambda uid: sum(own[uid]) / 2)
    assert shrunk < 0.85 * error(lambda _: log(200))


def test_a_finished_member_changes_the_prediction_for_its_group():
    predictor = LengthPredictor(initial=200)
    update_predictor(predictor, prompts=300, samples=2, spread_between=1.0, spread_within=0.3)
    before = predictor.predict("fresh", "math")
    predictor.update("fresh", "math", 2000)
    assert predictor.predict("fresh", "math") > 4 * before


def test_lengths_that_grow_with_training_are_followed():
    predictor = LengthPredictor(initial=100)
    for length in (100, 1000):
        for number in range(12_000):
            predictor.update(f"p{number % 3000}", "math", length)
    assert predictor.predict("new", "math") == pytest.approx(1000, rel=0.2)
    assert predictor.predict("p7", "math") == pytest.approx(1000, rel=0.5)


def test_predictions_follow_a_prompt_whose_samples_grow():
    predictor = LengthPredictor(initial=200)
    update_predictor(predictor, prompts=300, samples=4, spread_between=1.0, spread_within=0.2)
    for length, samples in ((100, 200), (1000, 96)):
        for _ in range(samples):
            predictor.update("p", "math", length)
    assert predictor.predict("p", "math") > 800


def test_extreme_samples_do_not_give_extreme_predictions():
    predictor = LengthPredictor(initial=1)
    for number in range(10):
        predictor.update(f"p{number}", "math", 10 ** (number % 2 * 9))
    assert predictor.predict("new", "math") < 1e6


def test_beyond_the_limit_the_prompt_updated_longest_ago_is_forgotten():
    predictor = LengthPredictor(initial=100, prompts_kept=2)
    for uid in ("a", "b", "a", "c"):
        predictor.update(uid, "math", 10)
    assert predictor.state()["prompts"] == ["a", "c"]
    assert predictor.predict("b", "math") == predictor.predict("new", "math")


def test_a_query_changes_nothing():
    predictor = LengthPredictor(initial=100)
    predictor.update("p", "math", 50)
    before = json.dumps(predictor.state())
    for uid, domain in (("p", "math"), ("q", "math"), ("p", "code")):
        predictor.predict(uid, domain)
    assert json.dumps(predictor.state()) == before


def test_a_restored_predictor_drops_entries_beyond_its_own_limit():
    large = LengthPredictor(initial=100)
    for number in range(5):
        large.update(f"p{number}", "math", 10)
    small = LengthPredictor(initial=100, prompts_kept=2)
    small.restore(large.state())
    assert small.state()["prompts"] == ["p3", "p4"]


def test_the_state_of_a_prompt_is_short():
    predictor = LengthPredictor(initial=100)
    update_predictor(predictor, prompts=1000, samples=3, spread_between=0.5, spread_within=0.5)
    assert len(json.dumps(predictor.state(), separators=(",", ":"))) < 20 * 1000


SAMPLES = st.lists(
    st.tuples(
        st.sampled_from(["p", "q", "r", "s"]),
        st.sampled_from(["math", "code"]),
        st.integers(0, 100_000),
    ),
    max_size=40,
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(before=SAMPLES, after=SAMPLES, initial=st.floats(1, 10_000))
def test_a_restored_predictor_continues_bit_for_bit_within_its_bounds(before, after, initial):
    one, other = (LengthPredictor(initial=initial, prompts_kept=3) for _ in range(2))
    for sample in before:
        one.update(*sample)
    other.restore(json.loads(json.dumps(one.state())))
    for sample in after:
        one.update(*sample)
        other.update(*sample)
    assert one.state() == other.state()
    longest = max([initial] + [tokens for _, _, tokens in before + after])
    for uid, domain in ((uid, domain) for uid in "pqrst" for domain in ("math", "code")):
        assert one.predict(uid, domain) == other.predict(uid, domain)
        assert 0.99 <= one.predict(uid, domain) <= longest * exp(2) * 1.001
