"""Sentences of a text, by rules: no model, no download, the same on every machine."""

from __future__ import annotations

import re

_ABBREVIATIONS = (
    "mr mrs ms dr prof rev hon st jr sr vs etc inc ltd co corp gen col sgt capt lt fig no vol dept "
    "approx est jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e a.m p.m u.s u.k ph.d"
)
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
"""Words that end with a dot and no sentence."""

END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+|\n\s*\n")
"""Where a sentence may end."""


def split_sentences(text: str) -> list[str]:
    """The sentences, without white space around them; a paragraph ends one in any case."""
    sentences: list[str] = []
    begun = 0
    for match in END.finditer(text):
        if match[0].startswith(".") and _goes_on(text[begun : match.start()], text[match.end() :]):
            continue
        sentences.append(text[begun : match.end()])
        begun = match.end()
    sentences.append(text[begun:])
    return [said.strip() for said in sentences if re.search(r"\w", said)]


def _goes_on(before: str, after: str) -> bool:
    """Whether a dot ends no sentence: an abbreviation, an initial, the number of a list."""
    word = before.split()[-1].lstrip("(\"'“‘[").lower() if before.split() else ""
    following = after.lstrip(" \t")
    if word in ABBREVIATIONS:
        # Some of these do end sentences; a capital after `etc.` says so, after `Dr.` it does not.
        return word not in {"etc", "a.m", "p.m", "inc", "jr", "sr"} or following[:1].islower()
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    starts_list = word.isdecimal() and before.strip().lstrip("*-# ") == word
    return is_initial or starts_list or following[:1].islower()
