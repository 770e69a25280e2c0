"""Instruction following: instructions that can be checked without a model.

    row: instruction_id_list, kwargs --> a checker for each (CHECKERS) --> followed or not

Types, names and arguments are those of IFEval (Zhou et al. 2023, arXiv 2311.07911); the checkers
follow its description. Strict checks the response as it is. Loose also accepts the response without
its first line, its last line, both, or asterisks, which are often a greeting and markdown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollick.rewards.answers import after_thinking
from rollick.rewards.text import is_language, strip_json_tag, visible_text
from rollick.types import Score

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
BULLET = re.compile(r"^[^\S\n]*+(?:\*(?!\*)|-(?!--))\s*+\S.*$", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
CAPITAL_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_ABBREVIATIONS = (
    "mr mrs ms dr prof rev hon st jr sr vs etc inc ltd co corp gen col sgt capt lt fig no vol dept "
    "approx est jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e a.m p.m u.s u.k ph.d"
)
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
"""Words whose dot does not end a sentence."""
SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+(?=\s|$)|[。！？]+|\n\s*\n")
LAST_WORD = re.compile(r"(\S+)\s*$")
NEXT_LETTER = re.compile(r"[ \t]*+(.)", re.DOTALL)
MAX_WORD = 40
"""Characters before a dot that are read as its word."""


def instructions(
    completion: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any]],
    loose: bool = False,
    partial: bool = False,
) -> Score:
    """1.0 if the completion follows every instruction of its row, else 0.0. partial: score the
    share of the instructions that it follows. Thinking is ignored."""
    if len(instruction_id_list) != len(kwargs) or not instruction_id_list:
        raise ValueError(f"{len(instruction_id_list)} instructions, but kwargs for {len(kwargs)}")
    response = after_thinking(completion) or ""
    pairs = zip(instruction_id_list, kwargs, strict=True)
    followed = [follows(response, name, arguments, loose=loose) for name, arguments in pairs]
    share = sum(followed) / len(followed)
    value = share if partial else float(share == 1.0)
    failed = [name for name, done in zip(instruction_id_list, followed, strict=True) if not done]
    detail = f"not followed: {', '.join(failed)}" if failed else ""
    return Score(value, parts={"followed": share}, detail=detail)


def follows(
    response: str, instruction: str, arguments: Mapping[str, Any], *, loose: bool = False
) -> bool:
    """Whether a response follows one instruction. Invisible characters are ignored; a response of
    invisible characters only follows no instruction."""
    checker = CHECKERS.get(instruction)
    if checker is None:
        raise ValueError(f"the instruction {instruction!r} is not one of {', '.join(CHECKERS)}")
    used_arguments = {name: value for name, value in arguments.items() if value is not None}
    visible = visible_text(response)
    variants = _loose_variants(visible) if loose else iter((visible,))
    return any(variant.strip() and checker(variant, **used_arguments) for variant in variants)


def _loose_variants(response: str) -> Iterator[str]:
    lines = response.split("\n")
    for kept in (lines, lines[1:], lines[:-1], lines[1:-1]):
        text = "\n".join(kept).strip()
        yield text
        yield text.replace("*", "")


def _compare(count: int, relation: str, limit: int) -> bool:
    if relation == "at least":
        return count >= limit
    if relation == "less than":
        return count < limit
    raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")


def _count_occurrences(text: str, phrase: str) -> int:
    return len(re.findall(re.escape(phrase.strip()), text, re.IGNORECASE))


def _split_parts(text: str, separator: str) -> list[str]:
    """The parts that are not empty; none if a part between two separators is empty."""
    parts = [part.strip() for part in text.split(separator)]
    return [part for part in parts if part] if all(parts[1:-1]) else []


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    """Each occurs, also inside a longer word."""
    return all(_count_occurrences(text, keyword) for keyword in keywords)


def has_no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None occurs as a word."""
    patterns = [rf"(?<!\w){re.escape(word.strip())}(?!\w)" for word in forbidden_words]
    return not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def has_keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_count_occurrences(text, keyword), relation, frequency)


def has_letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def has_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def has_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compare(len(split_sentences(text)), relation, num_sentences)


