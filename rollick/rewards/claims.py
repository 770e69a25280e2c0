"""Finds the value that a sentence states as its answer.

    "about 27 apples, not 30"              -- trim_claim ------> "27 apples"
    "He had $30 and now has $27 left."     -- stated_values ---> ["$30", "$27"]
    "It is not 27."                        -- stated_values ---> []

A value that a sentence denies, bounds, or only considers ("not 27", "more than 27", "if it were
27", "27 or 30") is not stated. Nothing is computed or compared here.
"""

from __future__ import annotations

import re

from rollick.rewards.answers import MAX_SENTENCE, PHRASE, find_retractions
from rollick.rewards.claim_patterns import (
    ADJUNCT,
    ALIGNED,
    ALTERNATIVE,
    APPOSITION,
    ASIDE,
    ASKS,
    ATTRIBUTE,
    BETWEEN_SCRIPTS,
    BOLD_TAG,
    CALCULATION,
    CLAUSE,
    CLOSING_EMPHASIS,
    CONCLUDES,
    CONDITION,
    COPULA,
    CORRECTED,
    DENIAL,
    DENIED_AFTER,
    EARLIER,
    EMPHASIS,
    EQUATION,
    EXPLANATION,
    GIVEN,
    GLUED,
    HINT,
    INSTRUCTION,
    IS_ANSWER,
    IS_FINISHED,
    JOINED,
    KNOWN,
    LEAD,
    NAME,
    NO_ANSWER,
    NO_INFORMATION,
    NOT_STATED,
    NUMBER,
    OFFER,
    OPENING,
    OPERAND,
    OPERATOR,
    PARENTHESES,
    POINT,
    QUANTITY_OF,
    RELATION,
    REMARK,
    RESIDUE,
    RESTATED,
    RESULT,
    SCALE,
    SENTENCE,
    STATEMENT,
    SUPPOSITION,
    TAIL,
    TAKES_BACK,
    THEREFORE,
    UNFINISHED,
    UNIT,
    UNKNOWN,
    UNSOLVED,
    VALUE_FIRST,
)
from rollick.rewards.notation import normalise, read_number, unit_name
from rollick.rewards.number_words import words_to_digits
from rollick.rewards.scanners import Span, collapse_spaces, find_formulas

MAX_LINES = 4
"""Lines at the end of a completion that are read."""
MAX_NUMBERS = 12
"""Numbers of a sentence that are read, from the last one."""


def trim_claim(text: str) -> str | None:
    """The value at the head of "the answer is ...": without leading adverbs and the explanation
    after it. None if the sentence denies the value."""
    text = LEAD.sub("", text[:MAX_SENTENCE], count=1) if LEAD.match(text) else text
    corrected = CORRECTED.match(text)
    if corrected:
        text = text[corrected.end() :]
    if DENIAL.match(text):
        return None
    formulas = find_formulas(text)
    for tail in TAIL.finditer(text):
        if any(formula.start < tail.start() < formula.end for formula in formulas):
            continue
        return None if TAKES_BACK.search(text[tail.start() :]) else text[: tail.start()].strip()
    return text.strip()


def read_claim(text: str) -> list[str]:
    """What the text after "the answer is" may state: all of it, the value at its head, or the value
    of a statement such as "that she has 27 apples"."""
    text = collapse_spaces(text[:MAX_SENTENCE])
    text = CALCULATION.sub("", text)
    text = CLOSING_EMPHASIS.sub("", EMPHASIS.sub(r"\2", text))
    if text.endswith(")") and text.count("(") < text.count(")"):  # `(Answer: 27)`
        text = text[:-1]
    candidates = [text, trim_claim(text)]
    digits = RESTATED.sub(r"\1\2", words_to_digits(text))
    if digits != text:
        candidates.append(trim_claim(digits))
    formulas = find_formulas(text)
    if formulas and formulas[0].start == 0:  # `$27$ square units`
        candidates.append(trim_claim(formulas[0].content + text[formulas[0].end :]))
    is_sentence = STATEMENT.match(text) or (text[:1].isupper() and " " in text)
    if is_sentence and not text.endswith("?"):
        candidates += stated_values(text)[-1:]
    candidates += _right_side(candidates[1] or "")
    return [candidate for candidate in candidates if candidate]


