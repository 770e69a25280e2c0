"""An answer that is too expensive to check scores 0 within a second. Its score is not a failure."""

from __future__ import annotations

import ast
import signal
import threading
import time
from contextlib import suppress

import pytest

from rollick.config.schema import RewardSpec
from rollick.rewards.call_limits import EXPENSIVE, CallLimitExceeded, limit_call
from rollick.rewards.pool import RewardPool
from rollick.rewards.text import json_schema, regex
from rollick.testing.fakes import prompt, sample
from rollick.types import Score, ScoreStatus

pytest.importorskip("math_verify", reason="the extra rewards is not installed")

from rollick.rewards.magnitude import Unaffordable, check_code_size
from rollick.rewards.math import is_same_answer, math_answer

EXPENSIVE_ANSWERS = {
    "tower": "10^{10^{8}}",
    "tower_of_nines": "9^{9^{9^{9^{9}}}}",
    "tower_in_plain_signs": "9**9**9**9",
    "factorial": "(10^9)!",
    "factorial_of_a_factorial": "((99!)!)!",
    "binomial": "\\binom{100000000}{50000000}",
    "binomial_of_powers": "\\binom{10^9}{5 \\cdot 10^8}",
    "greatest_common_divisor": "\\gcd(10^{10^8}, 6)",
    "power_of_a_sum": "(x+1)^{100000}",
    "power_of_three_terms": "(x+y+z)^{60}",
    "high_degree": "\\frac{x^{2999}-1}{x-1}",
    "long_product": "\\prod_{i=1}^{100000} i",
    "long_sum": "\\sum_{i=1}^{10^9} i^2",
    "integral": "\\int_0^1 \\frac{x^9}{\\sin(x)+e^x}dx",
    "exponential": "e^{e^{e^{e^{e}}}}",
    "powers_in_brackets": "((10^{100})^{100})^{100}",
    "roots_in_roots": "\\sqrt{" * 60 + "x" + "+1}" * 60,
    "brackets": "(" * 400 + "x" + ")" * 400,
    "long_tuple": "(" + "1," * 300 + "1)",
    "unions": "(1,2)\\cup" * 60 + "(1,2)",
    "quotients": "1212/" * 19 + "121",
    "functions": "\\sin " * 9 + "x",
    "bars": "|x" * 40,
    "powers": "x^2" * 30,
}


@pytest.mark.parametrize("name", EXPENSIVE_ANSWERS)
@pytest.mark.timeout(60)
def test_an_expensive_answer_is_wrong_within_a_second(name: str):
    math_answer("\\boxed{x}", "\\sqrt{2}+x")
    started_at = time.process_time()
    score = math_answer(f"\\boxed{{{EXPENSIVE_ANSWERS[name]}}}", "\\sqrt{2}+x")
    assert (score.value, score.status) == (0.0, ScoreStatus.OK)
    assert time.process_time() - started_at < 1.0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("2^{2^{10}}", "2^{1024}"),
        ("10^{100}", "10^{99} \\cdot 10"),
        ("(x+1)^{5}", "(1+x)^5"),
        ("\\binom{10}{3}", "120"),
        ("\\sum_{i=1}^{10} i", "55"),
        ("20!/18!", "380"),
        ("10^{10^{8}}", "10^{10^8}"),
        ("x^{2010}", "x^{2010}"),
        (
            "+".join(f"x^{{{power}}}" for power in range(2, 16)),
            "+".join(f"x^{{{power}}}" for power in range(15, 1, -1)),
        ),
    ],
)
def test_large_but_affordable_answers_are_still_compared(answer: str, expected: str):
    assert is_same_answer(answer, expected)


async def test_expensive_answers_are_scored_by_the_pool_without_a_restart():
    specs = [RewardSpec(name="math")]
    async with RewardPool.open({"math": "math"}, processes=1, timeout_s=20) as pool:
        for name in ("tower", "binomial", "power_of_a_sum"):
            answer = sample(f"\\boxed{{{EXPENSIVE_ANSWERS[name]}}}", of=prompt(answer="4"))
            score = await pool.score(answer, specs)
            assert (score.value, score.status) == (0.0, ScoreStatus.OK)
        assert pool.stats.restarts == 0


def hang_in_c(completion: str) -> float:
    """Run C code that does not return to the interpreter for seconds."""
    try:
        with limit_call(0.05):
            return float(sum(range(10**11)) > len(completion))
    except EXPENSIVE:
        return 0.0


def return_quarter(completion: str) -> Score:
    return Score(0.25)


async def test_a_call_that_hangs_in_c_is_killed_and_failed_and_other_rewards_still_count():
    rewards = {"hangs": hang_in_c, "short": return_quarter}
    specs = [RewardSpec(name="hangs"), RewardSpec(name="short")]
    async with RewardPool.open(rewards, processes=1, timeout_s=20) as pool:
        score = await pool.score(sample("x", of=prompt(answer="4")), specs)
        assert score.status is ScoreStatus.OK
        assert score.parts == {"hangs": 0.0, "short": 0.25}
        assert "too expensive" in score.detail
        assert pool.stats.restarts == 1
        assert pool.stats.failures == 0


@pytest.mark.timeout(60)
def test_a_completion_on_which_a_pattern_backtracks_endlessly_scores_zero():
    text = "a" * 60
    started_at = time.process_time()
    assert regex(text, "(a+)+b") == 0.0
    assert json_schema(f'"{text}"', {"type": "string", "pattern": "^(a+)+$b"}) == 0.0
    assert time.process_time() - started_at < 4.0


def test_a_loop_and_a_large_allocation_raise():
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(CallLimitExceeded), limit_call(0.05):
        all(number >= 0 for number in range(10**11))
    with pytest.raises(MemoryError), limit_call(1.0):
        bytearray(2 << 30)
    assert len(bytearray(64 << 20)) == 64 << 20
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert signal.getsignal(signal.SIGVTALRM) is handler


def test_other_threads_run_without_limits():
    results: list[int] = []

    def work() -> None:
        with limit_call(0.001):
            results.append(sum(range(200_000)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [sum(range(200_000))]


@pytest.mark.parametrize(
    "code",
    ["9**9**9", "Integer(9)**Integer(9)**Integer(9)", "factorial(10**9)", "Float('1e999999')"],
)
def test_code_that_would_compute_a_huge_number_is_refused(code: str):
    with pytest.raises(Unaffordable):
        check_code_size(ast.parse(code, mode="eval").body)


def test_code_with_small_numbers_is_allowed():
    code = "Integer(2)**Integer(100) + factorial(Integer(20))/3 - Float('1.5e3')"
    assert check_code_size(ast.parse(code, mode="eval").body) < 100


@pytest.mark.timeout(30)
def test_a_limit_whose_first_exception_is_dropped_still_ends_the_call():
    def drop_first_exception() -> None:
        with suppress(BaseException):  # as Python does in a finalizer
            spin()
        spin()

    def spin() -> None:
        while True:
            pass

    with pytest.raises(CallLimitExceeded), limit_call(0.05):
        drop_first_exception()
