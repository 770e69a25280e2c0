"""Rewards that compare the text of a completion with the column `answer`, or score its form.

The form is language, schema, pattern, tags, length and repetition; it says nothing of correctness.
`repetition` is a penalty (0 is none, -1 the worst); the others are between 0 and 1.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any, Literal, cast

from rollick.errors import MissingExtra
from rollick.rewards.answers import after_thinking, extract_answer
from rollick.rewards.call_limits import EXPENSIVE, limit_call
from rollick.rewards.scanners import find_fenced
from rollick.types import Sample

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+"
)
"""An optional sign, digits (1234 or 1,234), an optional fraction. Never evaluated as code."""

CPU_S = 0.8
"""CPU seconds that a pattern or a schema may take per completion; if it takes more, it scores 0."""
LETTER = re.compile(r"(?<![\w'’])\(?([A-Z])\)?(?![\w'’])")
"""A capital that stands alone: `B`, `(B)`, `B.`, `**B**`."""
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
INVISIBLE = re.compile(
    r"[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5"
    r"\u180b-\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff"
    r"\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff]|(?<!\w)[\u200c\u200d]|[\u200c\u200d](?!\w)"
)
"""Invisible characters: control and format characters, fillers, and joiners that are not between
two letters."""
LANGUAGE_ALIASES = {"no": "nb", "nn": "nb", "tl": "fil", "zh-cn": "zh", "zh-tw": "zh"}
"""Codes that count as the same language."""


def visible_text(text: str) -> str:
    """The text without invisible characters."""
    return INVISIBLE.sub("", text)


def exact_match(completion: str, answer: Any) -> float:
    """1.0 if the completion equals the answer, ignoring surrounding white space."""
    return float(completion.strip() == str(answer).strip())


def contains(completion: str, answer: Any) -> float:
    """1.0 if the answer occurs in the completion. An empty answer occurs nowhere."""
    expected = str(answer).strip()
    return float(bool(expected) and expected in completion)


def last_number(completion: str, answer: Any) -> float:
    """1.0 if the last number of the completion equals the last number of the answer. Compared as
    decimals: 1,000 = 1000 = 1000.0. Raises if the answer has no number."""
    expected = find_last_number(str(answer))
    if expected is None:
        raise ValueError(f"the answer {answer!r} has no number")
    return float(find_last_number(completion) == expected)


def find_last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def multiple_choice(completion: str, answer: Any, choices: Any = None) -> float:
    """1.0 if the completion chooses the answer by its letter or its text.

    answer: a letter, the index of a choice, or its text. choices: a list of texts, or a mapping of
    letters to texts; without it only letters count. Thinking is ignored; a completion that names
    two choices is wrong.
    """
    options = _read_choices(choices)
    return float(_find_choice(completion, options) == _find_answer_letter(answer, options))


def f1(completion: str, answer: Any) -> float:
    """F1 score of the completion's words and the answer's (the best answer of a list). Case,
    punctuation and articles are ignored."""
    answers = [answer] if isinstance(answer, str) or not isinstance(answer, Sequence) else answer
    if not answers:
        raise ValueError("the row has no answer")
    marked_answer = extract_answer(completion, plain=False)
    words = _split_words(marked_answer.text if marked_answer else completion)
    return max(
        _compute_f1(words, _split_words(str(each))) for each in cast("Sequence[Any]", answers)
    )


def language(completion: str, language: str) -> float:
    """1.0 if the completion is in this language, such as `de` (a column or an option)."""
    return float(is_language(completion, language))


def is_language(text: str, language: str) -> bool:
    """Whether the text is in the language of this ISO 639-1 code; False for a text without letters.
    Detected by py3langid (97 languages, small, deterministic)."""
    if not any(letter.isalpha() for letter in text):
        return False
    try:
        import py3langid
    except ImportError as error:
        raise MissingExtra.of("py3langid", "rewards") from error
    identifier: Any = py3langid
    # The detector was trained on few capitals and misdetects them.
    detected, _ = identifier.classify(_limit_accents(text).lower())
    codes = [code.lower().replace("_", "-") for code in (str(detected), language)]
    return len({LANGUAGE_ALIASES.get(code, code) for code in codes}) == 1


def json_schema(completion: str, schema: Any) -> float:
    """1.0 if the completion (or its last fenced block) is JSON that fits the schema. schema: a JSON
    Schema, as an object or as text (a column or an option); raises if it is invalid. References to
    other URLs are never followed."""
    validator = _make_validator(schema if isinstance(schema, str) else json.dumps(schema))
    response = after_thinking(completion)
    value = read_json(response) if response is not None else None
    with suppress(*EXPENSIVE), limit_call(CPU_S):
        return float(value is not None and validator.is_valid(value[0]))
    return 0.0


def regex(completion: str, pattern: str, fullmatch: bool = False) -> float:
    """1.0 if the pattern occurs in the completion; with `fullmatch`, if all of it matches. `.` also
    matches the end of a line. A completion on which the pattern backtracks too long scores 0."""
    search = re.fullmatch if fullmatch else re.search
    text = completion.strip() if fullmatch else completion
    with suppress(*EXPENSIVE), limit_call(CPU_S):
        return float(search(pattern, text, re.DOTALL) is not None)
    return 0.0


def length(
    completion: str,
    sample: Sample,
    min_length: int = 0,
    max_length: int = 0,
    unit: Literal["tokens", "words", "characters"] = "words",
    slope: int = 0,
) -> float:
    """1.0 if the completion has `min_length` to `max_length` units (0: no limit). slope: units
    outside these limits over which the value falls to 0; with 0 it is 0 immediately."""
    words, characters = len(completion.split()), len(completion)
    counts = {"tokens": sample.response_length, "words": words, "characters": characters}
    if unit not in counts:
        raise ValueError(f"the unit {unit!r} is not one of {', '.join(counts)}")
    count = counts[unit]
    excess = max(min_length - count, count - max_length if max_length else 0, 0)
    return max(0.0, 1.0 - excess / slope) if slope else float(excess == 0)


def repetition(completion: str, phrase: int = 4) -> float:
    """Minus the share of phrases (of `phrase` words) that occurred before: a penalty."""
    return -repeated_share(completion, phrase=phrase)


def repeated_share(text: str, *, phrase: int = 4) -> float:
    """Share of the phrases of `phrase` words that occurred before; 0 for a shorter text. In a text
    without spaces (Chinese, or one endless word) phrases are of characters."""
    words = text.lower().split()
    if len(words) < len(text) / 40:
        words = list(text)
    phrases = [tuple(words[n : n + phrase]) for n in range(len(words) - phrase + 1)]
    return 1.0 - len(set(phrases)) / len(phrases) if phrases else 0.0


def tags(completion: str, order: str = "think,answer", prefilled: bool = False) -> float:
    """1.0 if the completion is `<think>...</think><answer>...</answer>` and nothing else. order:
    the tags in order, each with content. prefilled: the chat template already opened the first
    tag."""
    names = [name.strip() for name in order.split(",") if name.strip()]
    if not names:
        raise ValueError("order has no tag; use one such as think,answer")
    opening_tags = [f"<{name}>" for name in names]
    closing_tags = [f"</{name}>" for name in names]
    text = (opening_tags[0] if prefilled else "") + completion.strip()
    if any(text.count(tag) != 1 for tag in (*opening_tags, *closing_tags)):
        return 0.0
    pairs = zip(opening_tags, closing_tags, strict=True)
    pattern = r"\s*".join(f"{re.escape(a)}(.+?){re.escape(b)}" for a, b in pairs)
    match = re.fullmatch(pattern, text, re.DOTALL)
    return float(match is not None and all(visible_text(inner).strip() for inner in match.groups()))


def _read_choices(choices: Any) -> dict[str, str]:
    if choices is None:
        return dict.fromkeys(string.ascii_uppercase, "")
    if isinstance(choices, Mapping):
        mapping = cast("Mapping[Any, Any]", choices)
        if set(mapping) >= {"label", "text"}:  # the form of ARC
            return dict(zip(map(str, mapping["label"]), map(str, mapping["text"]), strict=True))
        return {str(letter).strip().upper(): str(text) for letter, text in mapping.items()}
    texts = cast("Sequence[Any]", choices)
    return dict(zip(string.ascii_uppercase, map(str, texts), strict=False))


def _find_answer_letter(answer: Any, options: Mapping[str, str]) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if 0 <= answer < len(options):
            return list(options)[answer]
    else:
        text = str(answer).strip()
        letter = text.strip("().").upper()
        if letter in options:
            return letter
        for name, choice in options.items():
            if choice and _split_words(choice) == _split_words(text):
                return name
    raise ValueError(f"the answer {answer!r} is not one of the choices {', '.join(options)}")


def _find_choice(completion: str, options: Mapping[str, str]) -> str | None:
    answer = extract_answer(completion)
    if answer is None:
        return None
    text = answer.text.strip().strip("*")
    if text.strip("().: ").upper() in options:
        return text.strip("().: ").upper()
    letters = {letter for letter in LETTER.findall(text) if letter in options}
    letters -= {"I"} if len(letters) > 1 else set()  # probably the pronoun
    if len(letters) == 1:
        return letters.pop()
    words = f" {' '.join(_split_words(text))} "
    texts = {name: f" {' '.join(_split_words(each))} " for name, each in options.items() if each}
    named = [name for name, choice in texts.items() if choice == words]
    named = named or [name for name, choice in texts.items() if choice in words or choice == "  "]
    return named[0] if len(named) == 1 and not letters else None


def _split_words(text: str) -> list[str]:
    """The words in lower case, without punctuation and articles."""
    plain = unicodedata.normalize("NFKC", _limit_accents(text)).lower()
    return ARTICLES.sub(" ", plain.translate(_make_punctuation_table())).split()


def _limit_accents(text: str) -> str:
    """The text with at most 30 accents on a letter. Unicode normalisation sorts them, in quadratic
    time."""
    return _make_accents_pattern().sub(r"\1", text)


@cache
def _make_accents_pattern() -> re.Pattern[str]:
    accents = "".join(char for char in _list_characters() if unicodedata.combining(char))
    return re.compile(f"([{accents}]{{30}})[{accents}]+")


@cache
def _make_punctuation_table() -> dict[int, str]:
    """A space for each punctuation mark."""
    return {ord(char): " " for char in _list_characters() if unicodedata.category(char)[0] == "P"}


def _list_characters() -> list[str]:
    """All characters of the Unicode planes that have accents and punctuation."""
    return [chr(code) for code in range(0x20000)]


def _compute_f1(words: Sequence[str], expected: Sequence[str]) -> float:
    if not words or not expected:
        return float(list(words) == list(expected))
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected))


def read_json(text: str) -> tuple[Any] | None:
    """The JSON value of the text or of its last valid fenced block, in a tuple; None if none."""
    blocks = [strip_json_tag(block) for block in find_fenced(text)]
    for candidate in (text, *reversed(blocks)):
        try:
            return (json.loads(candidate.strip()),)
        except (ValueError, RecursionError):
            continue
    return None


def strip_json_tag(block: str) -> str:
    """A fenced block without the word `json` after its fence."""
    return block[4:] if block[:4].lower() == "json" else block


@lru_cache(maxsize=256)
def _make_validator(schema: str) -> Any:
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise MissingExtra.of("jsonschema", "rewards") from error
    parsed: Any = json.loads(schema)
    if not isinstance(parsed, Mapping | bool):
        raise ValueError(f"a JSON Schema is an object, not {schema[:60]}")
    validator: Any = validator_for(cast("Any", parsed))
    try:
        validator.check_schema(parsed)
    except SchemaError as error:
        raise ValueError(f"not a JSON Schema: {error.message}") from error
    return validator(parsed, registry=Registry())
