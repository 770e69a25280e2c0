"""Advantages: from the scores of a group to one number per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.advantages import (
    AdvantagesAndReturns,
    dr_grpo,
    gdpo,
    grpo,
    lite_ppo,
    max_rl,
    rloo,
)
from rollick.algorithms.objective import resolve_advantage
from rollick.config.names import NAMES
from rollick.config.rules.algorithm import GROUP_ADVANTAGES
from rollick.config.schema.advantages import BaselineAdvantage, GdpoAdvantage, NormalisedAdvantage
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.schema.section import CustomPart
from rollick.errors import ConfigError
from rollick.testing.fakes import group
from rollick.types import FloatArray, Group, Score

GROUP = sorted(GROUP_ADVANTAGES)
ZERO_SUM = GROUP
SHIFT_INVARIANT = sorted(GROUP_ADVANTAGES - {"max_rl"})
SCALE_INVARIANT = sorted(GROUP_ADVANTAGES - {"dr_grpo", "rloo"})
"""Up to their epsilon."""

ScoreLists = list[list[float | None]]
NUMBER = st.integers(0, 64).map(lambda number: number / 16)
BATCHES = st.lists(
    st.lists(st.one_of(st.none(), NUMBER), min_size=1, max_size=6), min_size=1, max_size=4
)
every_group_advantage = pytest.mark.parametrize("name", GROUP)
exhaustive = settings(derandomize=True, database=None, deadline=None, max_examples=50)


def make_algorithm(advantage: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": advantage})


def make_groups(batch: ScoreLists) -> list[Group]:
    return [group(scores, uid=uid) for uid, scores in enumerate(batch)]


def compute_advantages(name: str, batch: ScoreLists) -> list[list[float]]:
    actual = resolve_advantage(make_algorithm(name))(make_groups(batch))
    return [to_floats(values) for values in actual]


def to_floats(values: Sequence[float | FloatArray | AdvantagesAndReturns]) -> list[float]:
    """The advantages of a group: one number per sample, equal for all its sampled tokens."""
    last = [value[-1] if isinstance(value, np.ndarray) else value for value in values]
    assert all(isinstance(value, float | int) for value in last)
    return [float(value) for value in last]  # pyright: ignore[reportArgumentType]


def make_group_with_parts(parts: list[dict[str, float] | None], *, uid: int = 0) -> Group:
    """A group whose members have these rewards, and their sum as score; None is a failed score."""
    plain = group(
        [None if rewards is None else sum(rewards.values()) for rewards in parts], uid=uid
    )
    members = tuple(
        member
        if rewards is None
        else replace(member, score=Score(member.score.value, parts=rewards))
        for member, rewards in zip(plain.members, parts, strict=True)
    )
    return replace(plain, members=members)


def test_dr_grpo_takes_the_group_mean_from_each_score():
    assert dr_grpo([group([1, 0, 0, 1]), group([3, 1])], BaselineAdvantage()) == [
        [0.5, -0.5, -0.5, 0.5],
        [1.0, -1.0],
    ]


def test_grpo_divides_by_the_sample_standard_deviation():
    # mean 2, squared distances 1 + 1 + 4 = 6 over n - 1 = 2: std is sqrt(3)
    [values] = grpo([group([1, 1, 4])], NormalisedAdvantage(epsilon=1e-6))
    std = math.sqrt(3) + 1e-6
    assert values == pytest.approx([-1 / std, -1 / std, 2 / std], abs=1e-15)


def test_rloo_compares_a_score_with_the_mean_of_the_others():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert rloo([group([1, 2, 6])], BaselineAdvantage(name="rloo")) == [[-3, -1.5, 4.5]]


def test_reinforce_pp_baseline_has_one_scale_for_the_full_batch():
    # centred: 1 -1 | 2 -2, mean 0, squares 10 over n - 1 = 3
    std = math.sqrt(10 / 3) + 1e-6
    actual = compute_advantages("reinforce++_baseline", [[1, -1], [6, 2]])
    assert actual[0] == pytest.approx([1 / std, -1 / std])
    assert actual[1] == pytest.approx([2 / std, -2 / std])


def test_reinforce_pp_baseline_counts_tokens_as_its_authors_do_or_samples():
    batch = [group([1, -1], texts=["a", "bcd"])]
    # By token: 1 -1 -1 -1, mean -0.5, squares 3 over n - 1 = 3.
    values = resolve_advantage(make_algorithm("reinforce++_baseline"))(batch)[0]
    short_T, long_T = (np.asarray(value) for value in values)
    assert short_T[-1:] == pytest.approx([1.5], rel=1e-5)
    assert long_T[-3:] == pytest.approx([-0.5] * 3, rel=1e-5)
    assert not short_T[:-1].any()
    assert not long_T[:-3].any()
    by_sample = make_algorithm({"name": "reinforce++_baseline", "whiten_over": "samples"})
    assert resolve_advantage(by_sample)(batch)[0] == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-5)


def test_lite_ppo_divides_by_the_deviation_of_the_batchs_scores():
    # scores 0 2 4 6: mean 3, squares 9 + 1 + 1 + 9 = 20 over 3
    std = math.sqrt(20 / 3) + 1e-6
    actual = lite_ppo([group([0, 2]), group([4, 6])], NormalisedAdvantage(name="lite_ppo"))
    assert actual[0] == pytest.approx([-1 / std, 1 / std])
    assert actual[1] == pytest.approx([-1 / std, 1 / std])


def test_max_rl_divides_by_the_group_mean_so_that_a_rare_success_weighs_more():
    assert max_rl([group([1, 0, 0, 0]), group([1, 1, 0, 0])], BaselineAdvantage(name="max_rl")) == [
        [3, -1, -1, -1],
        [1, 1, -1, -1],
    ]


def test_max_rl_refuses_negative_scores_with_their_value():
    with pytest.raises(ConfigError, match=r"group 0 has the score -0\.5"):
        max_rl([group([1, -0.5])], BaselineAdvantage(name="max_rl"))


def test_gdpo_gives_a_reward_with_little_spread_equal_weight():
    # both rewards become +-1/sqrt(2): the second wins by its weight, not by its size
    parts: list[dict[str, float] | None] = [{"long": 100, "right": 0}, {"long": 0, "right": 1}]
    options = GdpoAdvantage(weights={"long": 1, "right": 3}, epsilon=1e-12)
    [values] = gdpo([make_group_with_parts(parts)], options)
    assert values == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_gdpo_without_weights_takes_each_reward_once_and_not_the_parts_inside_a_reward():
    nested_parts: list[dict[str, float] | None] = [{"a": 1, "a/x": 0}, {"a": 0, "a/x": 0}]
    full_group = make_group_with_parts(nested_parts)
    [values] = gdpo([full_group], GdpoAdvantage())
    [expected] = grpo([group([1, 0])], NormalisedAdvantage())
    assert [v > 0 for v in to_floats(values)] == [v > 0 for v in to_floats(expected)]
    # "a/x" alone would reverse the order of the samples
    with_turns: list[dict[str, float] | None] = [{"a": 1, "a/x": 0}, {"a": 0, "a/x": 9}]
    with pytest.raises(ConfigError, match="add up to 0, and its score is 9"):
        gdpo([make_group_with_parts(with_turns)], GdpoAdvantage())
    [values] = gdpo([make_group_with_parts(with_turns)], GdpoAdvantage(weights={"a/x": 1}))
    assert to_floats(values)[0] < to_floats(values)[1]


def test_gdpo_does_not_silently_ignore_the_weights_of_a_domains_rewards():
    plain = make_group_with_parts([{"a": 1, "b": 1}, {"a": 0, "b": 1}])
    weighted_members = tuple(
        replace(member, score=replace(member.score, value=member.score.value * 0.5))
        for member in plain.members
    )
    with pytest.raises(ConfigError, match="add up to 2, and its score is 1"):
        gdpo([replace(plain, members=weighted_members)], GdpoAdvantage())


def test_gdpo_names_the_rewards_there_are_if_its_weights_name_others():
    with pytest.raises(
        ConfigError, match=r"has weights for lenght, .* have the rewards length, right"
    ):
        gdpo(
            [make_group_with_parts([{"right": 1, "length": 0}])],
            GdpoAdvantage(weights={"lenght": 1}),
        )


def test_gdpo_leaves_a_member_without_a_reward_out_of_that_rewards_statistics():
    parts: list[dict[str, float] | None] = [{"a": 1, "b": 5}, {"a": 0}, None, {"a": 1, "b": 7}]
    [values] = gdpo([make_group_with_parts(parts)], GdpoAdvantage(weights={"b": 1}))
    first, second, third, last = to_floats(values)
    assert second == pytest.approx(0)
    assert third == 0
    assert first == pytest.approx(-last) != 0


def test_gdpo_refuses_shaping_that_it_would_ignore():
    algorithm = AlgorithmConfig.model_validate({"advantage": "gdpo", "shaping": {"clip": 1}})
    with pytest.raises(ConfigError, match="uses only its parts"):
        resolve_advantage(algorithm)


@pytest.mark.parametrize(
    "name", ["grpo", "reinforce++_baseline", "lite_ppo", "gdpo", "reinforce++"]
)
def test_the_epsilon_is_taken_from_the_recipe(name: str):
    scores = [group([0, 2])]
    plain = resolve_advantage(make_algorithm({"name": name}))(scores)[0][0]
    damped = resolve_advantage(make_algorithm({"name": name, "epsilon": 5.0}))(scores)[0][0]
    assert np.abs(damped).max() < np.abs(plain).max() / 2


@every_group_advantage
@pytest.mark.parametrize("scores", [[5], [0.1, 0.1, 0.1], [1e300] * 7, [0, 0]])
def test_one_score_or_equal_scores_give_exactly_zero(name: str, scores: list[float | None]):
    assert compute_advantages(name, [scores]) == [[0.0] * len(scores)]
    assert compute_advantages(name, [scores, scores]) == [[0.0] * len(scores)] * 2


@every_group_advantage
def test_a_group_without_signal_stays_at_zero_beside_one_that_has_it(name: str):
    still, moved = compute_advantages(name, [[0.1, 0.1, 0.1], [0, 1, 0]])
    assert still == pytest.approx([0, 0, 0], abs=1e-12)
    assert moved[1] > 0


@every_group_advantage
def test_a_failed_score_is_left_out_of_the_statistics_and_gets_zero(name: str):
    [with_failure] = compute_advantages(name, [[1, None, 0, 4]])
    [without] = compute_advantages(name, [[1, 0, 4]])
    assert with_failure == [without[0], 0.0, without[1], without[2]]


@pytest.mark.parametrize("name", sorted(NAMES["advantages"]))
def test_without_valid_scores_all_is_zero_and_without_groups_there_is_nothing(name: str):
    advantage = resolve_advantage(make_algorithm(name))
    assert [np.abs(value).max() for value in advantage([group([None, None])])[0]] == [0.0, 0.0]
    assert len(advantage([])) == 0


def compute_std_by_loops(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def compute_by_loops(name: str, batch: ScoreLists) -> ScoreLists:
    """The definitions in plain Python; None for a failed score."""
    all_scores = [score for scores in batch for score in scores if score is not None]
    result: ScoreLists = []
    for scores in batch:
        scored = [score for score in scores if score is not None]
        mean = sum(scored) / len(scored) if scored else 0.0
        row: list[float | None] = []
        for score in scores:
            if score is None:
                row.append(None)
                continue
            value = score - mean
            if name in ("grpo", "gdpo"):
                value /= compute_std_by_loops(scored) + 1e-6
            if name == "rloo":
                others = sum(scored) - score
                value = score - others / (len(scored) - 1) if len(scored) > 1 else 0.0
            if name == "lite_ppo":
                value /= compute_std_by_loops(all_scores) + 1e-6
            if name == "max_rl":
                value = value / mean if mean else 0.0
            row.append(value)
        result.append(row)
    if name not in ("gdpo", "reinforce++_baseline"):
        return result
    flat = [value for row in result for value in row if value is not None]
    batch_mean, std = sum(flat) / max(len(flat), 1), compute_std_by_loops(flat) + 1e-6
    return [
        [None if value is None else (value - batch_mean) / std for value in row] for row in result
    ]


@exhaustive
@given(batch=BATCHES)
@every_group_advantage
def test_advantages_agree_with_plain_loops_and_are_finite(name: str, batch: ScoreLists):
    for actual, expected in zip(
        compute_advantages(name, batch), compute_by_loops(name, batch), strict=True
    ):
        known = [0.0 if value is None else value for value in expected]
        assert actual == pytest.approx(known, rel=1e-9, abs=1e-9)
        assert all(math.isfinite(value) for value in actual)


@exhaustive
@given(batch=BATCHES)
@pytest.mark.parametrize("name", ZERO_SUM)
def test_the_advantages_of_a_group_add_up_to_zero(name: str, batch: ScoreLists):
    for values in compute_advantages(name, batch):
        assert sum(values) == pytest.approx(0, abs=1e-9)


@exhaustive
@given(batch=BATCHES, shifts=st.lists(st.integers(-64, 64), min_size=4, max_size=4))
@pytest.mark.parametrize("name", SHIFT_INVARIANT)
def test_a_constant_added_to_a_groups_scores_does_not_matter(
    name: str, batch: ScoreLists, shifts: list[int]
):
    if name == "lite_ppo":  # its scale is that of all scores: only one shift for all is neutral
        shifts = [shifts[0]] * 4
    moved = [
        [None if score is None else score + shift for score in scores]
        for scores, shift in zip(batch, shifts, strict=False)
    ]
    for plain, shifted in zip(
        compute_advantages(name, batch), compute_advantages(name, moved), strict=True
    ):
        assert shifted == pytest.approx(plain, rel=1e-9, abs=1e-9)


@exhaustive
@given(batch=BATCHES, factor=st.sampled_from([0.25, 2.0, 1024.0]))
@every_group_advantage
def test_scaling_all_scores_scales_the_advantage_or_has_no_effect(
    name: str, batch: ScoreLists, factor: float
):
    scaled: ScoreLists = [[None if s is None else factor * s for s in scores] for scores in batch]
    scale = 1.0 if name in SCALE_INVARIANT else factor
    for plain, actual in zip(
        compute_advantages(name, batch), compute_advantages(name, scaled), strict=True
    ):
        assert actual == pytest.approx([scale * value for value in plain], rel=1e-3, abs=1e-9)


@every_group_advantage
def test_a_conversation_of_several_turns_is_compared_with_its_group_too(name: str):
    """The masks of turns do not turn "grpo" into plain REINFORCE: they change nothing."""
    plain = group([3, 1, 2], texts=["abcdef"] * 3)
    members = tuple(
        replace(member, sample=replace(member.sample, loss_mask=np.arange(10) % 3 == 1))
        for member in plain.members
    )
    by_sample = {"whiten_over": "samples"} if name == "reinforce++_baseline" else {}
    advantage = resolve_advantage(make_algorithm({"name": name, **by_sample}))
    assert advantage([replace(plain, members=members)]) == advantage([plain])
    assert sum(compute_advantages(name, [[3, 1, 2]])[0]) == pytest.approx(0)


def test_a_users_function_gets_its_options_as_a_dict(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def scaled(groups, options):\n"
        "    return [[options['by'] * s for s in g.scores] for g in groups]\n"
    )
    part = CustomPart(name="mine.py:scaled", options={"by": 10})
    advantage = resolve_advantage(AlgorithmConfig(advantage=part), base=tmp_path)
    assert advantage([group([1, 2])]) == [[10, 20]]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("[]", "returned 0 lists for 1 groups"),
        ("[[1.0]]", "returned 1 values for the 2 samples of group 7"),
        ("[[1.0, float('nan')]]", "is not finite: nan"),
        ("[[1.0, None]]", "is not finite: None"),
        ("[[1.0, 'high']]", "is 'high'"),
        ("[[1.0, [1.0, 2.0]]]", r"has the shape \(2,\), and the sample has 5 tokens"),
    ],
)
def test_a_users_function_with_an_invalid_result_gets_a_clear_error(
    tmp_path: Path, returns: str, message: str
):
    (tmp_path / "mine.py").write_text(f"def wrong(groups, options):\n    return {returns}\n")
    advantage = resolve_advantage(make_algorithm("mine.py:wrong"), base=tmp_path)
    with pytest.raises(ConfigError, match=message):
        advantage([group([1, 2], uid=7)])


def test_one_value_per_token_is_accepted(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def per_token(groups, options):\n"
        "    return [[np.arange(m.sample.length) for m in g.members] for g in groups]\n"
    )
    advantage = resolve_advantage(make_algorithm("mine.py:per_token"), base=tmp_path)
    [[first]] = advantage([group([1.0])])
    assert np.asarray(first).tolist() == [0, 1, 2, 3, 4]
