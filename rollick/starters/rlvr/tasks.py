"""Rows of three domains for a small instruct model: math, code, instructions.

The rows are deterministic, so a resumed run has the same ones. Every fifth row is held out. Replace
these functions with your own, or name files in the recipe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
Rows = list[Row]

HELD_OUT_EVERY = 5
TOPICS = (
    "the sea", "bread", "winter", "a bicycle", "the moon", "tea", "a garden", "trains", "music",
    "a cat", "rain", "chess", "the desert", "honey", "a library", "mountains", "coffee", "birds",
    "a market", "snow", "a river", "the forest", "a clock", "fire", "a bridge", "stars", "a horse",
    "paper", "glass", "the wind", "soup", "a lamp", "shoes", "a farm", "school", "the sky", "dogs",
    "a boat", "trees", "salt", "a window", "stones", "a letter", "the night", "flowers", "a hat",
    "spring", "a castle", "milk", "a drum", "the city", "sand", "a mirror", "games", "an island",
    "wool", "bees", "a road", "ice", "pictures",
)  # fmt: skip
RULES: tuple[tuple[str, str, Row], ...] = (
    (
        "Answer with exactly 2 bullet points, each on its own line beginning with * .",
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
    ),
    ("Put your whole answer in double quotation marks.", "startend:quotation", {}),
    (
        "At the end add a postscript that begins with P.S.",
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
    ),
    (
        "Mark at least 2 words with asterisks, *like this*.",
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
    ),
    (
        "Write at least 3 words in capital letters.",
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": "at least"},
    ),
)


def math() -> Rows:
    """Sums of two numbers."""
    return _training(_math())


def held_out_math() -> Rows:
    return _held_out(_math())


def code() -> Rows:
    """One-line functions, with test calls."""
    return _training(_code())


def held_out_code() -> Rows:
    return _held_out(_code())


def instructions() -> Rows:
    """A sentence on a topic, with a rule that can be checked."""
    return _training(_instructions())


def held_out_instructions() -> Rows:
    return _held_out(_instructions())


def _math() -> Iterator[Row]:
    pairs = [(a, b) for a in range(1, 50) for b in range(1, 50)]
    random.Random(1).shuffle(pairs)
    for a, b in pairs[:1000]:
        yield {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)}


FUNCTIONS: tuple[tuple[str, Callable[[Any, int], Any], tuple[Any, ...]], ...] = (
    ("the square of x, plus {k}", lambda x, k: x * x + k, (0, 5, -3)),
    ("True if x is larger than {k}, else False", lambda x, k: x > k, (0, 7, 123)),
    ("the larger one of x and {k}", lambda x, k: max(x, k), (0, 7, 123)),
    ("the largest item of the list x, minus {k}", lambda x, k: max(x) - k, ([1, 5, 2], [80])),
    ("the distance between x and {k}", lambda x, k: abs(x - k), (0, 7, 123)),
    ("True if x is divisible by {k}, else False", lambda x, k: x % k == 0, (0, 7, 60, 437)),
    ("the sum of the list x, plus {k}", lambda x, k: sum(x) + k, ([1, 2, 3], [])),
    ("x divided by {k}, rounded down", lambda x, k: x // k, (0, 7, 123)),
)


def _code() -> Iterator[Row]:
    tasks = [(*function, k) for function in FUNCTIONS for k in range(2, 62)]
    random.Random(2).shuffle(tasks)
    for description, solve, inputs, k in tasks:
        prompt = f"Write a Python function f(x) that returns {description.format(k=k)}."
        calls = [{"entry": "f", "args": [x], "expected": solve(x, k)} for x in inputs]
        yield {"prompt": f"{prompt} Reply with the code only.", "calls": calls}


def _instructions() -> Iterator[Row]:
    tasks = [(topic, rule) for topic in TOPICS for rule in RULES]
    random.Random(3).shuffle(tasks)
    for topic, (rule, name, arguments) in tasks:
        yield {
            "prompt": f"Write one short sentence about {topic}. {rule}",
            "instruction_id_list": [name],
            "kwargs": [arguments],
        }


def _training(rows: Iterator[Row]) -> Rows:
    return [row for number, row in enumerate(rows) if number % HELD_OUT_EVERY]


def _held_out(rows: Iterator[Row]) -> Rows:
    return [row for number, row in enumerate(rows) if not number % HELD_OUT_EVERY]