def read_box(content: str) -> list[str]:
    """What a box may state: its content, the value that an equation in it names, or what follows
    "the answer is" in it."""
    phrase = PHRASE.search(normalise(content))
    if phrase:
        return read_claim(phrase.string[phrase.end() :])
    equation = EQUATION.fullmatch(content)
    return [content, equation[1].strip()] if equation else [content]


def read_plain(response: str) -> list[str]:
    """What a response without a mark may state as its answer: its last line, or the value that
    the last sentence with a value states. Empty if that is a question or an unfinished sentence."""
    response = CALCULATION.sub("", collapse_spaces(response))
    leading_value = VALUE_FIRST.match(response)
    if leading_value and not CONCLUDES.search(response, leading_value.end()):
        return [leading_value[1]]
    retractions = find_retractions(response)
    response = response[retractions[-1] :] if retractions else response
    text = _without_remarks(response.rstrip())[-MAX_SENTENCE:]
    formulas = find_formulas(text)
    if (
        formulas
        and "\n" in formulas[-1].content.strip("\n")
        and not _has_value(text[formulas[-1].end :])
    ):
        return _last_row(formulas[-1].content.strip())
    text = EMPHASIS.sub(r"**\2**", BOLD_TAG.sub("**", text))
    text = words_to_digits(BETWEEN_SCRIPTS.sub(" ", text))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    unanswered = NO_INFORMATION.search(text)
    if unanswered and not CONCLUDES.search(text, unanswered.end()):
        return []
    for line in reversed(lines[-MAX_LINES:]):
        sentences = _split_sentences(line)
        for sentence in reversed(sentences):
            is_offer = OFFER.match(sentence)
            if is_offer and "let me know" in sentence.lower():
                continue
            if NO_ANSWER.search(sentence) or HINT.match(sentence):
                return []
            is_open = ASKS.search(sentence) and not is_offer
            if is_open or (INSTRUCTION.match(sentence) and not _has_value(sentence)):
                return []
            if is_offer or not any(map(str.isalnum, sentence)):
                continue
            if sentence is not first and (
                PARENTHESES.fullmatch(sentence)
                or REMARK.search(sentence)
                or (EARLIER.search(sentence) and "=" not in sentence)
            ):
                continue
            if _has_value(sentence):
                return _read_sentence(line, sentence)
            if not IS_FINISHED.search(sentence.strip()):
                return _read_sentence(line, sentence) if line is lines[-1] else []
    return _read_sentence(lines[-1], _split_sentences(lines[-1])[-1]) if lines else []


def _last_row(formula: str) -> list[str]:
    """A formula of several lines, and the value of the last row if they are aligned equations."""
    if not ALIGNED.search(formula):
        return [formula]
    rows = ALIGNED.sub("", formula).replace("&", "").split("\\\\")
    rows = [row.strip(" \n.,") for row in rows if row.strip()]
    return [formula, *(_right_side(f"={rows[-1]}") if rows else [])]


def _without_remarks(response: str) -> str:
    """The response without an explanation after the answer, and without a last line or sentence
    that repeats an earlier one and was cut."""
    for match in EXPLANATION.finditer(response):
        answer = response[: match.start()].rstrip()
        if _has_value(answer.rpartition("\n")[2]):
            response = answer
            break
    earlier, _, line = response[-MAX_SENTENCE:].rpartition("\n")
    sentences = _split_sentences(line)
    cut = sentences[-1].strip() if sentences else ""
    if len(line.strip()) > 3 and f"\n{line}" in f"\n{earlier}":
        cut = line
    elif len(cut) <= 3 or not any(each.strip().startswith(cut) for each in sentences[:-1]):
        cut = ""
    return response[: len(response) - len(cut)].rstrip()


