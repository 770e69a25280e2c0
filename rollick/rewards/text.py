"""Rewards that compare the text of a completion with the column `answer`."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

from rollick.rewards.answers import find_answer

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+"
)
"""An optional sign, digits (1234 or 1,234), an optional fraction. Never evaluated as code."""

LETTER = re.compile(r"(?<![\w'’])\(?([A-Z])\)?(?![\w'’])")
"""A capital that stands alone: `B`, `(B)`, `B.`, `**B**`."""
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


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


def multiple_choice(completion: str, answer: Any, choices: Any = None) -> float:
    """1.0 if the completion chooses the answer: by its letter, or by its words.

    answer: a letter, the number of a choice (from 0), or its text. choices: a list of texts, or a
    mapping of letters to texts; without it only letters count. Thoughts are left out, and one who
    names two choices has named none.
    """
    options = _options(choices)
    wanted = _wanted_letter(answer, options)
    return float(_chosen(completion, options) == wanted)


def f1(completion: str, answer: Any) -> float:
    """Overlap of the words with those of the answer (the best one of a list), from 0 to 1.

    Case, punctuation and articles do not count.
    """
    wanted = [answer] if isinstance(answer, str) or not isinstance(answer, Sequence) else answer
    if not wanted:
        raise ValueError("the row has no answer")
    marked = find_answer(completion, plain=False)
    said = _words(marked.text if marked else completion)
    return max(_overlap(said, _words(str(one))) for one in cast("Sequence[Any]", wanted))


def _options(choices: Any) -> dict[str, str]:
    if choices is None:
        return dict.fromkeys(string.ascii_uppercase, "")
    if isinstance(choices, Mapping):
        given = cast("Mapping[Any, Any]", choices)
        if set(given) >= {"label", "text"}:  # as ARC and its like have it
            return dict(zip(map(str, given["label"]), map(str, given["text"]), strict=True))
        return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
    texts = cast("Sequence[Any]", choices)
    return dict(zip(string.ascii_uppercase, map(str, texts), strict=False))


def _wanted_letter(answer: Any, options: Mapping[str, str]) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(options):
            return list(options)[answer]
    else:
        text = str(answer).strip()
        letter = text.strip("().").upper()
        if letter in options:
            return letter
        for name, words in options.items():
            if words and _words(words) == _words(text):
                return name
    raise ValueError(f"the answer {answer!r} is none of the choices {', '.join(options)}")


def _chosen(completion: str, options: Mapping[str, str]) -> str | None:
    found = find_answer(completion)
    if found is None:
        return None
    said = found.text.strip().strip("*")
    if said.strip("().: ").upper() in options:
        return said.strip("().: ").upper()
    letters = {letter for letter in LETTER.findall(said) if letter in options}
    letters -= {"I"} if len(letters) > 1 else set()  # the one who speaks, most likely
    if len(letters) == 1:
        return letters.pop()
    words = _words(said)
    named = [name for name, text in options.items() if text and _words(text) == words]
    if not letters and not named:
        inside = [name for name, text in options.items() if text and _occurs(_words(text), words)]
        named = inside if len(inside) == 1 else []
    return named[0] if len(named) == 1 and not letters else None


def _occurs(part: Sequence[str], whole: Sequence[str]) -> bool:
    size = len(part)
    return any(list(whole[n : n + size]) == list(part) for n in range(len(whole) - size + 1))


def _words(text: str) -> list[str]:
    plain = unicodedata.normalize("NFKC", text).lower()
    plain = "".join(" " if unicodedata.category(letter)[0] == "P" else letter for letter in plain)
    return ARTICLES.sub(" ", plain).split()


def _overlap(said: Sequence[str], wanted: Sequence[str]) -> float:
    if not said or not wanted:
        return float(list(said) == list(wanted))
    shared = sum((Counter(said) & Counter(wanted)).values())
    return 2 * shared / (len(said) + len(wanted))
