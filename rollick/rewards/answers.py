"""Where a completion says its answer: behind the thoughts, in a box, after `####`, in words.

    text -- after_thinking --> what is said -- find_answer --> Answer (text, how it was marked)

Only finds; what an answer means and whether two are the same is no matter here (math.py, text.py).
The last answer counts: whoever corrects himself is taken at his last word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Mark = Literal["boxed", "hashes", "phrase", "tag", "plain"]
"""How an answer is marked; `plain` is not marked at all."""

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
PHRASE = re.compile(
    r"\b(?:(?:the|my|our|final|correct)\s+)*answer\s*"
    r"(?:(?:is|are|equals|would be|will be)\b\s*:?|[:=])[\s*]*",
    re.IGNORECASE,
)
"""`the answer is`, `Final answer:`, `**Answer:** `, and so on."""
SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z\"'(]|\s*$)|\n")
INLINE_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, and how it was marked."""

    text: str
    mark: Mark


def after_thinking(text: str, *, begin: str = "<think>", end: str = "</think>") -> str | None:
    """What follows the thoughts; all of it where nobody thought; None if the thoughts never end.

    A template may have put the first tag into the prompt, so that only the last one is here.
    """
    said = text.rpartition(end)[2]
    return None if begin in said else said


def find_answer(text: str, *, plain: bool = True) -> Answer | None:
    """The last answer of a completion, by the strongest mark that it has; None if there is none.

    `plain`: without any mark the last formula counts, or else the last line.
    """
    said = after_thinking(text)
    if said is None:
        return None
    tags = TAGGED.findall(said)
    if tags:
        inner = _marked(tags[-1]) or Answer(tags[-1].strip(), "tag")
        return inner if inner.text else None
    found = _marked(said)
    if found is None and plain:
        found = _plain(said)
    return found if found is not None and found.text else None


def last_boxed(text: str) -> str | None:
    """The content of the last box whose braces are closed."""
    for match in reversed(list(BOX.finditer(text))):
        content = _until_closed(text, match.end())
        if content is not None:
            return content.strip()
    return None


def _until_closed(text: str, start: int) -> str | None:
    depth = 1
    place = start
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 1  # what follows a backslash opens and closes nothing
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return text[start:place]
        place += 1
    return None


def _marked(text: str) -> Answer | None:
    boxed = last_boxed(text)
    if boxed is not None:
        return Answer(boxed, "boxed")
    if "####" in text:
        line = text.rpartition("####")[2].strip().partition("\n")[0]
        return Answer(line.strip(), "hashes")
    phrases = list(PHRASE.finditer(text))
    if phrases:
        said = _sentence(text[phrases[-1].end() :])
        if said:
            return Answer(said, "phrase")
    return None


def _sentence(text: str) -> str:
    """The rest of the sentence. A formula is not cut: `$x = 1. 5$` has no sentence end."""
    math = INLINE_MATH.match(text)
    if math:
        return text[: math.end()] + _sentence(text[math.end() :]).rstrip(".")
    end = SENTENCE_END.search(text)
    return (text[: end.start()] if end else text).strip().strip("*").strip()


def _plain(text: str) -> Answer | None:
    formulas = list(INLINE_MATH.finditer(text))
    if formulas:
        content = next(part for part in formulas[-1].groups() if part is not None)
        return Answer(content.strip(), "plain")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Answer(lines[-1].rstrip(".").strip(), "plain") if lines else None
