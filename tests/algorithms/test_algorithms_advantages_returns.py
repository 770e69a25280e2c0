"""Advantages by token and by turn: returns, GAE, GiGPO, on-policy distillation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.objective import resolve_advantage
from rollick.algorithms.returns import (
    discounted_returns,
    gae,
    gigpo,
    opd,
    over_turns,
    reinforce,
    reinforce_pp,
    segment_returns,
    step_return,
    turns,
)
from rollick.config.advantages import ReinforceAdvantage, ReinforcePpAdvantage
from rollick.config.schema import AlgorithmConfig
from rollick.errors import ConfigError, DataError
from rollick.testing.fakes import group
from rollick.types import BoolArray, FloatArray, Group

exhaustive = settings(derandomize=True, database=None, deadline=None, max_examples=60)
MASKS = st.lists(st.booleans(), min_size=1, max_size=12)
SEEDS = st.integers(0, 10_000)


def mask_of(text: str) -> BoolArray:
    """`x` is a token that the policy drew, `.` any other."""
    return np.array([letter == "x" for letter in text], np.bool_)


def masked_group(scores: list[float | None], *masks: str, uid: int = 0) -> Group:
    """Samples whose loss masks are these; the prompt has the first four tokens."""
    plain = group(scores, uid=uid, texts=["a" * (len(mask) - 4) for mask in masks])
    members = tuple(
        replace(member, sample=replace(member.sample, loss_mask=mask_of(mask)))
        for member, mask in zip(plain.members, masks, strict=True)
    )
    return replace(plain, members=members)


def arrays(found: object) -> list[list[list[float]]]:
    return [[np.asarray(value).tolist() for value in row] for row in found]  # pyright: ignore


def numbers(seed: int, count: int) -> FloatArray:
    return np.random.default_rng(seed).normal(size=count)


def test_reinforce_discounts_the_score_from_the_last_token_back_and_over_drawn_tokens_only():
    batch = [masked_group([8, -2], "....xx..x", "....x")]
    found = reinforce(batch, ReinforceAdvantage(gamma=0.5))
    assert arrays(found) == [[[0, 0, 0, 0, 2, 4, 0, 0, 8], [0, 0, 0, 0, -2]]]


def test_reinforce_without_discount_is_the_score():
    [[values]] = reinforce([masked_group([0.1], "....xxx")], ReinforceAdvantage())
    assert np.asarray(values).tolist() == [0, 0, 0, 0, 0.1, 0.1, 0.1]


def test_whitening_counts_each_trained_token_once():
    # tokens 3 3 3 | -1: mean 2, squares 3 + 9 = 12 over n - 1 = 3
    batch = [masked_group([3, None], "....xxx", "....xxxx"), masked_group([-1], "....x.", uid=1)]
    std = 2 + 1e-6
    found = arrays(reinforce(batch, ReinforceAdvantage(whiten=True)))
    assert found[0][0] == pytest.approx([0, 0, 0, 0, 1 / std, 1 / std, 1 / std])
    assert found[0][1] == [0] * 8
    assert found[1][0] == pytest.approx([0, 0, 0, 0, -3 / std, 0])


@pytest.mark.parametrize("name", ["reinforce", "reinforce++"])
@pytest.mark.parametrize(
    "batch",
    [
        [masked_group([0.1, 0.1], "....x", "....xx"), masked_group([0.1], "....xxx")],
        [masked_group([5], "....x")],
        [masked_group([5], "....")],
        [masked_group([None], "....x")],
    ],
    ids=["equal", "one token", "no token", "failed"],
)
def test_whitened_returns_without_spread_are_exactly_zero(name: str, batch: list[Group]):
    part = {"name": name, "whiten": True} if name == "reinforce" else {"name": name}
    found = resolve_advantage(AlgorithmConfig.model_validate({"advantage": part}))(batch)
    assert all(value == 0 for row in arrays(found) for values in row for value in values)


def test_one_drawn_sample_per_prompt_has_an_advantage_in_the_batch():
    batch = [masked_group([1], "....x"), masked_group([0], "....x", uid=1)]
    found = arrays(reinforce_pp(batch, ReinforcePpAdvantage()))
    assert found[0][0][4] == pytest.approx(1 / math.sqrt(2), rel=1e-5)
    assert found[1][0][4] == pytest.approx(-1 / math.sqrt(2), rel=1e-5)


def test_reinforce_pp_takes_the_kl_from_the_reward_of_each_token():
    # rewards -1, -2 + 10 -> returns 7, 8; and 0 of the other sample. mean 5, squares 4 + 9 + 25
    batch = [masked_group([10, 0], "....x.x", "....x")]
    inf = math.inf
    kl = [[np.array([inf, 0, 0, 0, 2, inf, 4]), np.zeros(5)]]
    found = arrays(reinforce_pp(batch, ReinforcePpAdvantage(kl_coefficient=0.5), kl=kl))
    std = math.sqrt(38 / 2) + 1e-6
    assert found[0][0] == pytest.approx([0, 0, 0, 0, 2 / std, 0, 3 / std])
    assert found[0][1] == pytest.approx([0, 0, 0, 0, -5 / std])


def test_reinforce_pp_says_what_is_missing_if_there_is_no_kl():
    with pytest.raises(ConfigError, match=r"kl_coefficient=0.5 needs the KL"):
        reinforce_pp([group([1])], ReinforcePpAdvantage(kl_coefficient=0.5))


@pytest.mark.parametrize(
    ("kl", "message"),
    [([], "one stream for each member"), ([[np.zeros(3)]], r"shape \(3,\), the sample has 5")],
)
def test_a_kl_of_another_shape_is_refused(kl: list[list[FloatArray]], message: str):
    with pytest.raises(ConfigError, match=message):
        reinforce_pp([group([1])], ReinforcePpAdvantage(kl_coefficient=1), kl=kl)


@exhaustive
@given(mask=MASKS, seed=SEEDS, gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_agree_with_a_plain_loop(mask: list[bool], seed: int, gamma: float):
    rewards = np.where(mask, numbers(seed, len(mask)), 0.0)
    found = discounted_returns(rewards, np.array(mask), gamma=gamma)
    for place, inside in enumerate(mask):
        total, discount = 0.0, 1.0
        for later in range(place, len(mask)):
            if inside and mask[later]:
                total += discount * rewards[later]
                discount *= gamma
        assert found[place] == pytest.approx(total, abs=1e-12)


@exhaustive
@given(seed=SEEDS, shift=st.sampled_from([-5.0, 3.0]), factor=st.sampled_from([0.5, 4.0]))
def test_whitened_returns_do_not_depend_on_shift_and_scale(seed: int, shift: float, factor: float):
    scores = [float(value) for value in numbers(seed, 3)]

    def whitened(values: list[float]) -> list[float]:
        batch = [masked_group([*values], "....xx", "....x", "....xxx")]
        found = arrays(reinforce(batch, ReinforceAdvantage(whiten=True, epsilon=1e-12)))
        return [value for values_T in found[0] for value in values_T]

    plain = whitened(scores)
    moved = whitened([factor * score + shift for score in scores])
    assert moved == pytest.approx(plain, abs=1e-8)
    assert sum(plain) == pytest.approx(0, abs=1e-9)


def gae_by_loops(
    rewards: list[float], values: list[float], *, gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """A_t as the sum over all later TD errors, term by term."""
    after = [*values[1:], bootstrap]
    errors = [r + gamma * v2 - v for r, v, v2 in zip(rewards, values, after, strict=False)]
    return [
        sum((gamma * lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]


def test_gae_by_hand():
    # d_2 = 1 - 0.5 = 0.5; d_1 = 0.5 * 0.5 - 0.25 = 0; A_1 = 0 + 0.5 * 0.5 * 0.5
    found = gae(
        np.array([0.0, 0.0, 1.0]),
        np.array([9.0, 0.25, 0.5]),
        mask_of(".xx"),
        gamma=0.5,
        lam=0.5,
    )
    assert found.advantages_T.tolist() == [0, 0.125, 0.5]
    assert found.returns_T.tolist() == [0, 0.375, 1.0]


@exhaustive
@given(mask=MASKS, seed=SEEDS, lam=st.sampled_from([0.0, 0.95, 1.0]), end=st.floats(-2, 2))
def test_gae_agrees_with_plain_loops_over_the_drawn_tokens(
    mask: list[bool], seed: int, lam: float, end: float
):
    inside = np.array(mask)
    rewards, values = np.where(inside, numbers(seed, len(mask)), 0), numbers(seed + 1, len(mask))
    found = gae(rewards, values, inside, gamma=0.9, lam=lam, bootstrap=end)
    expected = gae_by_loops(
        rewards[inside].tolist(), values[inside].tolist(), gamma=0.9, lam=lam, bootstrap=end
    )
    assert found.advantages_T[inside].tolist() == pytest.approx(expected, abs=1e-12)
    assert not found.advantages_T[~inside].any()
    assert not found.returns_T[~inside].any()


@pytest.mark.parametrize("junk", [7.0, math.nan, -math.inf])
def test_gae_goes_neither_through_padding_nor_through_observations(junk: float):
    packed = gae(
        np.array([0.0, 0, 0, 1]),
        np.array([0.1, 0.2, 0.3, 0.4]),
        mask_of("xxxx"),
        gamma=0.9,
        lam=0.8,
    )
    spread = gae(
        np.array([0.0, 0, 0, 0, 0, 0, 1, 0, 0]),
        np.array([junk, 0.1, 0.2, junk, junk, 0.3, 0.4, junk, junk]),
        mask_of(".xx..xx.."),
        gamma=0.9,
        lam=0.8,
    )
    assert spread.advantages_T[mask_of(".xx..xx..")].tolist() == packed.advantages_T.tolist()
    assert spread.advantages_T[~mask_of(".xx..xx..")].tolist() == [0] * 5


def test_nothing_follows_a_terminated_sample_and_the_bootstrap_follows_a_truncated_one():
    rewards, values = np.zeros(2), np.array([0.5, 0.5])
    ended = gae(rewards, values, mask_of("xx"), gamma=1, lam=1)
    cut = gae(rewards, values, mask_of("xx"), gamma=1, lam=1, bootstrap=0.75)
    assert ended.returns_T.tolist() == [0, 0]
    assert cut.returns_T.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("mask", ["", "..", "x"])
def test_gae_of_nothing_or_one_token_is_finite(mask: str):
    zeros = np.zeros(len(mask))
    found = gae(zeros, zeros + 0.5, mask_of(mask), gamma=1, lam=1)
    assert found.advantages_T.tolist() == [-0.5 if letter == "x" else 0 for letter in mask]


def test_a_reward_on_an_observation_is_refused_and_not_lost():
    rewards, mask = np.array([0.0, 0.0, 1.0]), mask_of("xx.")
    with pytest.raises(DataError, match="would be lost"):
        gae(rewards, np.zeros(3), mask, gamma=1, lam=1)
    with pytest.raises(DataError, match="would be lost"):
        discounted_returns(rewards, mask, gamma=1)


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ("", []),
        ("...", []),
        ("x", [(0, 1)]),
        (".xx.x", [(1, 3), (4, 5)]),
        ("x.xx", [(0, 1), (2, 4)]),
    ],
)
def test_a_turn_is_a_run_of_the_mask(mask: str, spans: list[tuple[int, int]]):
    assert [(span.start, span.stop) for span in turns(mask_of(mask))] == spans


def test_a_turns_return_is_discounted_between_turns_and_never_inside_one():
    assert segment_returns([1, 0, 4], gamma=0.5) == [2, 2, 4]
    values = step_return([1, 0, 4], mask_of(".xx.x..xxx"), gamma=0.5)
    assert values.tolist() == [0, 2, 2, 0, 2, 0, 0, 4, 4, 4]
    assert segment_returns([], gamma=0.5) == []


@exhaustive
@given(rewards=st.lists(st.floats(-5, 5), max_size=6), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_returns_agree_with_a_plain_loop(rewards: list[float], gamma: float):
    expected = [
        sum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards)))
        for now in range(len(rewards))
    ]
    assert segment_returns(rewards, gamma=gamma) == pytest.approx(expected, abs=1e-12)


def test_a_wrong_number_of_turns_is_refused():
    with pytest.raises(DataError, match="3 values for the 2 turns"):
        over_turns([1, 2, 3], mask_of("x.x"))


def norm(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(value - mean) / (std + 1e-6) for value in values]


def test_gigpo_by_hand():
    # Episode returns 1 and 0. "door" is met by both with step returns 0.5 and 0; the other
    # states once each, so they have nothing to be compared with.
    found = gigpo(
        [[0, 1], [0, 0]], [["door", "hall"], ["door", "cellar"]], gamma=0.5, step_weight=2
    )
    one, half = 0.5 / (math.sqrt(0.5) + 1e-6), 0.25 / (math.sqrt(0.125) + 1e-6)
    assert found[0] == pytest.approx([one + 2 * half, one])
    assert found[1] == pytest.approx([-one - 2 * half, -one])


@exhaustive
@given(
    steps=st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3)), max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_gigpo_agrees_with_plain_loops(steps: list[list[tuple[str, int]]]):
    rewards = [[float(reward) for _, reward in sample] for sample in steps]
    states = [[state for state, _ in sample] for sample in steps]
    found = gigpo(rewards, states, gamma=0.5, episode_weight=0.5, step_weight=2)
    episodes = norm([sum(of) for of in rewards])
    returns = [
        [sum(0.5 ** (j - i) * of[j] for j in range(i, len(of))) for i in range(len(of))]
        for of in rewards
    ]
    for sample, of_sample in enumerate(states):
        for turn, state in enumerate(of_sample):
            alike = [
                (s, t)
                for s, of in enumerate(states)
                for t, other in enumerate(of)
                if other == state
            ]
            step = norm([returns[s][t] for s, t in alike])[alike.index((sample, turn))]
            expected = 0.5 * episodes[sample] + 2 * step
            assert found[sample][turn] == pytest.approx(expected, abs=1e-9)


def test_equal_states_of_different_tasks_are_not_compared():
    # The same two keys in another task, with other returns: nothing of the first task changes.
    states = [["start"], ["start"]]
    alone = gigpo([[1.0], [0.0]], states, gamma=1)
    other = gigpo([[100.0], [50.0]], states, gamma=1)
    merged = gigpo([[1.0], [0.0], [100.0], [50.0]], states * 2, gamma=1)
    assert alone[0][0] > 0 > alone[1][0]
    assert alone[0] == pytest.approx(other[0], rel=1e-4)
    assert merged[0][0] < 0  # what the mistake would look like


@pytest.mark.parametrize(
    ("rewards", "states"),
    [([[1.0, 2.0]], [["a", "b"]]), ([[1.0], [1.0]], [["a"], ["a"]]), ([[], []], [[], []])],
    ids=["group of one", "equal", "no turns"],
)
def test_gigpo_without_anything_to_compare_is_exactly_zero(
    rewards: list[list[float]], states: list[list[str]]
):
    assert gigpo(rewards, states, gamma=1) == [[0.0] * len(of) for of in rewards]


def test_gigpo_refuses_states_that_do_not_fit_the_rewards():
    with pytest.raises(DataError, match="one state for each reward"):
        gigpo([[1.0, 2.0]], [["a"]], gamma=1)


def test_opd_is_the_teachers_log_prob_minus_the_students():
    found = opd(np.log([0.5, 0.2, 0.1]), np.log([0.25, 0.4, 0.7]), mask_of("xx."))
    assert found.tolist() == pytest.approx([math.log(2), -math.log(2), 0])


def test_opd_is_finite_whatever_the_log_probs_and_zero_outside_the_mask():
    inf = math.inf
    teacher = np.array([-inf, -1.0, -inf, math.nan, -inf])
    student = np.array([-1.0, -inf, -inf, -1.0, -1.0])
    found = opd(teacher, student, mask_of("xxx.."), limit=5)
    assert found.tolist() == [-5, 5, 0, 0, 0]


@exhaustive
@given(seed=SEEDS, limits=st.tuples(st.floats(0, 3), st.floats(0, 3)))
def test_a_wider_limit_of_opd_never_makes_an_advantage_smaller(
    seed: int, limits: tuple[float, float]
):
    teacher, student = -np.abs(numbers(seed, 5)), -np.abs(numbers(seed + 1, 5)) * 3
    narrow, wide = (
        np.abs(opd(teacher, student, mask_of("xxxxx"), limit=limit)) for limit in sorted(limits)
    )
    assert (narrow <= wide).all()
