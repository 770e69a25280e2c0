"""Calls of reward functions: arguments by name, return values, failures, weighted sums."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from rollick.errors import RewardError
from rollick.rewards.base import (
    call_reward,
    combine,
    find_signature_problems,
    part_names,
    to_score,
)
from rollick.rewards.text import contains, exact_match, find_last_number, last_number
from rollick.testing.fakes import prompt, sample
from rollick.types import Sample, Score, ScoreStatus, StopReason


def make_sample(text: str = "4", *, stop: StopReason = StopReason.STOP, **row: Any) -> Sample:
    return sample(text, of=prompt("2+2?", domain="sums", **row), stop=stop)


def test_arguments_are_taken_by_name_from_the_sample_and_its_row():
    example, received = make_sample("5", stop=StopReason.LENGTH, answer="4", level=3), []

    def reward(prompt, completion, domain, truncated, answer, *, level, row, sample):
        received.extend([prompt, completion, domain, truncated, answer, level, row, sample])
        return 1

    assert call_reward(reward, example).ok
    assert received == ["2+2?", "5", "sums", True, "4", 3, {"answer": "4", "level": 3}, example]


def test_a_column_never_shadows_a_builtin_argument():
    example = make_sample("5", completion="the column", prompt="the column")
    assert (
        call_reward(lambda completion, prompt: completion + prompt == "52+2?", example).value == 1
    )
    assert call_reward(lambda row: row["completion"] == "the column", example).value == 1
    assert call_reward(lambda **rest: rest["prompt"] == "2+2?", example).value == 1


def test_parameters_with_defaults_are_optional():
    def reward(completion: str, bonus: float = 0.5, scale: float = 1.0) -> float:
        return scale * bonus

    assert call_reward(reward, make_sample()).value == 0.5
    assert call_reward(reward, make_sample(bonus=2.0)).value == 2.0


def test_options_are_passed_by_name_and_override_columns():
    assert call_reward(lambda bonus: bonus, make_sample(bonus=2.0), {"bonus": 3.0}).value == 3


def test_double_star_gets_the_rest_of_the_row_and_of_the_options():
    received: dict[str, Any] = {}

    def reward(answer: str, **rest: Any) -> float:
        received.update(rest)
        return 0.0

    call_reward(reward, make_sample(answer="4", level=3), {"bonus": 1})
    assert received == {"level": 3, "bonus": 1}


def test_positional_only_parameters_are_filled_too():
    def reward(completion: str, answer: str, /, level: int) -> float:
        return float(completion + answer == "45") + level

    assert call_reward(reward, make_sample("4", answer="5", level=2)).value == 3


def test_a_positional_only_parameter_with_a_default_may_be_left_out():
    def reward(completion: str, bonus: float = 2.0, /) -> float:
        return bonus

    assert call_reward(reward, make_sample()).value == 2


def test_a_callable_object_is_a_reward():
    class LengthReward:
        def __call__(self, completion: str) -> int:
            return len(completion)

    assert call_reward(LengthReward(), make_sample("four")).value == 4


def test_a_missing_argument_raises_and_names_the_available_ones():
    def reward(completion: str, anwser: str) -> float:
        return 1.0

    with pytest.raises(RewardError, match="reward needs the argument 'anwser'") as caught:
        call_reward(reward, make_sample(answer="4"), {})
    assert (
        "available: prompt, completion, sample, row, domain, truncated, answer"
        in caught.value.message
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["bonsu"], "does not take the option 'bonsu'; it takes completion, bonus"),
        (["completion"], "the option 'completion' of reward is an argument that rollick fills"),
    ],
)
def test_options_that_cannot_reach_the_function_are_problems(options: list[str], problem: str):
    def reward(completion: str, bonus: float = 0.0) -> float:
        return bonus

    [actual] = find_signature_problems(reward, options=options)
    assert problem in actual


def test_a_callable_signature_has_no_problems():
    assert find_signature_problems(exact_match, columns=["answer"]) == []


def test_a_function_without_a_signature_raises():
    with pytest.raises(RewardError, match="signature of min cannot be read"):
        call_reward(min, make_sample())


async def fetch_length(completion: str) -> int:
    return len(completion)


def test_an_async_function_runs_to_completion():
    assert call_reward(fetch_length, make_sample("four")).value == 4


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
    ],
)
def test_numbers_and_bools_are_scores(answer: Any, value: float):
    assert to_score(answer) == Score(value)


@pytest.mark.parametrize(
    "answer",
    [math.nan, math.inf, -math.inf, None, "1.0", [1.0], {"value": 1.0}, 1j, np.array([1.0, 2.0])],
)
def test_any_other_return_value_is_a_failure_that_names_it(answer: Any):
    score = to_score(answer)
    assert score.status is ScoreStatus.FAILED
    assert math.isnan(score.value)
    assert score.detail.startswith(f"returned {answer!r} ({type(answer).__name__})")


def test_a_number_too_large_for_a_float_is_a_failure():
    assert "OverflowError" in call_reward(lambda: 10**400, make_sample()).detail


def test_a_score_is_kept_with_its_parts_and_detail():
    score = to_score(Score(np.float64(1.5), parts={"style": True}, detail="good"))
    assert score == Score(1.5, parts={"style": 1.0}, detail="good")


def test_a_score_with_a_bad_number_inside_is_a_failure():
    assert not to_score(Score(math.nan)).ok
    assert "part 'style'" in to_score(Score(1.0, parts={"style": math.inf})).detail


def test_a_score_keeps_its_turn_rewards():
    score = to_score(Score(1.5, turn_rewards=(np.float32(0.5), True, 0)))
    assert score.turn_rewards == (0.5, 1.0, 0.0)
    assert all(type(turn) is float for turn in score.turn_rewards)


@pytest.mark.parametrize("turns", [(0.5, math.nan), (math.inf,), (0.5, None)])
def test_a_turn_reward_that_is_not_finite_is_a_failure(turns: Any):
    score = to_score(Score(1.0, turn_rewards=turns))
    assert score.status is ScoreStatus.FAILED
    assert "not all finite numbers" in score.detail


def test_a_reward_may_return_a_failed_score():
    score = to_score(Score.failed("judge is down"))
    assert (score.status, score.detail) == (ScoreStatus.FAILED, "judge is down")


def divide(completion: str) -> float:
    return 1 / (len(completion) - 1)


@pytest.mark.parametrize(
    ("reward", "detail"),
    [
        (divide, r"ZeroDivisionError: division by zero \(test_rewards_base.py:\d+\)"),
        (lambda: exit(3), r"SystemExit: 3"),
    ],
)
def test_an_exception_is_a_failure_with_the_last_line_of_its_traceback(reward: Any, detail: str):
    score = call_reward(reward, make_sample("x"))
    assert score.status is ScoreStatus.FAILED
    assert re.match(detail, score.detail)


def test_a_long_failure_message_is_shortened():
    def reward() -> float:
        raise ValueError("x" * 10_000)

    assert len(call_reward(reward, make_sample()).detail) < 600


def test_scores_are_summed_with_their_weights_and_kept_as_parts():
    scores = {
        "correct": Score(1.0, seconds=1.0),
        "style": Score(0.5, parts={"short": 0.25}, detail="wordy", seconds=2.0),
    }
    assert combine(scores, {"correct": 2.0, "style": -1.0}) == Score(
        1.5,
        parts={"correct": 1.0, "style": 0.5, "style/short": 0.25},
        detail="style: wordy",
        seconds=3.0,
    )


def test_turn_rewards_are_weighted_and_summed_turn_by_turn():
    scores = {
        "moves": Score(3.0, turn_rewards=(1.0, 2.0)),
        "speed": Score(0.5, turn_rewards=(0.5, 0.0)),
        "goal": Score(1.0),
    }
    total = combine(scores, {"moves": 2.0, "speed": -1.0, "goal": 1.0})
    assert total.value == 6 - 0.5 + 1
    assert total.turn_rewards == (2 - 0.5, 4.0)


def test_rewards_with_different_numbers_of_turns_are_a_failure():
    scores = {
        "moves": Score(1.0, turn_rewards=(1.0, 0.0)),
        "speed": Score(1.0, turn_rewards=(1.0,)),
    }
    total = combine(scores, {"moves": 1.0, "speed": 1.0})
    assert total.status is ScoreStatus.FAILED
    assert "number of turns: moves 2, speed 1" in total.detail


def test_one_failed_reward_makes_the_score_failed_and_never_a_number():
    timed_out = Score.failed("slow", status=ScoreStatus.TIMEOUT)
    score = combine({"a": Score(1.0), "b": Score.failed("broke")}, {"a": 1, "b": 0})
    assert (score.status, score.detail, dict(score.parts)) == (ScoreStatus.FAILED, "b: broke", {})
    assert math.isnan(score.value)
    assert (
        combine({"a": timed_out, "b": Score(1.0)}, {"a": 1, "b": 1}).status is ScoreStatus.TIMEOUT
    )


def test_a_sum_that_is_not_finite_is_a_failure():
    assert not combine({"a": Score(1e308), "b": Score(1e308)}, {"a": 1, "b": 1}).ok


def test_a_reward_that_is_used_twice_gets_two_names():
    assert part_names(["a", "b", "a", "a"]) == ["a", "b", "a#2", "a#3"]


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [(" 4\n", "4", 1), ("4", 4, 1), ("4.0", "4", 0), ("five", "4", 0)],
)
def test_exact_match_ignores_white_space_around(completion: str, answer: Any, value: float):
    assert exact_match(completion, answer) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("it is Paris.", "Paris", 1), ("paris", "Paris", 0), ("anything", "", 0), ("42!", 42, 1)],
)
def test_contains_looks_for_the_answer_anywhere(completion: str, answer: Any, value: float):
    assert contains(completion, answer) == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("so 1,234,567.50 dollars", "1234567.5"),
        ("x = -5.", "-5"),
        ("10-5", "5"),
        ("1, 2", "2"),
        ("1,2", "2"),
        (".5", "0.5"),
        ("50%", "50"),
        ("$1,000", "1000"),
        ("7 by Qwen2.5", "7"),
        ("#### 12\n", "12"),
        ("007", "7"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str):
    assert find_last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none at all", "__import__('os')", "x1 v2"])
def test_a_text_without_a_number_has_none(text: str):
    assert find_last_number(text) is None


def test_last_number_compares_values_and_raises_for_an_answer_without_a_number():
    assert last_number("it is 1,000.00", "#### 1000") == 1
    assert last_number("first 4, then 5", "4") == 0
    assert last_number("no idea", "4") == 0
    assert "has no number" in call_reward(last_number, make_sample("4", answer="four")).detail
