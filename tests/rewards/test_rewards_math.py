"""Math answers: tables of equal and different answers, extraction, and expensive input."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from rollick.config.schema import RewardSpec
from rollick.rewards.answers import (
    ExtractedAnswer,
    after_thinking,
    extract_answer,
    first_response,
)
from rollick.rewards.pool import RewardPool
from rollick.testing.fakes import prompt, sample
from rollick.types import Score, ScoreStatus

pytest.importorskip("math_verify", reason="the extra rewards is not installed")

from rollick.rewards.math import is_same_answer, math_answer

DATA = Path(__file__).parents[3] / "shared" / "data"

EQUAL = [
    # answer, expected: numbers
    ("42", "42"),
    ("42.", "42"),
    ("42.0", "42"),
    ("042", "42"),
    ("+42", "42"),
    ("-7", "−7"),
    ("1,000", "1000"),
    ("1,234,567", "1234567"),
    ("10,\\!080", "10080"),
    ("11,\\! 111,\\! 111,\\! 100", "11111111100"),
    ("$18.90", "18.9"),
    ("\\$18.90", "18.90"),
    ("\\$32,\\!348", "32348"),
    (".5", "0.5"),
    ("0.5", "1/2"),
    ("1/2", "\\frac{1}{2}"),
    ("\\frac12", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\tfrac{1}{2}"),
    ("\\frac 34", "3/4"),
    ("\\frac9{19}", "9/19"),
    ("-\\frac{3}{8}", "-3/8"),
    ("\\frac{-3}{8}", "-\\frac{3}{8}"),
    ("\\frac{3}{-8}", "-\\frac{3}{8}"),
    ("6/8", "3/4"),
    ("1\\frac{4}{5}", "9/5"),
    ("1 4/5", "1.8"),
    ("137 \\frac{1}{2}", "137.5"),
    ("½", "0.5"),
    ("50%", "50\\%"),
    ("50%", "0.5"),
    ("50", "50\\%"),
    ("50 percent", "50%"),
    ("1e3", "1000"),
    ("2\\,173", "2173"),
    ("5 million", "5000000"),
    ("\\approx 12", "12"),
    ("5 m", "5 metres"),
    ("3 \\times 10^{4}", "30000"),
    ("6.72 \\times 10^{-5}", ".0000672"),
    ("$42$", "42"),
    ("\\(42\\)", "42"),
    ("**42**", "42"),
    ("42 apples", "42"),
    ("9", "9 (apples)"),
    ("9 apples", "9 (apples)"),
    ("9 pieces of fruit", "9 (apples)"),
    ("5 cm", "5"),
    ("5 cm", "5 centimeters"),
    ("12 square units", "12"),
    ("864", "864 \\mbox{ inches}^2"),
    ("5.4", "5.4 \\text{ cents}"),
    ("15", "15\\mbox{ cm}^2"),
    ("90", "90^\\circ"),
    ("90 degrees", "90^{\\circ}"),
    ("90°", "90^\\circ"),
    ("270/7", "\\frac{270}7\\text{ degrees}"),
    # roots, pi, powers
    ("\\sqrt{51}", "\\sqrt{51}"),
    ("sqrt(51)", "\\sqrt{51}"),
    ("√51", "\\sqrt{51}"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("3*sqrt(13)", "3\\sqrt{13}"),
    ("\\sqrt{117}", "3\\sqrt{13}"),
    ("\\frac{1}{\\sqrt{3}}", "\\frac{\\sqrt{3}}{3}"),
    ("\\frac{\\sqrt{3}}{3}", "1/sqrt(3)"),
    ("pi", "\\pi"),
    ("π", "\\pi"),
    ("2π", "2\\pi"),
    ("2*pi", "2\\pi"),
    ("18 + 2\\pi", "2\\pi+18"),
    ("288\\pi", "288 \\pi"),
    ("8\\pi \\text{ cm}", "8\\pi"),
    ("20000/\\pi", "\\frac{20000}{\\pi}"),
    ("2^{10}", "1024"),
    ("2**10", "1024"),
    ("2^10", "1024"),
    ("5!", "120"),
    ("\\ln e", "1"),
    ("11 + 11\\sqrt{5}", "11 \\sqrt{5} + 11"),
    ("\\sqrt{12}", "2\\sqrt{3}"),
    ("\\sqrt[3]{8}", "2"),
    # algebra
    ("2k+2", "2(k+1)"),
    ("2*k + 2", "2k+2"),
    ("p - q", "-q + p"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(x+1)**2", "x^2+2x+1"),
    ("x**12", "x^{12}"),
    ("x^12", "x^{12}"),
    ("5r^5", "5r^{5}"),
    ("6r^2-4r-24", "-24 - 4r + 6r^2"),
    ("(a+5)(b+2)", "(b+2)(a+5)"),
    ("\\frac{11+9a}{20}", "(9a+11)/20"),
    ("x^3 + 3x - 6", "x^3+3x-6"),
    ("3R^2", "3 R^2"),
    ("ab", "ba"),
    ("\\frac{x+y}{2}", "\\frac{x}{2}+\\frac{y}{2}"),
    ("cot x", "\\cot x"),
    ("\\sin^2 x + \\cos^2 x", "1"),
    # equations
    ("x=5", "5"),
    ("5", "x=5"),
    ("x = 5", "x=5"),
    ("y = 2x + 3", "y=3+2x"),
    ("y = -2x", "y=-2x"),
    ("5x - 7y + 11z + 4 = 0", "5x-7y+11z=-4"),
    # complex
    ("6 - 5i", "6-5i"),
    ("-5i + 6", "6 - 5i"),
    ("1+274i", "1 + 274 i"),
    # sets, tuples, intervals
    ("1,-2", "-2,1"),
    ("3, 5, 7", "7, 5, 3"),
    ("1 and -2", "1,-2"),
    ("\\{1, 2\\}", "\\{2, 1\\}"),
    ("(3, \\frac{\\pi}{2})", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("(6, 31, -1)", "(6,31,-1)"),
    ("(15,-29)", "\\left(15, -29\\right)"),
    ("(0.5, 2)", "\\left(\\frac{1}{2}, 2\\right)"),
    ("(3,4]", "(3, 4]"),
    ("(-\\infty, 0]", "(-\\infty,0]"),
    ("(-inf, 0]", "(-\\infty,0]"),
    ("(2,12) U (12,102)", "(2,12) \\cup (12,102)"),
    ("[-2,7]", "x \\in [-2,7]"),
    ("x \\in [-2, 7]", "[-2,7]"),
    ("1 \\pm \\sqrt{19}", "1 \\pm \\sqrt{19}"),
    ("1 ± √19", "1 \\pm \\sqrt{19}"),
    # matrices
    (
        "\\begin{pmatrix} -2 \\\\ -14 \\\\ -7 \\end{pmatrix}",
        "\\begin{pmatrix}-2\\\\-14\\\\-7\\end{pmatrix}",
    ),
    (
        "\\begin{pmatrix} 0.2 \\\\ -3.6 \\end{pmatrix}",
        "\\begin{pmatrix} 1/5 \\\\ -18/5 \\end{pmatrix}",
    ),
    # words and letters
    ("Evelyn", "\\text{Evelyn}"),
    ("evelyn", "\\text{Evelyn}"),
    ("\\text{east}", "east"),
    ("even", "\\text{even}"),
    ("C", "\\text{(C)}"),
    ("(C)", "C"),
    ("No", "no"),
    # other bases
    ("52_8", "52_{8}"),
    ("4210_5", "4210_{5}"),
]
DIFFERENT = [
    ("41", "42"),
    ("-42", "42"),
    ("4.2", "42"),
    ("42.1", "42"),
    ("420", "42"),
    ("1,000", "1"),
    ("1000", "10000"),
    ("0.33", "1/3"),
    ("0.333333", "1/3"),
    ("3.14", "\\pi"),
    ("22/7", "\\pi"),
    ("2/1", "1/2"),
    ("1/4", "1/2"),
    ("1 4/5", "14/5"),
    ("50%", "5"),
    ("5%", "0.5"),
    ("5 cents", "5 dollars"),
    ("5 cents", "$5"),
    ("5 cm", "5 m and 1"),
    ("5 cm", "5 meters"),
    ("5 am", "5 pm"),
    ("5 million", "5"),
    ("5 km", "5 m"),
    ("5 m^2", "5 m"),
    ("4 or 5", "4"),
    ("4 or 5", "5"),
    ("4, 5", "4"),
    ("4 and 5", "5"),
    ("1, 2, 3, 4, 5", "3"),
    ("between 1 and 10", "10"),
    ("\\sqrt{50}", "\\sqrt{51}"),
    ("2\\sqrt{13}", "3\\sqrt{13}"),
    ("\\sqrt{2}", "2"),
    ("1.41421", "\\sqrt{2}"),
    ("\\pi", "2\\pi"),
    ("2^{9}", "1024"),
    ("x^2+2x", "(x+1)^2"),
    ("2k", "2k+2"),
    ("p+q", "p-q"),
    ("x", "y"),
    ("x", "X"),
    ("x^12", "x^{1}2"),
    ("x=5", "x=6"),
    ("6", "x=5"),
    ("y=2x+3", "y=2x-3"),
    ("6+5i", "6-5i"),
    ("6", "6-5i"),
    ("(1,2)", "(2,1)"),
    ("(1,2,3)", "(1,2)"),
    ("1,-2", "1,2"),
    ("1", "1,-2"),
    ("(3,4]", "[3,4]"),
    ("(3,4)", "(3,4]"),
    ("(-\\infty,0]", "(-\\infty,0)"),
    ("(2,12)", "(2,12) \\cup (12,102)"),
    ("1 + \\sqrt{19}", "1 \\pm \\sqrt{19}"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 2 \\\\ 1 \\end{pmatrix}"),
    ("seat", "east"),
    ("odd", "even"),
    ("Navin", "Evelyn"),
    ("B", "C"),
    ("yes", "no"),
    ("52", "52_8"),
    ("42", "52_8"),
    ("52_9", "52_8"),
    ("", "42"),
    ("the answer", "42"),
    ("I do not know", "42"),
    ("\\boxed{}", "42"),
    ("42" * 600, "42"),
    ("\\frac{1}{0}", "0"),
    ("1/0", "1"),
    ("nan", "0"),
    ("\\infty", "42"),
    ("{{{{", "1"),
    ("\\frac{1}{", "1"),
    ("x" * 500, "x"),
]


@pytest.mark.parametrize(("answer", "expected"), EQUAL)
def test_equivalent_answers_are_equal(answer: str, expected: str):
    assert is_same_answer(answer, expected)


@pytest.mark.parametrize(("answer", "expected"), DIFFERENT)
def test_different_answers_are_not_equal(answer: str, expected: str):
    assert not is_same_answer(answer, expected)


def test_the_table_has_at_least_150_pairs():
    assert len({*EQUAL, *DIFFERENT}) == len(EQUAL) + len(DIFFERENT) >= 150


MARKED = [
    ("So it is \\boxed{42}.", "42", "boxed"),
    ("First \\boxed{1}, no: \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", "boxed"),
    ("\\fbox{7}", "7", "boxed"),
    ("\\boxed{\\text{a \\} b}}", "\\text{a \\} b}", "boxed"),
    ("\\boxed{1} and an open \\boxed{2", "1", "boxed"),
    ("We add.\n#### 72", "72", "hashes"),
    ("The answer is 42.", "42", "phrase"),
    ("the answer is: $\\frac{3}{4}$.", "$\\frac{3}{4}$", "phrase"),
    ("**Final Answer:** 12 apples. I hope it is right.", "12 apples", "phrase"),
    ("The answer is 3. Wait. The answer is 4.", "4", "phrase"),
    ("Answer: 3.5 metres", "3.5 metres", "phrase"),
    ("<think>It is 3.</think><answer>5</answer>", "5", "tag"),
    ("<answer>so \\boxed{6}</answer>", "6", "boxed"),
    ("<think>\\boxed{1}</think>The answer is 2", "2", "phrase"),
    ("We get $x = 4$", "x = 4", "plain"),
    ("First line\n17", "17", "plain"),
]


@pytest.mark.parametrize(("text", "answer", "mark"), MARKED)
def test_the_last_answer_is_found_by_its_strongest_mark(text: str, answer: str, mark: str):
    assert extract_answer(text) == ExtractedAnswer(answer, mark)  # pyright: ignore[reportArgumentType]


def test_a_response_ends_where_the_next_question_begins():
    assert first_response("Q: 1 + 1?\nA: 2\nQ: 2 + 2?\nA: 4") == "Q: 1 + 1?\nA: 2\n"
    assert first_response("Question: a\nQuestion: b\n") == "Question: a\nQuestion: b\n"
    assert first_response("<think>1</think>#### 7<eos>#### 8") == "#### 7"


class EndlessText(str):
    """A text that takes forever to scan."""

    def rpartition(self, separator: str) -> tuple[str, str, str]:
        while True:
            pass


@pytest.mark.timeout(30)
def test_an_answer_that_takes_too_long_to_extract_is_wrong():
    assert math_answer(EndlessText("4"), "4").value == 0


def test_thinking_is_not_an_answer():
    assert after_thinking("<think>a</think>b") == "b"
    assert after_thinking("a</think>b") == "b"  # the chat template opened the tag
    assert after_thinking("<think>the answer is 4") is None
    assert math_answer("<think>the answer is 4", "4").value == 0
    assert math_answer("<think>\\boxed{4}</think> \\boxed{5}", "4").value == 0


def test_without_plain_only_marked_answers_count():
    assert math_answer("It is 42", "42").value == 1
    assert math_answer("It is 42", "42", plain=False).value == 0
    assert math_answer("#### 42", "42", plain=False).value == 1


def test_the_number_of_a_sentence_counts_only_without_a_mark():
    assert math_answer("Then there are 7 apples and 42 pears", "42").value == 1
    assert math_answer("Then there are 42 apples and 7 pears", "42").value == 0
    assert math_answer("The answer is 7 or 42", "42").value == 0


def test_the_answer_of_a_gsm8k_row_follows_its_hashes():
    assert math_answer("\\boxed{72}", "She sold 48/2 = <<48/2=24>>24.\n#### 72").value == 1


def test_format_and_repetition_are_parts_if_they_have_a_weight():
    marked = math_answer("\\boxed{4}", "4", format_weight=0.5)
    assert (marked.value, marked.parts) == (1.5, {"correct": 1.0, "format": 1.0})
    wrong = math_answer("it is 5", "4", format_weight=0.5)
    assert (wrong.value, wrong.parts) == (0.0, {"correct": 0.0, "format": 0.0})
    repetitive = "a b c d " * 10 + "\\boxed{4}"
    score = math_answer(repetitive, "4", repetition_weight=1.0)
    assert score.parts["repetition"] == pytest.approx(-(1 - 5 / 38))
    assert score.value == pytest.approx(1 + score.parts["repetition"])
    assert math_answer("\\boxed{4}", "4").parts == {}


def test_a_row_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        math_answer("4", "  ")


def make_random_answer(rng: random.Random) -> str:
    """Make a text of LaTeX fragments, digits and noise in random order."""
    fragments = [
        *"0123456789+-*/^_(){}[]$\\.,;:!?<>=|&%#@~` \n\t'\"xyzeipABC√π∞±×½éß中🙂\x00\u202e\ud7ff",
        *("\\frac", "\\sqrt", "\\boxed{", "\\text{", "\\left(", "\\right)", "\\pi", "\\cdot"),
        *("\\begin{pmatrix}", "\\end{pmatrix}", "\\\\", "\\infty", "\\cup", "\\in", "\\pm"),
        *("the answer is ", "####", "<think>", "</think>", "<answer>", "</answer>", "^{", "_{"),
        *("sqrt(", "log", "sin", "1/0", "1e9", "10^{", "\\int", "\\sum_{i=1}^{", "\\lim", "!"),
    ]
    return "".join(rng.choice(fragments) for _ in range(rng.randint(1, 14)))


def check_random_answers(seed: int, count: int) -> None:
    rng = random.Random(seed)
    answers = ["4", "\\frac{1}{2}", "x+1", "(1,2)", "Evelyn", "[0,1)"]
    values = [math_answer(make_random_answer(rng), rng.choice(answers)).value for _ in range(count)]
    assert set(values) <= {0.0, 1.0}


def test_three_hundred_random_answers_crash_nothing():
    check_random_answers(seed=7, count=300)


@pytest.mark.slow
def test_ten_thousand_random_answers_crash_nothing():
    check_random_answers(seed=8, count=10_000)


@pytest.mark.skipif(not DATA.exists(), reason="the shared datasets are not here")
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_answer_of_math500_equals_itself_and_not_the_next_one(every: int):
    rows = [json.loads(line) for line in (DATA / "math500.jsonl").open()][::every]
    answers = [row["answer"] for row in rows]
    wrong = [a for a in answers if math_answer(f"Thus \\boxed{{{a}}}.", a).value != 1]
    assert wrong == []
    distinct = list(dict.fromkeys(answers))
    assert [pair for pair in pairwise(distinct) if is_same_answer(*pair)] == []


async def score_in_pool(expression: str, *, timeout_s: float) -> Score:
    """Score the expression in a pool, and check that the pool can still score a plain answer."""
    spec = [RewardSpec(name="math")]
    async with RewardPool.open({"math": "math"}, processes=1, timeout_s=timeout_s) as pool:
        answer = sample(f"\\boxed{{{expression}}}", of=prompt(answer="\\sqrt{2}+x"))
        score = await pool.score(answer, spec)
        plain_score = await pool.score(sample("\\boxed{4}", of=prompt(answer=4)), spec)
        assert plain_score.value == 1.0
    return score


EXPENSIVE_EXPRESSIONS = {
    "a_tower_in_plain_signs": "9**9**9**9",
    "a_factorial_of_a_factorial": "((99!)!)!",
    "roots_in_roots": "\\sqrt{" * 60 + "x" + "+1}" * 60,
    "a_thousand_brackets": "(" * 400 + "x" + ")" * 400,
    "more_digits_than_python_reads": "9" * 900,
}


ALWAYS_TESTED = ("a_tower_in_plain_signs", "a_thousand_brackets")
"""The expressions that the fast tests score; the others are slow tests."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS_TESTED else pytest.param(name, marks=pytest.mark.slow)
        for name in EXPENSIVE_EXPRESSIONS
    ],
)
async def test_an_expensive_expression_is_wrong_and_does_not_affect_others(name: str):
    score = await score_in_pool(EXPENSIVE_EXPRESSIONS[name], timeout_s=10.0)
    assert (score.status, score.value) == (ScoreStatus.OK, 0.0)
