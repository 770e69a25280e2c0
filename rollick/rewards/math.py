"""The reward `math`: whether the answer of a completion equals the row's answer.

    completion -- extract_answer --> text --+
                                            +-- is_same_answer --> 1.0 or 0.0
    column `answer` -- row_answer ----------+

Equal spellings and plain numbers are compared exactly here. Other answers are rewritten to LaTeX
(notation.py) and compared by math-verify. Its LaTeX grammar builds expressions without `eval`; its
parser of plain expressions, which evaluates, is never used. An answer that is too large
(magnitude.py) or takes too much CPU time or memory (call_limits.py) is wrong.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import cache
from typing import Any

from rollick.errors import MissingExtra
from rollick.rewards import notation
from rollick.rewards.answers import ExtractedAnswer, extract_answer, first_response
from rollick.rewards.call_limits import EXPENSIVE, limit_call
from rollick.rewards.claims import read_box, read_claim, read_plain
from rollick.rewards.magnitude import is_affordable, is_shallow
from rollick.rewards.notation import compact, is_prose, is_same_unit, read_number, split_unit
from rollick.rewards.text import repeated_share
from rollick.types import Score

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise MissingExtra.of("math-verify", "rewards") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)

CPU_S = 0.8
"""CPU seconds that the extraction of an answer and its comparison may take."""
MAX_ANSWER = 1000
"""Characters; a longer answer is wrong."""
MAX_EXCESS = 100
"""Characters that an expression may have beyond twice the expected one; a longer one is wrong."""

IN_BASE = re.compile(r"[0-9A-Z.]+_\{?\d+\}?")
"""A number written in another base, such as 52_8."""


def math_answer(
    completion: str,
    answer: Any,
    plain: bool = True,
    format_weight: float = 0.0,
    repetition_weight: float = 0.0,
) -> Score:
    """1.0 if the completion's answer equals the column `answer`, else 0.0.

    plain: also accept an answer without a mark (no box, no `####`, no "the answer is").
    format_weight: added to the value if the answer is marked. repetition_weight: times the share of
    repeated phrases, subtracted from the value.
    """
    expected = row_answer(str(answer))
    extracted, correct = None, False
    warm_up()
    with suppress(*EXPENSIVE), limit_call(CPU_S):  # an answer that is too expensive is wrong
        extracted = extract_answer(completion, plain=plain)
        correct = extracted is not None and is_correct(extracted, expected, completion)
    marked = extracted is not None and extracted.mark != "plain"
    parts = {"correct": float(correct)}
    if format_weight:
        parts["format"] = float(marked)
    if repetition_weight:
        parts["repetition"] = -repeated_share(completion)
    weights = {"correct": 1.0, "format": format_weight, "repetition": repetition_weight}
    value = sum(weights[name] * part for name, part in parts.items())
    detail = extracted.text if extracted else ""
    return Score(value, parts=parts if len(parts) > 1 else {}, detail=detail)


def row_answer(answer: str) -> str:
    """The answer of a row: its `####` or its box if it has one, else the full text."""
    text = answer.strip()
    if "####" in text or "\\boxed" in text:
        extracted = extract_answer(text, plain=False)
        text = extracted.text if extracted else ""
    if not text:
        raise ValueError(f"the row's answer {answer!r} is empty")
    return text


def is_correct(answer: ExtractedAnswer, expected: str, completion: str) -> bool:
    """Whether the answer, or the value that its sentence states, is the expected one."""
    if answer.mark == "plain":
        candidates = read_plain(first_response(completion) or "")
    elif answer.mark == "boxed":
        candidates = read_box(answer.text)
    else:
        candidates = read_claim(answer.text)
    return any(is_same_answer(candidate, expected) for candidate in dict.fromkeys(candidates))


@cache
def warm_up() -> None:
    """Load the modules that math-verify imports at its first calls, so that this is not part of an
    answer's CPU time."""
    pairs = [("x+\\sqrt{2}", "\\sqrt{2}+x"), ("[0,1)", "(0, \\frac{x}{2}]"), ("\\pi", "e^{2}")]
    for answer, expected in pairs:
        is_same_answer(answer, expected)


def is_same_answer(answer: str, expected: str) -> bool:
    """Whether two answers have the same meaning in any notation."""
    if len(answer) > MAX_ANSWER:
        return False
    left, right = notation.normalise(answer), notation.normalise(expected)
    if not left or not right:
        return False
    if compact(left).casefold() == compact(right).casefold():
        # Words may differ in case; x and X are two unknowns.
        return compact(left) == compact(right) or is_prose(left)
    numbers = read_number(left), read_number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0].equals(numbers[1])
    (left, unit), (right, expected_unit) = split_unit(left), split_unit(right)
    if not is_same_unit(unit, expected_unit):
        return False
    if is_prose(left) or is_prose(right) or IN_BASE.fullmatch(right) or IN_BASE.fullmatch(left):
        return False
    if len(left) > 2 * len(right) + MAX_EXCESS:
        return False
    expected_latex = notation.to_latex(right)
    parsed_answer = _parse_latex(notation.to_latex(left), expected_latex)
    parsed_expected = _parse_latex(expected_latex, expected_latex) if parsed_answer else []
    if not parsed_answer or not parsed_expected:
        return False
    return bool(verify(parsed_expected, parsed_answer, timeout_seconds=None))


def _parse_latex(latex: str, expected: str) -> list[Any]:
    """The expression of a text; empty if it has none or if it is too large to compare."""
    if not is_shallow(latex, expected):
        return []
    parsed: list[Any] = parse(
        f"${latex}$",
        extraction_config=(LatexExtractionConfig(),),
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return parsed if all(is_affordable(expression) for expression in parsed) else []