def has_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Exactly this number, separated by `***`; only the first and last may be empty."""
    return len(_split_parts(text, "***")) == num_paragraphs


def begins_paragraph_with(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """This number of paragraphs, separated by empty lines; the n-th begins with the word."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = re.match(r"[\W_]*([\w'’-]*)", paragraphs[nth_paragraph - 1])
    return word is not None and word[1].strip("'’-").lower() == first_word.strip().lower()


def has_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """The marker is followed by text; its letters may be separated by spaces."""
    letters = [letter for letter in postscript_marker if letter.isalpha()]
    dot = r"\.\s?" if "." in postscript_marker else ""
    marker = dot.join(map(re.escape, letters))
    pattern = rf"(?<!\w)(?<!{re.escape(letters[0])}\.){marker}(?!\w)"
    match = re.search(pattern, text, re.IGNORECASE)
    return match is not None and bool(text[match.end() :].strip(" .:*_\n"))


def has_bullets(text: str, *, num_bullets: int) -> bool:
    """Exactly this number of lines that begin with `*` or `-`."""
    return len(BULLET.findall(text)) == num_bullets


def is_constrained(text: str) -> bool:
    return any(option in text for option in CONSTRAINED)


def has_highlights(text: str, *, num_highlights: int) -> bool:
    highlights = [strong or weak for strong, weak in HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in highlights) >= num_highlights


def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least this number; each begins with the splitter and a number, such as `Section 1`."""
    pattern = rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+(?!\w)"
    return len(re.findall(pattern, text)) >= num_sections


def is_json(text: str) -> bool:
    """The full text, optionally in a code fence, is JSON."""
    stripped = text.strip()
    if len(stripped) >= 6 and stripped.startswith("```") and stripped.endswith("```"):
        text = strip_json_tag(stripped[3:-3])
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def has_two_responses(text: str) -> bool:
    """Two different texts separated by six asterisks; only the first and last may be empty."""
    responses = _split_parts(text, "******")
    return len(responses) == 2 and responses[0] != responses[1]


def is_english_capitals(text: str) -> bool:
    return text.isupper() and is_language(text, "en")


def is_english_lowercase(text: str) -> bool:
    return text.islower() and is_language(text, "en")


def has_capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    capitals = [word for word in CAPITAL_WORD.findall(text) if word.isupper()]
    return _compare(len(capitals), capital_relation, capital_frequency)


def ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').strip().lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 2 and stripped.startswith('"') and stripped.endswith('"')


def has_no_comma(text: str) -> bool:
    return "," not in text


def split_sentences(text: str) -> list[str]:
    """Split by rules, without a model; the end of a paragraph always ends a sentence."""
    sentences: list[str] = []
    begin = 0
    for match in SENTENCE_END.finditer(text):
        if match[0].startswith(".") and _dot_continues(text, begin, match):
            continue
        sentences.append(text[begin : match.end()])
        begin = match.end()
    sentences.append(text[begin:])
    return [sentence.strip() for sentence in sentences if re.search(r"\w", sentence)]


def _dot_continues(text: str, begin: int, dot: re.Match[str]) -> bool:
    """Whether a dot does not end the sentence that starts at `begin`: an abbreviation, an initial,
    a list number."""
    last = LAST_WORD.search(text, max(begin, dot.start() - MAX_WORD), dot.start())
    word = last[1].lstrip("(\"'“‘[").lower() if last else ""
    following = NEXT_LETTER.match(text, dot.end())
    next_letter = following[1] if following else ""
    if word in ABBREVIATIONS:
        # Some abbreviations can end a sentence: a capital follows `etc.` only at its end.
        return word not in {"etc", "a.m", "p.m", "inc", "jr", "sr"} or next_letter.islower()
    is_initial = len(word) == 1 and word.isalpha() and word != "i"
    if is_initial or next_letter.islower():
        return True
    is_list_number = text[begin : dot.start()].strip().lstrip("*-# ") == word
    return word.isdecimal() and is_list_number


CHECKERS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": has_keywords,
    "keywords:forbidden_words": has_no_forbidden_words,
    "keywords:frequency": has_keyword_frequency,
    "keywords:letter_frequency": has_letter_frequency,
    "language:response_language": is_language,
    "length_constraints:number_words": has_words,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:nth_paragraph_first_word": begins_paragraph_with,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_constrained,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:repeat_prompt": repeats_prompt,
    "combination:two_responses": has_two_responses,
    "change_case:english_capital": is_english_capitals,
    "change_case:english_lowercase": is_english_lowercase,
    "change_case:capital_word_frequency": has_capital_words,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "punctuation:no_comma": has_no_comma,
}
"""Checkers by the names that rows use."""
