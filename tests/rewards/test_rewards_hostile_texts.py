"""Every reward that reads text takes linear time, whatever the policy repeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rollick.rewards.answers import extract_answer
from rollick.rewards.code import extract_code
from rollick.rewards.instructions import CHECKERS, instructions
from rollick.rewards.knights_knaves import knights_knaves
from rollick.rewards.scanners import find_boxes, find_formulas, find_tagged
from rollick.rewards.text import (
    contains,
    exact_match,
    f1,
    json_schema,
    language,
    last_number,
    length,
    multiple_choice,
    regex,
    repetition,
    tags,
)
from rollick.testing.fakes import sample
from rollick.testing.hostile_texts import hostile_texts, mixed_texts

pytest.importorskip("math_verify", reason="the extra rewards is not installed")
pytest.importorskip("py3langid", reason="the extra rewards is not installed")
pytest.importorskip("reasoning_gym", reason="the extra rewards is not installed")

from rollick.rewards.math import math_answer
from rollick.rewards.reasoning_gym_scores import extract_gym_answer

LENGTH = 20_000
CPU_S = 0.2
"""Limit of the CPU time of a call; benchmarks/math_scorers.py --speed measures it. A quadratic scan
takes 1 to 60 seconds."""
ATTEMPTS = 3
"""Calls per measurement. The fastest counts, because a busy machine slows some down."""
TEXTS = hostile_texts(LENGTH)
MIXED = mixed_texts(LENGTH)
NAMES = ["Zoey", "Ian", "Ann", "Bob"]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["river", "x"]},
    "keywords:forbidden_words": {"forbidden_words": ["river", "a"]},
    "keywords:frequency": {"keyword": "a", "frequency": 3, "relation": "at least"},
    "keywords:letter_frequency": {"letter": "q", "let_frequency": 3, "let_relation": "at least"},
    "language:response_language": {"language": "de"},
    "length_constraints:number_words": {"num_words": 3, "relation": "at least"},
    "length_constraints:number_sentences": {"num_sentences": 3, "relation": "less than"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 3},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": 3,
        "nth_paragraph": 1,
        "first_word": "a",
    },
    "detectable_content:number_placeholders": {"num_placeholders": 3},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 3},
    "detectable_format:number_highlighted_sections": {"num_highlights": 3},
    "detectable_format:multiple_sections": {"section_spliter": "Section", "num_sections": 3},
    "combination:repeat_prompt": {"prompt_to_repeat": "Say it"},
    "change_case:capital_word_frequency": {"capital_frequency": 3, "capital_relation": "at least"},
    "startend:end_checker": {"end_phrase": "the end"},
}
KWARGS = [ARGUMENTS.get(name, {}) for name in CHECKERS]
REWARDS: dict[str, Callable[[str], Any]] = {
    "math": lambda text: math_answer(text, "4", repetition_weight=0.1),
    "math_of_an_expression": lambda text: math_answer(text, "\\frac{x}{2}"),
    "instructions": lambda text: instructions(text, list(CHECKERS), KWARGS, partial=True),
    "multiple_choice": lambda text: multiple_choice(text, "A", ["red one", "blue two"]),
    "exact_match": lambda text: exact_match(text, "4"),
    "contains": lambda text: contains(text, "river"),
    "last_number": lambda text: last_number(text, "4"),
    "f1": lambda text: f1(text, ["a b c", "d"]),
    "json_schema": lambda text: json_schema(text, {"type": "object"}),
    "regex": lambda text: regex(text, "a+b"),
    "length": lambda text: length(text, sample(text), max_length=5),
    "language": lambda text: language(text, "de"),
    "knights_knaves": lambda text: knights_knaves(text, NAMES, [True, False, True, False]),
    "reasoning_gym": extract_gym_answer,
    "tags": tags,
    "code": extract_code,
    "repetition": repetition,
}

BACKTRACKING = [
    "The answer is 27" + " " * 300 + "apples",
    "The answer is 27" + "\t" * 1900 + "x",
    "It is " + (" " * 40 + "he had ") * 42,
    "So he has 27 " + ("one " * 40 + ":") * 124,
    "So he has 27 (" + "a" * 1900,
    "27\n" + "\n" * 19_000 + "x",
    "<answer>27 in " + "or " * 6600 + "</answer>",
    "#### " + "27" * 9000,
    "reason: " * 2500,
    "So 27. " + "would you like " * 1300,
    "So 27. " + "9 m × 3 m = " * 1600,
]
"""A pattern with two adjacent repetitions takes 0.3 to 3 seconds on such a text."""


@pytest.mark.parametrize("name", REWARDS)
def test_no_hostile_text_is_slow_or_raises(name: str):
    reward = REWARDS[name]
    reward("warm up 4")
    slow: dict[str, float] = {}
    for kind, text in (TEXTS | MIXED).items():
        seconds = measure_cpu(reward, text)
        if seconds > CPU_S:
            slow[kind] = seconds
        if len(slow) > 3:
            break
    assert slow == {}


@pytest.mark.parametrize("text", BACKTRACKING, ids=[text[:20].strip() for text in BACKTRACKING])
def test_patterns_do_not_backtrack(text: str):
    for name in ("math", "multiple_choice", "f1"):
        REWARDS[name]("warm up 4")
        assert measure_cpu(REWARDS[name], text) < CPU_S


def measure_cpu(call: Callable[[str], Any], text: str) -> float:
    """CPU seconds of the fastest call. A call within the limit is the last one."""
    fastest = float("inf")
    for _ in range(ATTEMPTS):
        started_at = time.process_time()
        call(text)
        fastest = min(fastest, time.process_time() - started_at)
        if fastest <= CPU_S:
            break
    return fastest


def test_the_texts_have_the_length_and_end_no_mark_that_they_begin():
    assert len(TEXTS) >= 100
    assert len(MIXED) >= 90
    assert {len(text) for text in (TEXTS | MIXED).values()} == {LENGTH}


def test_the_last_complete_box_is_found_among_thousands_of_open_ones():
    text = "\\boxed{" * 9000 + "\\boxed{4} " + "\\boxed{" * 9000
    started_at = time.process_time()
    answer = extract_answer(text)
    assert answer is not None
    assert answer.text == "4"
    assert time.process_time() - started_at < CPU_S


def test_boxes_tags_and_formulas_are_found_in_one_pass():
    assert [box.content for box in find_boxes("\\boxed{a{b}\\}} \\fbox{c} \\boxed{d")] == [
        "a{b}\\}",
        "c",
    ]
    assert find_tagged("<answer>1</answer><ANSWER>2<answer>3</answer> 4</answer>", "answer") == [
        "1",
        "2<answer>3",
    ]
    text = "$a$ \\(b\\) \\[c\nd\\] $$e$$ \\$5 and $6 and $7\n\\( open $f$"
    assert [span.content for span in find_formulas(text)] == ["a", "b", "c\nd", "e", "f"]


def test_many_formulas_after_a_phrase_need_no_recursion():
    answer = extract_answer("The answer is " + "$a$" * 1500)
    assert answer is not None
    assert answer.mark == "phrase"
