"""Numbers in words: `twenty-three cookies` -> `23 cookies`."""

from __future__ import annotations

import re

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
VALUES = {
    **{word: value for value, word in enumerate(_ONES.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
}
SCALES = {"hundred": 100, "thousand": 1000}
_WORD = "|".join((*sorted(VALUES, key=len, reverse=True), *SCALES))
PHRASE = re.compile(rf"\b(?:{_WORD})(?:(?:[\s-]+|\s+and\s+)(?:{_WORD})){{0,8}}\b", re.IGNORECASE)


def words_to_digits(text: str) -> str:
    """Write the numbers of a text in digits. `one` alone stays: it is mostly a pronoun. A scale
    alone (`5 thousand`) stays, too."""
    return PHRASE.sub(_digits, text)


def _digits(match: re.Match[str]) -> str:
    words = re.findall(r"[a-z]+", match[0].lower())
    if words[0] in SCALES or words == ["one"]:
        return match[0]
    total, part = 0, 0
    for word in words:
        if word == "thousand":
            total, part = total + part * 1000, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += VALUES[word]
    return str(total + part)
