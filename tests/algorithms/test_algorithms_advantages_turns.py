"""Advantages with a value per turn: step returns and GiGPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import mask_of, masked_group
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.objective import resolve_advantage
from rollick.algorithms.returns import turn_spans
from rollick.algorithms.turns import (
    expand_turns,
    gigpo,
    gigpo_turn_advantages,
    step_return,
    turn_returns,
    turn_rewards,
    turn_states,
)
from rollick.config.schema.advantages import GigpoAdvantage, StepReturnAdvantage
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.errors import DataError
from rollick.testing.fakes import annotated, group
from rollick.types import Annotations, Group, Score, StopReason

exhaustive = settings(derandomize=True, database=None, deadline=None, max_examples=60)
Step = tuple[str, float]
"""The state before a turn, and the reward of the turn."""
STEPS = st.tuples(st.sampled_from("abc"), st.integers(-3, 3).map(float))


def episodes(*samples: Sequence[Step] | None, uid: int = 0) -> Group:
    """One member for each list of turns, with two tokens per turn; None is a failed member."""
    masks = ["...." + "xx." * (1 if steps is None else len(steps)) for steps in samples]
    full_group = masked_group(
        [0 if steps is not None else None for steps in samples], *masks, uid=uid
    )
    members = tuple(
        member
        if steps is None
        else replace(
            member,
            sample=replace(member.sample, states=tuple(state for state, _ in steps)),
            score=Score(
                sum(reward for _, reward in steps),
                turn_rewards=tuple(reward for _, reward in steps),
            ),
        )
        for member, steps in zip(full_group.members, samples, strict=True)
    )
    return replace(full_group, members=members)


def collect_turn_values(actual: Any, groups: Sequence[Group]) -> list[list[list[float]]]:
    """The value of each turn; asserts that its tokens share it and that all other tokens are 0."""
    result: list[list[list[float]]] = []
    for row, full_group in zip(actual, groups, strict=True):
        result.append([])
        for value, member in zip(row, full_group.members, strict=True):
            mask_T = member.sample.loss_mask
            value_T = np.broadcast_to(value, mask_T.shape)
            if not member.score.ok:
                assert not value_T.any()
                result[-1].append([])
                continue
            spans = turn_spans(mask_T)
            assert not value_T[~mask_T].any()
            assert all(len(set(value_T[span].tolist())) == 1 for span in spans)
            result[-1].append([float(value_T[span.start]) for span in spans])
    return result


def compute_returns_by_loops(rewards: Sequence[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards)))
        for now in range(len(rewards))
    ]


def normalise(values: list[float]) -> list[float]:
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(value - mean) / (std + 1e-6) for value in values]


def test_a_turns_return_is_discounted_between_turns_and_never_inside_one():
    assert turn_returns([1, 0, 4], gamma=0.5) == [2, 2, 4]
    assert turn_returns([], gamma=0.5) == []
    values = expand_turns([2, 2, 4], mask_of(".xx.x..xxx"))
    assert values.tolist() == [0, 2, 2, 0, 2, 0, 0, 4, 4, 4]


def test_step_return_of_a_group_by_hand():
    full_group = episodes([("a", 1), ("b", 0), ("c", 4)], None, [("a", -2)])
    actual = step_return([full_group], StepReturnAdvantage(gamma=0.5, whiten=False))
    assert collect_turn_values(actual, [full_group]) == [[[2, 2, 4], [], [-2]]]


def test_step_returns_are_whitened_over_the_turns_of_the_batch_each_counted_once():
    # returns 1, 1 and -2 of one group and 4 of the other: mean 1, squares 9 + 9 over n - 1 = 3
    batch = [episodes([("a", 0), ("b", 1)], [("a", -2)]), episodes([("a", 4)], None, uid=1)]
    actual = collect_turn_values(step_return(batch, StepReturnAdvantage()), batch)
    std = math.sqrt(18 / 3) + 1e-6
    assert actual[0] == [pytest.approx([0, 0]), pytest.approx([-3 / std])]
    assert actual[1] == [pytest.approx([3 / std]), []]


def test_a_score_without_turns_belongs_to_the_last_one_and_a_penalty_to_its_own():
    full_group = masked_group([5], "....xx.x")
    assert turn_rewards(full_group.members[0]) == [0, 5]
    annotations = Annotations(penalty=np.array([math.inf, 0, 0, 0, 1, 1, math.nan, 0]))
    penalised = annotated(masked_group([3], "....xx.x"), annotations)
    assert turn_rewards(penalised.members[0]) == [-2, 5]


@exhaustive
@given(rewards=st.lists(st.floats(-5, 5), max_size=6), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_turn_returns_agree_with_a_plain_loop(rewards: list[float], gamma: float):
    expected = compute_returns_by_loops(rewards, gamma)
    assert turn_returns(rewards, gamma=gamma) == pytest.approx(expected, abs=1e-12)


@exhaustive
@given(
    batch=st.lists(
        st.lists(st.none() | st.lists(STEPS, min_size=1, max_size=4), min_size=1, max_size=3),
        max_size=3,
    ),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    whiten=st.booleans(),
)
def test_step_returns_of_groups_agree_with_plain_loops(
    batch: list[list[list[Step] | None]], gamma: float, whiten: bool
):
    groups = [episodes(*samples, uid=uid) for uid, samples in enumerate(batch)]
    options = StepReturnAdvantage(gamma=gamma, whiten=whiten)
    expected = [
        [
            compute_returns_by_loops([r for _, r in steps], gamma) if steps else []
            for steps in samples
        ]
        for samples in batch
    ]
    if whiten:
        flat = iter(
            normalise([x for samples in expected for sample_turns in samples for x in sample_turns])
        )
        expected = [
            [[next(flat) for _ in sample_turns] for sample_turns in samples] for samples in expected
        ]
    actual = collect_turn_values(step_return(groups, options), groups)
    for row, expected_values in zip(actual, expected, strict=True):
        assert row == [pytest.approx(values, abs=1e-9) for values in expected_values]


@pytest.mark.parametrize("advantage", ["step_return", "segment_return", "gigpo"])
@pytest.mark.parametrize(
    "full_group",
    [
        episodes([("a", 5)]),
        episodes([("a", 0.1)], [("a", 0.1)], [("a", 0.1)]),
        episodes(None, None),
        masked_group([1, 1], "....x", "....x"),
        masked_group([1, 2], "....", "...."),
    ],
    ids=["group of one", "equal", "failed", "one token", "empty mask"],
)
def test_without_anything_to_compare_all_is_exactly_zero(advantage: str, full_group: Group):
    actual = resolve_advantage(AlgorithmConfig.model_validate({"advantage": advantage}))(
        [full_group]
    )
    assert all(not np.asarray(value).any() for value in actual[0])
    truncated_members = tuple(
        replace(m, sample=replace(m.sample, stop=StopReason.LENGTH)) for m in full_group.members
    )
    truncated = replace(full_group, members=truncated_members)
    actual = resolve_advantage(AlgorithmConfig.model_validate({"advantage": advantage}))(
        [truncated]
    )
    assert all(not np.asarray(value).any() for value in actual[0])


def test_gigpo_by_hand():
    # Episode returns 1 and 0. Both visit "door", with step returns 0.5 and 0. The other states
    # are visited once, so their step advantage is 0.
    actual = gigpo_turn_advantages(
        [[0, 1], [0, 0]],
        [["door", "hall"], ["door", "cellar"]],
        GigpoAdvantage(gamma=0.5, step_weight=2),
    )
    one, half = 0.5 / (math.sqrt(0.5) + 1e-6), 0.25 / (math.sqrt(0.125) + 1e-6)
    assert actual[0] == pytest.approx([one + 2 * half, one])
    assert actual[1] == pytest.approx([-one - 2 * half, -one])


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
    actual = gigpo_turn_advantages(
        rewards, states, GigpoAdvantage(gamma=0.5, episode_weight=0.5, step_weight=2)
    )
    episodes = normalise([sum(sample_turns) for sample_turns in rewards])
    returns = [compute_returns_by_loops(sample_turns, 0.5) for sample_turns in rewards]
    for sample, sample_states in enumerate(states):
        for turn, state in enumerate(sample_states):
            equal_states = [
                (s, t)
                for s, sample_turns in enumerate(states)
                for t, other in enumerate(sample_turns)
                if other == state
            ]
            step = normalise([returns[s][t] for s, t in equal_states])[
                equal_states.index((sample, turn))
            ]
            expected = 0.5 * episodes[sample] + 2 * step
            assert actual[sample][turn] == pytest.approx(expected, abs=1e-9)


def test_equal_states_of_different_tasks_are_not_compared():
    # Another task with equal states and other returns does not change the first task.
    states, options = [["start"], ["start"]], GigpoAdvantage(gamma=1)
    alone = gigpo_turn_advantages([[1.0], [0.0]], states, options)
    other = gigpo_turn_advantages([[100.0], [50.0]], states, options)
    merged = gigpo_turn_advantages(
        [[1.0], [0.0], [100.0], [50.0]], states * 2, GigpoAdvantage(gamma=1)
    )
    assert alone[0][0] > 0 > alone[1][0]
    assert alone[0] == pytest.approx(other[0], rel=1e-4)
    assert merged[0][0] < 0  # the wrong result, if tasks are merged


@pytest.mark.parametrize(
    ("rewards", "states"),
    [([[1.0, 2.0]], [["a", "b"]]), ([[1.0], [1.0]], [["a"], ["a"]]), ([[], []], [[], []])],
    ids=["group of one", "equal", "no turns"],
)
def test_gigpo_without_anything_to_compare_is_exactly_zero(
    rewards: list[list[float]], states: list[list[str]]
):
    assert gigpo_turn_advantages(rewards, states, GigpoAdvantage(gamma=1)) == [
        [0.0] * len(sample_turns) for sample_turns in rewards
    ]


def test_gigpo_of_a_group_by_hand():
    # as in test_gigpo_by_hand, with a failed member, and another task with the same states
    full_group = episodes([("door", 0), ("hall", 1)], None, [("door", 0), ("cellar", 0)])
    other = episodes([("door", 100), ("hall", 0)], [("door", 50)], uid=1)
    options = GigpoAdvantage(gamma=0.5, step_weight=2)
    actual = collect_turn_values(gigpo([full_group, other], options), [full_group, other])
    one, half = 0.5 / (math.sqrt(0.5) + 1e-6), 0.25 / (math.sqrt(0.125) + 1e-6)
    assert actual[0][0] == pytest.approx([one + 2 * half, one])
    assert actual[0][1] == []
    assert actual[0][2] == pytest.approx([-one - 2 * half, -one])
    assert collect_turn_values(gigpo([full_group], options), [full_group]) == actual[:1]


@exhaustive
@given(
    samples=st.lists(st.none() | st.lists(STEPS, max_size=4), min_size=1, max_size=4),
    episode=st.sampled_from([0.0, 0.5]),
    step=st.sampled_from([0.0, 2.0]),
)
def test_gigpo_of_groups_agrees_with_plain_loops(
    samples: list[list[Step] | None], episode: float, step: float
):
    full_group = episodes(*samples)
    options = GigpoAdvantage(gamma=0.5, episode_weight=episode, step_weight=step)
    scored = [steps for steps in samples if steps is not None]
    totals = normalise([sum(reward for _, reward in steps) for steps in scored])
    returns = [compute_returns_by_loops([reward for _, reward in steps], 0.5) for steps in scored]
    expected: list[list[float]] = []
    for sample, steps in enumerate(scored):
        expected.append([])
        for turn, (state, _) in enumerate(steps):
            equal_states = [
                (s, t)
                for s, other in enumerate(scored)
                for t, (key, _) in enumerate(other)
                if key == state
            ]
            step_advantage = normalise([returns[s][t] for s, t in equal_states])[
                equal_states.index((sample, turn))
            ]
            expected[-1].append(episode * totals[sample] + step * step_advantage)
    known = iter(expected)
    expected_values = [[] if steps is None else next(known) for steps in samples]
    [actual] = collect_turn_values(gigpo([full_group], options), [full_group])
    assert actual == [pytest.approx(values, abs=1e-9) for values in expected_values]


@exhaustive
@given(
    samples=st.lists(st.lists(STEPS, min_size=2, max_size=2), min_size=2, max_size=4),
    shift=st.integers(-4, 4),
    factor=st.sampled_from([0.25, 4.0]),
)
def test_gigpo_of_equally_long_episodes_does_not_depend_on_shift_and_scale(
    samples: list[list[Step]], shift: int, factor: float
):
    def actual(factor: float, shift: float) -> list[float]:
        # The shift of a turn's return depends on the number of later turns. States include the turn
        # number, so that all turns that are compared have the same shift.
        full_group = episodes(
            *(
                [(f"{state}{turn}", reward * factor + shift) for turn, (state, reward) in steps]
                for steps in map(enumerate, samples)
            )
        )
        [rows] = collect_turn_values(
            gigpo([full_group], GigpoAdvantage(epsilon=1e-12)), [full_group]
        )
        return [value for turns in rows for value in turns]

    plain = actual(1, 0)
    assert actual(factor, shift) == pytest.approx(plain, abs=1e-6)
    by_group = np.array(plain).reshape(-1, 2)
    assert by_group.sum(0).tolist() == pytest.approx([0, 0], abs=1e-9)


def test_a_sample_of_one_turn_begins_in_the_state_that_its_prompt_describes():
    full_group = group([1, 0])
    assert turn_states(full_group.members[0]) == turn_states(full_group.members[1]) == ("toy/0",)
    options = GigpoAdvantage(step_weight=3)
    actual = collect_turn_values(gigpo([full_group], options), [full_group])
    one = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert actual[0] == [pytest.approx([4 * one]), pytest.approx([-4 * one])]


@pytest.mark.parametrize(
    ("states", "message"), [((), "2 turns and 0 states"), (("a",) * 3, "2 turns and 3 states")]
)
def test_gigpo_names_the_sample_that_has_no_states(states: tuple[str, ...], message: str):
    full_group = masked_group([1], "....x.x")
    [member] = full_group.members
    member = replace(member, sample=replace(member.sample, states=states))
    with pytest.raises(DataError, match=rf"sample g0.0 has {message}"):
        gigpo([replace(full_group, members=(member,))], GigpoAdvantage())


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("step_return", "gamma", 0.5),
        ("step_return", "whiten", False),
        ("step_return", "epsilon", 5.0),
        ("gigpo", "gamma", 0.5),
        ("gigpo", "episode_weight", 0.5),
        ("gigpo", "step_weight", 0.5),
        ("gigpo", "epsilon", 5.0),
    ],
)
def test_every_option_can_be_set_in_a_recipe_and_has_an_effect(
    part: str, option: str, value: object
):
    batch = [episodes([("a", 1), ("b", 1), ("c", 0)], [("a", 2)], [("b", 0), ("a", 3)])]

    def compute_values(**options: object) -> object:
        config = AlgorithmConfig.model_validate({"advantage": {"name": part, **options}})
        return collect_turn_values(resolve_advantage(config)(batch), batch)

    assert compute_values() != compute_values(**{option: value})
