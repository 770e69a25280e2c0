"""Extracts the final answer of a completion: a box, `####`, "the answer is", or an <answer> tag.

    text -- after_thinking --> response -- extract_answer --> ExtractedAnswer (text, mark)

Only extracts; claims.py finds the value that a sentence states, math.py and text.py compare
answers. If a completion has several, the last one counts.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from rollick.rewards.scanners import (
    Span,
    find_boxes,
    find_formulas,
    find_tagged,
    matches_outside_formulas,
)

Mark = Literal["boxed", "hashes", "phrase", "tag", "plain"]
"""How an answer is marked; `plain` has no mark."""

PHRASE = re.compile(
    r"""(?: (?:\b|(?<=_))answers?\b
        (?: (?:\s+(?:to|for|of)\b[^.:?!\n]{0,80}?)?
            \s+(?:is|are|equals|(?:would|will|must|should)\s+be|comes\s+out\s+to)\b
          | [*_"']{0,2}(?:\s*[:=]|\s[-–—]\s)
        )
      | ^[#*_ \t]{0,8}(?:(?:the|my|final)[ \t]+){0,2}answer[*_ \t]{0,4}$
    )(?:[\s:=}]|(?<=\n)>|[*_]++(?=[\s:=]|$))*+""",
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)
"""`the answer is`, `Final answer:`, `**Answer:** `, a heading `Answer`, and so on."""
NO_CLAIM_BEFORE = re.compile(
    r"(?:\b(?:if|whether|suppose|assum\w+|doubt|unlikely|unless|not\s+sure)"
    r"|(?:not|n['’]t)\s+(?:think|believe))\b"
    r"(?:(?!\b(?:so|then|thus|hence|therefore)\b)[^.!?])*$",
    re.IGNORECASE,
)
NO_CLAIM = re.compile(
    r"(?:(?:clearly|definitely|certainly|probably|surely)\s+)?(?:not|never)\b(?!.*\bbut\b)"
)
RETRACTION = re.compile(
    r"\W*(?:(?:no|wait|correction|sorry|hmm)\b|actually,?\s+(?:no|it|that)\b)", re.IGNORECASE
)
HESITATION = re.compile(
    r"""(?:^|[.!?\n])[\s*>-]{0,12}(?:but\s+)?
    (?:wait|hmm+|oops|no|sorry|actually|hold\s+on|my\s+mistake|apologies|i\s+apologi[sz]e|on\s+second\s+thought)\b""",
    re.IGNORECASE | re.VERBOSE,
)
MISTAKE = re.compile(
    r"""\b(?:not\s+(?:right|correct)|wrong|incorrect|mistake|error|redo|recalculate|start\s+over
    |try\s+again|forgot|misread|should\s+(?:be|have))\b|n['’]t\s+(?:be\s+)?(?:right|correct)\b""",
    re.IGNORECASE | re.VERBOSE,
)
MAX_RETRACTION = 120
"""Characters between a hesitation and the mistake that it announces."""
OTHER_QUESTION = re.compile(
    r"\W*(?:but|however)\b[^.!?\n]{0,60}\b(?:question|problem|asks?|asked|need|want)\b",
    re.IGNORECASE,
)
NEXT_QUESTION = re.compile(
    r"""^[ \t#*]{0,12}(?:q|question|problem|exercise|instruction|human|user)
        [ \t]{0,4}[0-9]{0,4}\*{0,2}[ \t]{0,4}[:.)]
      | ^[ \t]{0,12}\#{1,4}[ \t]*(?:instruction|input|question|problem|exercise|example)\b
      | <\|[a-z_]{1,30}\|> | </s> | <eos> | <end_of_turn>""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""Where a model that does not stop begins something new."""
LABEL = re.compile(r"[#*_> \t]*answer[*_ \t]*[:\n]", re.IGNORECASE)
"""`Answer:` at the beginning of a line."""
COMPUTES = re.compile(r"(?<![0-9.,])[0-9][0-9.,]*+(?:\s?[-+*/×÷−–x]\s?\$?[0-9][0-9.,]*+)++\s?=")
AMOUNT = re.compile(r"[0-9][0-9.,]*+")
CONCLUDES = re.compile(
    r"\b(?:so(?!\s+(?:that|far|many|much)\b)|therefore|thus|hence|altogether|finally|left|remains?"
    r"|in\s+(?:total|all))\b",
    re.IGNORECASE,
)
EXPLAINS = re.compile(
    r"\b(?:check|verif|explanation|explained|reason|because|since|proof|justif|note\b)",
    re.IGNORECASE,
)
"""Begins what explains or checks the answer before it."""
DIGIT = re.compile(r"\d")
SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z\"'(]|\s*$)|\n")
JOINED_BOXES = re.compile(r"[\s$,]*(?:,|\band\b)[\s$,]*(?:and\b)?[\s$]*")
MAX_PHRASES = 20
"""Phrases that are tried, from the last one."""
MAX_SENTENCE = 2000
"""Characters of a sentence that are read."""


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    text: str
    mark: Mark


def after_thinking(text: str) -> str | None:
    """The text after the thinking; all of it without thinking; None if the thinking does not end.
    If the chat template has put the begin tag into the prompt, only the end tag is here."""
    response = text.rpartition("</think>")[2]
    return None if "<think>" in response else response


def first_response(text: str) -> str | None:
    """What follows the thinking, up to where the model asks itself a next question; None if the
    thinking does not end."""
    response = after_thinking(text)
    if response is None:
        return None
    # A question that is repeated before the answer begins nothing new.
    digit = DIGIT.search(response)
    following = NEXT_QUESTION.search(response, digit.end()) if digit else None
    return response[: following.start()] if following else response


def extract_answer(text: str, *, plain: bool = True) -> ExtractedAnswer | None:
    """The last answer of a completion, by the strongest mark that it has; None without an answer.
    `plain`: without a mark, take the last formula or else the last line."""
    response = first_response(text)
    if response is None:
        return None
    tags = find_tagged(response, "answer")
    if tags:
        inner = _find_marked(tags[-1]) or ExtractedAnswer(tags[-1].strip(), "tag")
        return inner if inner.text else None
    answer = _find_marked(response) or (_find_plain(response) if plain else None)
    return answer if answer is not None and answer.text else None


def _find_marked(text: str) -> ExtractedAnswer | None:
    boxes = find_boxes(text)
    if boxes and find_retractions(text, boxes[-1].end):
        return None
    if boxes:
        return ExtractedAnswer(_join_boxes(text, boxes), "boxed")
    _, hashes, after = text.rpartition("####")
    if hashes:
        line, _, later = after.strip().partition("\n")
        line = line.strip()
        if find_retractions(f"\n{later}"):
            return None
        if not PHRASE.search(line):
            return ExtractedAnswer(line, "hashes")
    for phrase in reversed(list(PHRASE.finditer(text))[-MAX_PHRASES:]):
        sentence = read_sentence_after(text, phrase)
        if sentence:
            return ExtractedAnswer(sentence, "phrase")
    return None


def find_retractions(text: str, begin: int = 0) -> list[int]:
    """Where the text takes back the answer before it: `Wait, that's not right.`"""
    mistakes = [match.start() for match in MISTAKE.finditer(text, begin)]
    if not mistakes:
        return []
    retractions: list[int] = []
    for match in HESITATION.finditer(text, begin):
        index = bisect_left(mistakes, match.end())
        mistake = mistakes[index] if index < len(mistakes) else len(text)
        is_near = mistake < len(text) and mistake - match.end() <= MAX_RETRACTION
        if is_near and "\n" not in text[match.end() : mistake]:
            retractions.append(match.start())
    return retractions


def _join_boxes(text: str, boxes: list[Span]) -> str:
    """The content of the last box, or of the last boxes if only `and` or a comma separates them."""
    contents = [boxes[-1].content.strip()]
    for box, following in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        between = text[box.end : following.start]
        if len(between) > 20 or not JOINED_BOXES.fullmatch(between):
            break
        contents.append(box.content.strip())
    return ", ".join(dict.fromkeys(reversed(contents)))


def read_sentence_after(text: str, phrase: re.Match[str]) -> str:
    """The rest of the sentence after a phrase; empty if the sentence does not state it: a question,
    a condition, a denial, a claim that the next sentence takes back, or the first step of a
    solution."""
    begin = phrase.end()
    following = text[begin : begin + MAX_SENTENCE]
    sentence, end = _rest_of_sentence(following)
    is_question = following[end : end + 1] == "?"
    before = text[max(0, phrase.start() - 80) : phrase.start()].rpartition("\n")[2]
    is_condition = "would" in phrase[0].lower() and re.search(r"\bif\b", sentence)
    is_denied = NO_CLAIM_BEFORE.search(before) or NO_CLAIM.match(sentence.lstrip("*_"))
    if is_question or is_condition or is_denied:
        return ""
    rest = following[end + 1 :]
    if _begins_solution(before + phrase[0], sentence, rest):
        return ""
    takes_back = RETRACTION.match(rest) or OTHER_QUESTION.match(rest)
    is_corrected = takes_back and any(letter.isdigit() for letter in rest)
    if is_corrected or 0 in find_retractions(f"\n{rest[:200].lstrip()}"):
        return ""
    return sentence.strip("\"', }") if '"' in phrase[0] else sentence


def _begins_solution(label: str, sentence: str, rest: str) -> bool:
    """Whether `Answer:` is the heading of a solution: a statement, and later in the same paragraph
    a calculation with its value, or with a conclusion: `Answer: He had 30. 30 - 3 = 27.`"""
    if not LABEL.match(label):
        return False
    steps = EXPLAINS.split(rest.partition("\n\n")[0], maxsplit=1)[0]
    calculations = list(COMPUTES.finditer(steps))
    if not calculations or not sentence[:1].isalpha() or "=" in sentence:
        return False
    values = _find_amounts(sentence)
    if any(values & _find_amounts(calculation[0]) for calculation in calculations):
        return True
    last = SENTENCE_END.split(steps[: calculations[-1].start()])[-1]
    is_concluded = CONCLUDES.search(last + steps[calculations[-1].start() :])
    return bool(values and is_concluded)


def _find_amounts(text: str) -> set[str]:
    return {match[0].replace(",", "").rstrip(".") for match in AMOUNT.finditer(text)}


def _rest_of_sentence(text: str) -> tuple[str, int]:
    """The text up to the end of the sentence, and where that is."""
    stop = next(matches_outside_formulas(SENTENCE_END, text), None)
    end = stop.start() if stop else len(text)
    sentence = text[:end].strip()
    inner = sentence.strip("*").strip()
    return sentence if "*" in inner else inner, end


def _find_plain(text: str) -> ExtractedAnswer | None:
    formulas = find_formulas(text)
    if formulas:
        return ExtractedAnswer(formulas[-1].content.strip(), "plain")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ExtractedAnswer(lines[-1].rstrip(".").strip(), "plain") if lines else None
