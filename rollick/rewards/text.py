"""Rewards that compare the text of a completion with the column `answer`: 1.0 or 0.0."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+"
)
"""An optional sign, digits (1234 or 1,234), an optional fraction. Never evaluated as code."""


def exact_match(completion: str, answer: Any) -> float:
    """1.0 if the completion is the answer, apart from white space around it."""
    return float(completion.strip() == str(answer).strip())


def contains(completion: str, answer: Any) -> float:
    """1.0 if the answer occurs in the completion. An empty answer occurs nowhere."""
    wanted = str(answer).strip()
    return float(bool(wanted) and wanted in completion)


def last_number(completion: str, answer: Any) -> float:
    """1.0 if the last number of the completion equals the last number of the answer.

    Compared as decimals: 1,000 = 1000 = 1000.0. An answer without a number is an error in the
    data, not a wrong completion.
    """
    wanted = find_last_number(str(answer))
    if wanted is None:
        raise ValueError(f"the answer {answer!r} has no number")
    return float(find_last_number(completion) == wanted)


def find_last_number(text: str) -> Decimal | None:
    """The last number in the text, or None."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
