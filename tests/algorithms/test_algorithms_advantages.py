"""Advantages: scores of a group in, one number per sample out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.algorithms.advantages import dr_grpo, grpo
from rollick.algorithms.objective import resolve_advantage
from rollick.config.advantages import DrGrpoAdvantage, GrpoAdvantage
from rollick.config.schema import AlgorithmConfig
from rollick.config.section import CustomPart
from rollick.errors import ConfigError
from rollick.testing.fakes import group

SCORES = st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=1, max_size=8)


def algorithm_with(advantage: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": advantage})


def test_dr_grpo_takes_the_group_mean_from_each_score():
    assert dr_grpo([group([1, 0, 0, 1]), group([3, 1])], DrGrpoAdvantage()) == [
        [0.5, -0.5, -0.5, 0.5],
        [1.0, -1.0],
    ]


def test_grpo_divides_by_the_sample_standard_deviation():
    # mean 2, squared distances 1 + 1 + 4 = 6 over n - 1 = 2: std is sqrt(3)
    [values] = grpo([group([1, 1, 4])], GrpoAdvantage(epsilon=1e-6))
    std = math.sqrt(3) + 1e-6
    assert values == pytest.approx([-1 / std, -1 / std, 2 / std], abs=1e-15)


def test_grpo_takes_its_epsilon_from_the_recipe():
    [values] = grpo([group([0, 2])], GrpoAdvantage(epsilon=1.0))
    assert values == pytest.approx([-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)])


@pytest.mark.parametrize("name", ["dr_grpo", "grpo"])
@pytest.mark.parametrize("scores", [[5], [0.1, 0.1, 0.1], [1e300] * 7, [0, 0]])
def test_one_score_or_equal_scores_give_exactly_zero(name: str, scores: list[float]):
    assert resolve_advantage(algorithm_with(name))([group(scores)]) == [[0.0] * len(scores)]


@pytest.mark.parametrize("name", ["dr_grpo", "grpo"])
def test_a_failed_score_is_left_out_of_the_statistics_and_gets_zero(name: str):
    compute = resolve_advantage(algorithm_with(name))
    [with_failure] = compute([group([1, None, 0, 4])])
    [without] = compute([group([1, 0, 4])])
    assert with_failure == [without[0], 0.0, without[1], without[2]]


@pytest.mark.parametrize("name", ["dr_grpo", "grpo"])
def test_a_group_without_any_judgement_is_all_zero(name: str):
    assert resolve_advantage(algorithm_with(name))([group([None, None])]) == [[0.0, 0.0]]


@settings(derandomize=True, database=None, deadline=None)
@given(scores=SCORES)
@pytest.mark.parametrize("name", ["dr_grpo", "grpo"])
def test_advantages_agree_with_a_plain_loop_and_are_finite(name: str, scores: list[float | None]):
    [values] = resolve_advantage(algorithm_with(name))([group(scores)])
    judged = [score for score in scores if score is not None]
    mean = sum(judged) / len(judged) if judged else 0.0
    squares = sum((score - mean) ** 2 for score in judged)
    std = math.sqrt(squares / (len(judged) - 1)) if len(judged) > 1 else 0.0
    for score, value in zip(scores, values, strict=True):
        expected = 0.0 if score is None else score - mean
        if name == "grpo":
            expected /= std + 1e-6
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-7)


def test_no_groups_give_no_advantages():
    assert dr_grpo([], DrGrpoAdvantage()) == []


def test_a_users_function_gets_its_options_as_a_dict(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def scaled(groups, options):\n"
        "    return [[options['by'] * s for s in g.scores] for g in groups]\n"
    )
    part = CustomPart(name="mine.py:scaled", options={"by": 10})
    compute = resolve_advantage(AlgorithmConfig(advantage=part), base=tmp_path)
    assert compute([group([1, 2])]) == [[10, 20]]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("[]", "gave 0 lists for 1 groups"),
        ("[[1.0]]", "gave 1 values for group 7 of 2 samples"),
        ("[[1.0, float('nan')]]", "is not finite: nan"),
        ("[[1.0, None]]", "is not finite: None"),
        ("[[1.0, 'high']]", "is 'high'"),
        ("[[1.0, [1.0, 2.0]]]", r"has shape \(2,\), the sample has 5 tokens"),
    ],
)
def test_a_users_function_with_a_wrong_answer_is_told_so(
    tmp_path: Path, returns: str, message: str
):
    (tmp_path / "mine.py").write_text(f"def wrong(groups, options):\n    return {returns}\n")
    compute = resolve_advantage(algorithm_with("mine.py:wrong"), base=tmp_path)
    with pytest.raises(ConfigError, match=message):
        compute([group([1, 2], uid=7)])


def test_one_value_per_token_is_accepted(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def per_token(groups, options):\n"
        "    return [[np.arange(m.sample.length) for m in g.members] for g in groups]\n"
    )
    compute = resolve_advantage(algorithm_with("mine.py:per_token"), base=tmp_path)
    [[first]] = compute([group([1.0])])
    assert list(first) == [0, 1, 2, 3, 4]
