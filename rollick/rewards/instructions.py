"""Instruction following: rules that a response can be checked against, without any model.

    row: instruction_id_list, kwargs --> a checker for each (CHECKERS) --> followed or not

The types, their names and their arguments are those of IFEval (Zhou et al. 2023, arXiv 2311.07911);
the checkers are written from its description. strict looks at the response as it is; loose also
accepts it without its first line, its last line, both, and without asterisks, since these often
are a greeting and markdown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rollick.rewards.answers import after_thinking
from rollick.rewards.language import is_language
from rollick.rewards.sentences import split_sentences
from rollick.types import Score

Checker = Callable[..., bool]

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
BULLET = re.compile(r"^\s*(?:\*(?!\*)|-(?!--))\s*\S.*$", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
CAPITAL_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


def instructions(
    completion: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any]],
    loose: bool = False,
    partial: bool = False,
) -> Score:
    """1.0 if the completion follows every instruction of its row, else 0.0.

    partial: the share of the instructions that it follows instead. Thoughts are left out.
    """
    if len(instruction_id_list) != len(kwargs) or not instruction_id_list:
        raise ValueError(
            f"{len(instruction_id_list)} instructions, and arguments for {len(kwargs)} of them"
        )
    response = after_thinking(completion) or ""
    followed = [
        follows(response, name, arguments, loose=loose)
        for name, arguments in zip(instruction_id_list, kwargs, strict=True)
    ]
    share = sum(followed) / len(followed)
    value = share if partial else float(share == 1.0)
    broken = [n for n, done in zip(instruction_id_list, followed, strict=True) if not done]
    detail = f"not followed: {', '.join(broken)}" if broken else ""
    return Score(value, parts={"followed": share}, detail=detail)


def follows(
    response: str, instruction: str, arguments: Mapping[str, Any], *, loose: bool = False
) -> bool:
    """Whether a response follows one instruction. An empty response follows none."""
    checker = CHECKERS.get(instruction)
    if checker is None:
        raise ValueError(f"the instruction {instruction!r} is not one of {', '.join(CHECKERS)}")
    given = {name: value for name, value in arguments.items() if value is not None}
    variants = _loosened(response) if loose else iter((response,))
    return any(variant.strip() and checker(variant, **given) for variant in variants)


def _loosened(response: str) -> Iterator[str]:
    lines = response.split("\n")
    cuts = (lines, lines[1:], lines[:-1], lines[1:-1])
    for kept in cuts:
        text = "\n".join(kept).strip()
        yield text
        yield text.replace("*", "")


def _compare(count: int, relation: str, limit: int) -> bool:
    if relation == "at least":
        return count >= limit
    if relation == "less than":
        return count < limit
    raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")


def _occurrences(text: str, phrase: str) -> int:
    return len(re.findall(re.escape(phrase.strip()), text, re.IGNORECASE))


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    """Each of them occurs, also inside of a longer word."""
    return all(_occurrences(text, keyword) for keyword in keywords)


def has_no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of them occurs as a word."""
    return not any(
        re.search(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE)
        for word in forbidden_words
    )


def has_keyword_often(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_occurrences(text, keyword), relation, frequency)


def has_letter_often(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def is_in_language(text: str, *, language: str) -> bool:
    return is_language(text, language)


def has_words(text: str, *, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def has_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return _compare(len(split_sentences(text)), relation, num_sentences)


def has_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Exactly so many, with `***` between them; only the outermost may be empty."""
    parts = [part.strip() for part in re.split(r"\*\*\*", text)]
    if any(not part for part in parts[1:-1]):
        return False
    return sum(map(bool, parts)) == num_paragraphs


def begins_paragraph_with(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """So many paragraphs, with an empty line between them, and the n-th begins with the word."""
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = re.match(r"[\W_]*([\w'’-]*)", paragraphs[nth_paragraph - 1])
    return word is not None and word[1].strip("'’-").lower() == first_word.strip().lower()


def has_placeholders(text: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """The marker begins a line or follows the text; its letters may be spaced."""
    letters = [letter for letter in postscript_marker if letter.isalpha()]
    dot = r"\.\s?" if "." in postscript_marker else ""
    begin = rf"(?<!\w)(?<!{re.escape(letters[0])}\.)"
    pattern = begin + dot.join(map(re.escape, letters)) + r"(?!\w)"
    match = re.search(pattern, text, re.IGNORECASE)
    return match is not None and bool(text[match.end() :].strip(" .:*_\n"))


def has_bullets(text: str, *, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `*` or `-`."""
    return len(BULLET.findall(text)) == num_bullets


def is_constrained(text: str) -> bool:
    return any(option in text for option in CONSTRAINED)


def has_highlights(text: str, *, num_highlights: int) -> bool:
    found = [strong or weak for strong, weak in HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in found) >= num_highlights


def has_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many, each begun by the splitter and a number, such as `Section 1`."""
    pattern = rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+(?!\w)"
    return len(re.findall(pattern, text)) >= num_sections


def is_json(text: str) -> bool:
    """All of it, but for a fence of backticks."""
    inner = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL | re.IGNORECASE)
    try:
        json.loads(inner[1] if inner else text)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def has_two_responses(text: str) -> bool:
    """Two different ones with six asterisks between them; only the outermost may be empty."""
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    said = [part for part in parts if part]
    return len(said) == 2 and said[0] != said[1]


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
    said = text.strip()
    return len(said) > 2 and said.startswith('"') and said.endswith('"')


def has_no_comma(text: str) -> bool:
    return "," not in text


CHECKERS: Mapping[str, Checker] = {
    "keywords:existence": has_keywords,
    "keywords:forbidden_words": has_no_forbidden_words,
    "keywords:frequency": has_keyword_often,
    "keywords:letter_frequency": has_letter_often,
    "language:response_language": is_in_language,
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
"""By the names that rows use."""