def _read_sentence(line: str, sentence: str) -> list[str]:
    if sentence.rstrip("*\"') ").endswith("?") or UNFINISHED.search(sentence.rstrip()):
        return []
    if SUPPOSITION.match(sentence):
        return []
    full_line = line.strip("* ").rstrip(".").strip()
    candidates = [] if UNSOLVED.search(full_line) else [full_line]
    candidates += stated_values(sentence)[-1:]
    candidates += _right_side(candidates[-1]) if candidates else []
    copula = list(COPULA.finditer(sentence))
    claim = trim_claim(sentence[copula[-1].end() :].rstrip(".! ")) if copula else None
    if claim and not _has_value(claim):
        candidates.append(claim)
    return candidates


def _right_side(text: str) -> list[str]:
    """The value of an equation that names or computes it: `Total = 30 - 3 = 27`."""
    if "\\equiv" in text:
        text = RESIDUE.sub("", text.replace("\\equiv", "="))
    left, _, value = text.rpartition("=")
    is_value = "=" in left or EQUATION.fullmatch(text) or RESULT.search(f"{left}=")
    return [value.strip()] if is_value else []


def _split_sentences(line: str) -> list[str]:
    """The sentences of a line. A dot inside a formula or a number does not end a sentence."""
    formulas = find_formulas(line)
    sentences: list[str] = []
    begin = 0
    for match in SENTENCE.finditer(line):
        while formulas and formulas[0].end <= match.start():
            formulas.pop(0)
        is_list_number = line[begin : match.start()].strip().isdigit()
        if is_list_number or (formulas and formulas[0].start < match.start()):
            continue
        sentences.append(line[begin : match.end()])
        begin = match.end()
    return [each for each in (*sentences, line[begin:]) if each.strip()]


def _has_value(text: str) -> bool:
    return any(letter.isdigit() for letter in text) or bool(find_formulas(text))


def stated_values(sentence: str) -> list[str]:
    """The formulas and numbers that a sentence states, in order of their weight: the last one is
    its answer. A formula or a bold number outweighs a number in a phrase such as "in 5 days"."""
    sentence = _last_conclusion(APPOSITION.sub("", sentence))
    aside = ASIDE.search(sentence)
    if aside:
        before, after = sentence[: aside.start()], sentence[aside.end() :]
        is_enclosed = aside[0].endswith(",")
        if _has_value(before) or (is_enclosed and _has_value(after)):
            sentence = before + after
    formulas = [
        span for span in find_formulas(sentence)[-MAX_NUMBERS:] if not _is_denied(sentence, span)
    ]
    numbers = [span for span in _find_numbers(sentence) if not _is_denied(sentence, span)]
    named = [span for span in numbers if IS_ANSWER.match(sentence, span.end)]
    if named:
        return [named[-1].content.strip()]
    named = [span for span in formulas if not NAME.fullmatch(span.content.strip(" .,;"))]
    formulas = named or formulas
    result = _last_result(sentence, sorted(formulas + numbers))
    if result:
        return [result.content.strip()]
    if ALTERNATIVE.search(sentence) and _have_different_values(formulas + numbers):
        return []
    bold = [span for span in numbers if _is_bold(sentence, span)]
    marked = formulas or bold
    if marked:
        is_aside = all(
            span.start < marked[-1].end or _is_adjunct(sentence, span) for span in numbers
        )
        return [span.content.strip() for span in (marked if is_aside else numbers)]
    if _is_list(sentence, numbers):
        return []
    numbers = [span for span in numbers if not GIVEN.search(sentence[: span.start])]
    main = [span for span in numbers if not _is_adjunct(sentence, span)]
    return [span.content.strip() for span in main or numbers]


def _last_result(sentence: str, numbers: list[Span]) -> Span | None:
    """The result of the last calculation, if no clause after it states another value."""
    results = [span for span in numbers if _is_result(sentence, span)]
    if not results:
        return None
    later = [span for span in numbers if span.start > results[-1].start]
    later = [span for span in later if not _is_adjunct(sentence, span)]
    states_other = later and CLAUSE.search(sentence, results[-1].end, later[-1].start)
    return None if states_other else results[-1]


