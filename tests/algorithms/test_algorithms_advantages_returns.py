"""Returns: the reward of each token, discounted, whitened over the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes import mask_of, masked_group
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.objective import resolve_advantage
from rollick.algorithms.returns import (
    discounted_returns,
    reinforce,
    reinforce_pp,
    token_rewards,
    turn_spans,
)
from rollick.config.schema.advantages import (
    ReinforceAdvantage,
    ReinforcePpAdvantage,
)
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.errors import DataError
from rollick.testing.fakes import annotated
from rollick.types import Annotations, FloatArray, Group, Score

exhaustive = settings(derandomize=True, database=None, deadline=None, max_examples=60)
MASKS = st.lists(st.booleans(), min_size=1, max_size=12)
SEEDS = st.integers(0, 10_000)
INF, NAN = math.inf, math.nan


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float64)


def to_lists(actual: object) -> list[list[list[float]]]:
    return [[np.asarray(value).tolist() for value in row] for row in actual]  # pyright: ignore


def draw_numbers(seed: int, count: int) -> FloatArray:
    return np.random.default_rng(seed).normal(size=count)


def test_reinforce_discounts_the_score_from_the_last_token_back_and_over_drawn_tokens_only():
    batch = [masked_group([8, -2], "....xx..x", "....x")]
    actual = reinforce(batch, ReinforceAdvantage(gamma=0.5))
    assert to_lists(actual) == [[[0, 0, 0, 0, 2, 4, 0, 0, 8], [0, 0, 0, 0, -2]]]


def test_reinforce_without_discount_is_the_score():
    [[values]] = reinforce([masked_group([0.1], "....xxx")], ReinforceAdvantage())
    assert np.asarray(values).tolist() == [0, 0, 0, 0, 0.1, 0.1, 0.1]


def test_whitening_counts_each_trained_token_once():
    # tokens 3 3 3 | -1: mean 2, squares 3 + 9 = 12 over n - 1 = 3
    batch = [masked_group([3, None], "....xxx", "....xxxx"), masked_group([-1], "....x.", uid=1)]
    std = 2 + 1e-6
    actual = to_lists(reinforce(batch, ReinforceAdvantage(whiten=True)))
    assert actual[0][0] == pytest.approx([0, 0, 0, 0, 1 / std, 1 / std, 1 / std])
    assert actual[0][1] == [0] * 8
    assert actual[1][0] == pytest.approx([0, 0, 0, 0, -3 / std, 0])


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
    actual = resolve_advantage(AlgorithmConfig.model_validate({"advantage": part}))(batch)
    assert all(value == 0 for row in to_lists(actual) for values in row for value in values)


def test_one_drawn_sample_per_prompt_has_an_advantage_in_the_batch():
    batch = [masked_group([1], "....x"), masked_group([0], "....x", uid=1)]
    actual = to_lists(reinforce_pp(batch, ReinforcePpAdvantage()))
    assert actual[0][0][4] == pytest.approx(1 / math.sqrt(2), rel=1e-5)
    assert actual[1][0][4] == pytest.approx(-1 / math.sqrt(2), rel=1e-5)


def test_reinforce_pp_takes_a_penalty_from_the_reward_of_its_own_token():
    # The score 7 is 10 minus the penalties 1 and 2: rewards -1, 8 -> returns 7, 8; the other sample
    # has the return 0. mean 5, squares 4 + 9 + 25
    full_group = annotated(
        masked_group([7, 0], "....x.x", "....x"),
        Annotations(penalty=floats(INF, 0, 0, 0, 1, INF, 2)),
        Annotations(penalty=np.zeros(5)),
    )
    actual = to_lists(reinforce_pp([full_group], ReinforcePpAdvantage()))
    std = math.sqrt(38 / 2) + 1e-6
    assert actual[0][0] == pytest.approx([0, 0, 0, 0, 2 / std, 0, 3 / std])
    assert actual[0][1] == pytest.approx([0, 0, 0, 0, -5 / std])


def test_the_reward_of_a_turn_is_at_its_last_token_and_the_rest_of_the_score_at_the_end():
    [member] = masked_group([10], "....xx.x.x").members
    with_turns = replace(member, score=Score(10, turn_rewards=(1, 2, 3)))
    assert token_rewards(with_turns).tolist() == [0, 0, 0, 0, 0, 1, 0, 2, 0, 3 + 4]
    annotations = Annotations(penalty=floats(INF, 0, 0, 0, 0.5, 0, NAN, 0, 0, 0.5))
    penalised = replace(
        with_turns, score=replace(with_turns.score, value=9), annotations=annotations
    )
    assert token_rewards(penalised).tolist() == [0, 0, 0, 0, -0.5, 1, 0, 2, 0, 3 + 4 - 0.5]


def test_rewards_of_other_turns_than_the_sample_has_are_refused():
    [member] = masked_group([1], "....x.x").members
    with pytest.raises(DataError, match="has 2 turns, and its score has 3 turn rewards"):
        token_rewards(replace(member, score=Score(1, turn_rewards=(1, 0, 0))))


@exhaustive
@given(mask=MASKS, seed=SEEDS, penalised=st.booleans())
def test_the_rewards_of_the_tokens_add_up_to_the_score(
    mask: list[bool], seed: int, penalised: bool
):
    text = "....x" + "".join("x" if inside else "." for inside in mask)
    [member] = masked_group([float(draw_numbers(seed, 1)[0])], text).members
    turns = tuple(
        float(x) for x in draw_numbers(seed + 1, len(turn_spans(member.sample.loss_mask)))
    )
    penalty = np.where(member.sample.loss_mask, draw_numbers(seed + 2, len(text)), INF)
    member = replace(
        member,
        score=replace(member.score, turn_rewards=turns),
        annotations=Annotations(penalty=penalty if penalised else None),
    )
    rewards = token_rewards(member)
    assert rewards.sum() == pytest.approx(member.score.value, abs=1e-9)
    assert not rewards[~member.sample.loss_mask].any()


@exhaustive
@given(mask=MASKS, seed=SEEDS, gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_returns_agree_with_a_plain_loop(mask: list[bool], seed: int, gamma: float):
    rewards = np.where(mask, draw_numbers(seed, len(mask)), 0.0)
    actual = discounted_returns(rewards, np.array(mask), gamma=gamma)
    for position, inside in enumerate(mask):
        total, discount = 0.0, 1.0
        for later in range(position, len(mask)):
            if inside and mask[later]:
                total += discount * rewards[later]
                discount *= gamma
        assert actual[position] == pytest.approx(total, abs=1e-12)


@exhaustive
@given(seed=SEEDS, shift=st.sampled_from([-5.0, 3.0]), factor=st.sampled_from([0.5, 4.0]))
def test_whitened_returns_do_not_depend_on_shift_and_scale(seed: int, shift: float, factor: float):
    scores = [float(value) for value in draw_numbers(seed, 3)]

    def whiten_returns(values: list[float]) -> list[float]:
        batch = [masked_group([*values], "....xx", "....x", "....xxx")]
        actual = to_lists(reinforce(batch, ReinforceAdvantage(whiten=True, epsilon=1e-12)))
        return [value for values_T in actual[0] for value in values_T]

    plain = whiten_returns(scores)
    moved = whiten_returns([factor * score + shift for score in scores])
    assert moved == pytest.approx(plain, abs=1e-8)
    assert sum(plain) == pytest.approx(0, abs=1e-9)


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
    assert [(span.start, span.stop) for span in turn_spans(mask_of(mask))] == spans
