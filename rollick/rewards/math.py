"""Math: is the answer of a completion the same as that of the row?

    completion -- answers.find_answer --> text --+
                                                 +-- same_answer --> 1.0 or 0.0
    column `answer` -------- wanted_answer ------+

Equal spellings and plain numbers are compared here, exactly. Everything else is rewritten to LaTeX
(notation.py) and goes to math-verify, whose LaTeX grammar builds expressions without `eval`; its
reader of plain expressions, which evaluates, is never used. An expression that takes for ever is
killed with its process (pool.py), so no clock runs in here.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from rollick.errors import MissingExtra
from rollick.rewards.answers import Answer, find_answer
from rollick.rewards.notation import (
    compact,
    is_prose,
    normalise,
    read_number,
    to_latex,
    without_unit,
)
from rollick.rewards.structure import repeated_share
from rollick.types import Score

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise MissingExtra.of("math-verify", "rewards") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)

MAX_ANSWER = 1000
"""Characters of an answer; what is longer is no answer."""

IN_BASE = re.compile(r"[0-9A-Z]+_\{?\d+\}?")
"""A number written in another base, such as 52_8."""
LAST_NUMBER = re.compile(
    r"(?<![\w.])[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:/\d+)?%?"
)


def math_answer(
    completion: str,
    answer: Any,
    plain: bool = True,
    format_weight: float = 0.0,
    repetition_weight: float = 0.0,
) -> Score:
    """1.0 if the completion's answer equals the column `answer`, else 0.0.

    plain: also take an answer that nothing marks (no box, no `####`, no "the answer is").
    format_weight: added to the value where the answer is marked. repetition_weight: times the share
    of repeated phrases, taken from it.
    """
    wanted = wanted_answer(str(answer))
    said = find_answer(completion, plain=plain)
    correct = said is not None and is_right(said, wanted)
    marked = said is not None and said.mark != "plain"
    parts = {"correct": float(correct)}
    if format_weight:
        parts["format"] = float(marked)
    if repetition_weight:
        parts["repetition"] = -repeated_share(completion)
    weights = {"correct": 1.0, "format": format_weight, "repetition": repetition_weight}
    value = sum(weights[name] * part for name, part in parts.items())
    return Score(value, parts=parts if len(parts) > 1 else {}, detail=said.text if said else "")


def wanted_answer(answer: str) -> str:
    """The answer of a row: whole, or what its `####` or its box marks."""
    text = answer.strip()
    if "####" in text or "\\boxed" in text:
        found = find_answer(text, plain=False)
        text = found.text if found else ""
    if not text:
        raise ValueError(f"the row's answer {answer!r} is empty")
    return text


def is_right(said: Answer, wanted: str) -> bool:
    """Whether it is the answer; one that stands in words may be their last number."""
    if same_answer(said.text, wanted):
        return True
    if said.mark != "plain":
        return False
    numbers = [found for found in LAST_NUMBER.findall(said.text) if read_number(found) is not None]
    return bool(numbers) and same_answer(numbers[-1], wanted)


def same_answer(said: str, wanted: str) -> bool:
    """Whether two answers mean the same, however they are written."""
    if len(said) > MAX_ANSWER:
        return False
    left, right = normalise(said), normalise(wanted)
    if not left or not right:
        return False
    if compact(left).casefold() == compact(right).casefold():
        # Spellings differ in case where they are words; x and X are two unknowns.
        return compact(left) == compact(right) or is_prose(left)
    numbers = read_number(left), read_number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0].equals(numbers[1])
    left, right = without_unit(left), without_unit(right)
    if is_prose(left) or is_prose(right) or IN_BASE.fullmatch(right) or IN_BASE.fullmatch(left):
        return False
    return _verified(to_latex(left), to_latex(right))


def _verified(said: str, wanted: str) -> bool:
    config = (LatexExtractionConfig(),)
    first, second = (
        parse(
            f"${latex}$",
            extraction_config=config,
            fallback_mode="no_fallback",
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
        )
        for latex in (wanted, said)
    )
    if not first or not second:
        return False
    return bool(verify(first, second, timeout_seconds=None))
