"""Which language a text is in, by py3langid (97 languages, small, always the same answer)."""

from __future__ import annotations

from functools import cache
from typing import Any

from rollick.errors import MissingExtra

ALIASES = {"no": "nb", "nn": "nb", "tl": "fil", "zh-cn": "zh", "zh-tw": "zh"}
"""Codes that stand for one language here."""


def detect_language(text: str) -> str | None:
    """The ISO 639-1 code of the language; None for a text without letters."""
    if not any(letter.isalpha() for letter in text):
        return None
    # Capitals are rare in what the model has seen, and would be taken for another language.
    code, _ = _identifier().classify(text.lower())
    return str(code)


def is_language(text: str, code: str) -> bool:
    """Whether the text is in the language of this code, such as `de`."""
    found = detect_language(text)
    return found is not None and _canonical(found) == _canonical(code)


def language(completion: str, language: str) -> float:
    """1.0 if the completion is in this language, such as `de` (a column or an option)."""
    return float(is_language(completion, language))


def _canonical(code: str) -> str:
    short = code.lower().replace("_", "-")
    return ALIASES.get(short, short)


@cache
def _identifier() -> Any:
    try:
        import py3langid
    except ImportError as error:
        raise MissingExtra.of("py3langid", "rewards") from error
    return py3langid