def _is_result(sentence: str, span: Span) -> bool:
    """Whether the value follows a calculation, before the formula or in it. An equation with an
    unknown, `2x + 3 = 27`, calculates nothing."""
    left, equals, _ = span.content.rpartition("=")
    if not equals:
        return RESULT.search(sentence[max(0, span.start - 300) : span.start]) is not None
    calculation = left.rpartition("=")[2] + equals
    return RESULT.search(calculation) is not None and not UNKNOWN.search(calculation)


def _last_conclusion(sentence: str) -> str:
    """From the last `so` that has a value after it."""
    for match in reversed(list(THEREFORE.finditer(sentence))):
        if _has_value(sentence[match.end() :]):
            return sentence[match.end() :]
    return sentence


def _have_different_values(spans: list[Span]) -> bool:
    """Whether not all spans state the same value, as `27 dollars, or $27` does."""
    values = [read_number(normalise(span.content)) for span in spans]
    first = values[0] if values else None
    return len(spans) > 1 and not all(first and value and first.equals(value) for value in values)


def _is_adjunct(sentence: str, span: Span) -> bool:
    """Whether a number only says how, when or for whom, or was known before."""
    before = sentence[max(0, span.start - 300) : span.start]
    if KNOWN.search(before) or GIVEN.search(before) or POINT.search(before):
        return True
    clauses = list(CLAUSE.finditer(before))
    begin = clauses[-1].end() if clauses else 0
    return ADJUNCT.search(before, begin) is not None and not QUANTITY_OF.search(before)


def _find_numbers(sentence: str) -> list[Span]:
    """The last numbers outside formulas. A number inside a word or a product does not count."""
    masked = sentence
    for span in find_formulas(sentence):
        masked = masked[: span.start] + " " * (span.end - span.start) + masked[span.end :]
    numbers: list[Span] = []
    for match in NUMBER.finditer(masked):
        if not any(letter.isdigit() for letter in match[0]):
            continue
        is_part = match[0][-1].isdigit() and not GLUED.match(masked, match.end())
        is_operand = OPERATOR.match(masked, match.end())
        if is_part or is_operand or ATTRIBUTE.match(masked, match.end()):
            continue
        scale = SCALE.match(masked, match.end())
        end = scale.end() if scale else match.end()
        unit = UNIT.match(masked, end)
        end = unit.end() if unit and unit_name(unit[0]) else end
        numbers.append(Span(match.start(), end, masked[match.start() : end]))
    return numbers[-MAX_NUMBERS:]


def _is_denied(sentence: str, span: Span) -> bool:
    before = sentence[max(0, span.start - 300) : span.start]
    after = sentence[span.end :].lstrip(" *$")
    after_relation = RELATION.match(sentence, span.end)
    equation = UNSOLVED.search(before)
    is_unsolved = UNSOLVED.search(span.content) or (
        equation and not before[equation.end() :].strip()
    )
    is_relation = span.content.lstrip()[:1] in "<>≠≤≥" or re.match(
        r"\s*(?:[a-zA-Z]\s*)?(?:[<>≠≤≥]|\\n?[lg]?eq?(?![a-z])|\\neq?(?![a-z]))", span.content
    )
    is_denied = NOT_STATED.search(before.rstrip(OPENING) + " ") or OPERAND.search(before)
    is_denied = is_denied and not _is_result(sentence, span)
    is_denied = is_denied or DENIED_AFTER.match(sentence, span.end)
    is_unreal = before.endswith("would be ") and CONDITION.match(sentence, span.end)
    is_unclear = is_relation or after_relation or is_unsolved or is_unreal
    return bool(is_denied or is_unclear) or after.startswith("?")


def _is_bold(sentence: str, span: Span) -> bool:
    return "**" in sentence[: span.start] and sentence[: span.start].count("**") % 2 == 1


def _is_list(sentence: str, numbers: list[Span]) -> bool:
    """Whether the last number is one of a list, as in `30, 27`."""
    if len(numbers) < 2:
        return False
    between = sentence[numbers[-2].end : numbers[-1].start]
    return JOINED.fullmatch(between) is not None
