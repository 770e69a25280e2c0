"""Finds the value that a sentence states as its answer.

    "about 27 apples, not 30"              -- trim_claim ------> "27 apples"
    "He had $30 and now has $27 left."     -- stated_values ---> ["$30", "$27"]
    "It is not 27."                        -- stated_values ---> []

A value that a sentence denies, bounds, or only considers ("not 27", "more than 27", "if it were
27", "27 or 30") is not stated. Nothing is computed or compared here.
"""

from __future__ import annotations

import re
from itertools import islice

from rollick.rewards import claim_patterns as patterns
from rollick.rewards import sentence_patterns
from rollick.rewards.answers import (
    DIGIT,
    MAX_SENTENCE,
    PHRASE,
    SENTENCE_END,
    find_retractions,
    read_sentence_after,
)
from rollick.rewards.notation import normalise, read_number, unit_name, words_to_digits
from rollick.rewards.scanners import Span, collapse_spaces, find_formulas, matches_outside_formulas

MAX_LINES = 4
"""Lines at the end of a completion that are read."""
MAX_LINE = 200
"""Characters of a line before an explanation that are read."""
MAX_REMARKS = 10
"""Explanations and offers that are tried, of each kind."""
MAX_NUMBERS = 12
"""Numbers of a sentence that are read, from the last one."""


def trim_claim(text: str) -> str | None:
    """The value at the head of "the answer is ...": without leading adverbs and the explanation
    after it. None if the sentence denies the value."""
    if patterns.LEAD.match(text):
        text = patterns.LEAD.sub("", text[:MAX_SENTENCE], count=1)
    corrected = patterns.CORRECTED.match(text)
    if corrected:
        text = text[corrected.end() :]
    if patterns.DENIAL.match(text):
        return None
    tail = next(matches_outside_formulas(patterns.TAIL, text), None)
    if tail is None:
        return text.strip()
    explanation = text[tail.start() :]
    return None if patterns.TAKES_BACK.search(explanation) else text[: tail.start()].strip()


def read_claim(text: str) -> list[str]:
    """What the text after "the answer is" may state: all of it, the value at its head, or the value
    of a statement such as "that she has 27 apples"."""
    text = patterns.UNIT_POWER.sub(r"\1^\2", collapse_spaces(text[:MAX_SENTENCE]))
    text = patterns.OPERAND_UNIT.sub(r"\g<operand>", patterns.CALCULATION.sub("", text))
    text = patterns.CLOSING_EMPHASIS.sub("", patterns.EMPHASIS.sub(r"\2", text))
    if text.endswith(")") and text.count("(") < text.count(")"):  # `(Answer: 27)`
        text = text[:-1]
    if _is_unanswered(DIGIT.split(text, maxsplit=1)[0]):
        return [text]
    candidates = [text, trim_claim(text)]
    digits = patterns.RESTATED.sub(r"\1\2", words_to_digits(text))
    if digits != text:
        candidates.append(trim_claim(digits))
    formulas = find_formulas(text)
    if formulas and formulas[0].start == 0:  # `$27$ square units`
        candidates.append(trim_claim(formulas[0].content + text[formulas[0].end :]))
    is_sentence = patterns.STATEMENT.match(text) or (text[:1].isupper() and " " in text)
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
    equation = patterns.EQUATION.fullmatch(content)
    return [content, equation[1].strip()] if equation else [content]


def read_plain(response: str) -> list[str]:
    """What a response without a mark may state as its answer: its last line, or the value that
    the last sentence with a value states. Empty if that is a question or an unfinished sentence."""
    response = patterns.CALCULATION.sub("", collapse_spaces(response))
    response = patterns.UNIT_POWER.sub(r"\1^\2", patterns.MARKS.sub("", response))
    leading_value = patterns.VALUE_FIRST.match(response)
    if leading_value and not sentence_patterns.CONCLUDES.search(response, leading_value.end()):
        return [leading_value[1]]
    retractions = find_retractions(response)
    response = response[retractions[-1] :] if retractions else response
    for summary in list(sentence_patterns.SUMMARY.finditer(response))[-1:]:
        claim = read_sentence_after(response, summary)
        after = response[summary.end() :].partition(claim)[2]
        if _last_statements(claim) and not _concludes_other_value(claim, after):
            return read_claim(claim)
    text = _without_remarks(response.rstrip())[-MAX_SENTENCE:]
    formulas = find_formulas(text)
    if (
        formulas
        and "\n" in formulas[-1].content.strip("\n")
        and not _has_value(text[formulas[-1].end :])
    ):
        return _last_row(formulas[-1].content.strip())
    text = patterns.EMPHASIS.sub(r"**\2**", patterns.BOLD_TAG.sub("**", text))
    text = words_to_digits(patterns.BETWEEN_SCRIPTS.sub(" ", text))
    text = patterns.OPERAND_UNIT.sub(r"\g<operand>", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if _is_unanswered(text):
        return []
    for line in reversed(lines[-MAX_LINES:]):
        sentences = _split_sentences(line)
        for sentence in reversed(sentences):
            is_offer = sentence_patterns.OFFER.match(sentence)
            if is_offer and "let me know" in sentence.lower():
                continue
            if _states_nothing(sentence, bool(is_offer)):
                return []
            if sentence_patterns.NO_SOLUTION.match(sentence):
                return [line.rstrip(".")]
            if is_offer or not any(map(str.isalnum, sentence)):
                continue
            if sentence is not first and _is_remark(sentence):
                continue
            if _has_value(sentence):
                return _read_sentence(line, sentence)
            if not patterns.IS_FINISHED.search(sentence.strip()):
                return _read_sentence(line, sentence) if line is lines[-1] else []
    return _read_sentence(lines[-1], _split_sentences(lines[-1])[-1]) if lines else []


def _is_unanswered(text: str) -> bool:
    """Whether the text says that there is no answer, and concludes none after that."""
    ends = [match.end() for kind in sentence_patterns.UNANSWERED for match in kind.finditer(text)]
    return bool(ends) and not sentence_patterns.CONCLUDES_VALUE.search(text, max(ends))


def _states_nothing(sentence: str, is_offer: bool) -> bool:
    """Whether a sentence ends the response without an answer: it says that there is none, asks, or
    leaves a step to the reader."""
    if (
        sentence_patterns.NO_ANSWER.search(sentence)
        or sentence_patterns.ONLY_GIVEN.search(sentence)
        or sentence_patterns.HINT.match(sentence)
    ):
        return True
    if sentence_patterns.ASKS.search(sentence) and not is_offer:
        return True
    return bool(sentence_patterns.INSTRUCTION.match(sentence)) and not _has_value(sentence)


def _is_remark(sentence: str) -> bool:
    """Whether a sentence only says something about the answer in an earlier one."""
    if sentence_patterns.PARENTHESES.fullmatch(sentence):
        return True
    if sentence_patterns.REASON.match(sentence):
        return not sentence_patterns.CONCLUDES_VALUE.search(sentence)
    if sentence_patterns.EARLIER.search(sentence) and "=" not in sentence:
        return True
    if sentence_patterns.HYPOTHESIS.match(sentence) or patterns.BLANK_EQUATION.match(sentence):
        return True
    return sentence_patterns.REMARK.search(sentence) is not None


def _last_row(formula: str) -> list[str]:
    """A formula of several lines, and the value of the last row if they are aligned equations."""
    if not patterns.ALIGNED.search(formula):
        return [formula]
    rows = patterns.ALIGNED.sub("", formula).replace("&", "").split("\\\\")
    rows = [row.strip(" \n.,") for row in rows if row.strip()]
    return [formula, *(_right_side(f"={rows[-1]}") if rows else [])]


def _without_remarks(response: str) -> str:
    """The response without an explanation or an offer after the answer, and without a last line or
    sentence that repeats an earlier one and was cut."""
    for pattern in sentence_patterns.REMARKS:
        for match in islice(pattern.finditer(response), MAX_REMARKS):
            before, after = response[: match.start()].rstrip(), response[match.end() :]
            is_offer = pattern is sentence_patterns.OFFERS_MORE
            if not _has_value(before if is_offer else before.rpartition("\n")[2]):
                continue
            remark = match[0] + SENTENCE_END.split(after[:MAX_LINE], maxsplit=1)[0]
            is_other = sentence_patterns.OTHER_TOPIC.search(remark)
            if is_other or not _concludes_other_value(before, after):
                response = before
                break
    earlier, _, line = response[-MAX_SENTENCE:].rpartition("\n")
    sentences = _split_sentences(line)
    cut = sentences[-1].strip() if sentences else ""
    if len(line.strip()) > 3 and f"\n{line}" in f"\n{earlier}":
        cut = line
    elif len(cut) <= 3 or not any(each.strip().startswith(cut) for each in sentences[:-1]):
        cut = ""
    return response[: len(response) - len(cut)].rstrip()


def _concludes_other_value(before: str, after: str) -> bool:
    """Whether the text after a remark or a summary concludes a value other than the one before:
    its last sentence with a value states that of a conclusion."""
    after = sentence_patterns.CHECKS.split(after, maxsplit=1)[0][-MAX_SENTENCE:]
    statements = _last_statements(after)
    earlier = _last_statements(before[-MAX_LINE:])
    if not statements or (earlier and earlier[0][1][-1] in statements[0][1]):
        return False
    return any(
        values[-1] == statements[0][1][-1] and sentence_patterns.CONCLUDES_AMOUNT.search(sentence)
        for sentence, values in statements
    )


def _last_statements(text: str) -> list[tuple[str, list[str]]]:
    """The last sentences that state values, with these, from the last one."""
    statements: list[tuple[str, list[str]]] = []
    for line in reversed(text.splitlines()):
        for sentence in reversed(_split_sentences(line)):
            is_statement = _has_value(sentence) and not sentence.rstrip().endswith("?")
            values = stated_values(sentence) if is_statement else []
            if values and len(statements) < MAX_LINES:
                statements.append((sentence, list(map(_number_text, values))))
    return statements


def _number_text(value: str) -> str:
    """The number of a value, without its unit and notation; the value if it is no number."""
    number = read_number(normalise(value))
    return str(number.value) if number else value


def _read_sentence(line: str, sentence: str) -> list[str]:
    if sentence.rstrip("*\"') ").endswith("?") or patterns.UNFINISHED.search(sentence.rstrip()):
        return []
    if sentence_patterns.SUPPOSITION.match(sentence):
        return []
    full_line = line.strip("* ").rstrip(".").strip()
    candidates = [] if patterns.UNSOLVED.search(full_line) else [full_line]
    candidates += stated_values(sentence)[-1:]
    candidates += _right_side(candidates[-1]) if candidates else []
    copula = list(patterns.COPULA.finditer(sentence))
    claim = trim_claim(sentence[copula[-1].end() :].rstrip(".! ")) if copula else None
    if claim and not _has_value(claim):
        candidates.append(claim)
    return candidates


def _right_side(text: str) -> list[str]:
    """The value of an equation that names or computes it: `Total = 30 - 3 = 27`."""
    if "\\equiv" in text:
        text = patterns.RESIDUE.sub("", text.replace("\\equiv", "="))
    left, _, value = text.rpartition("=")
    is_value = (
        "=" in left or patterns.EQUATION.fullmatch(text) or patterns.RESULT.search(f"{left}=")
    )
    return [value.strip()] if is_value else []


def _split_sentences(line: str) -> list[str]:
    """The sentences of a line. The number of a list item ends none."""
    sentences: list[str] = []
    begin = 0
    for match in matches_outside_formulas(patterns.SENTENCE, line):
        if not line[begin : match.start()].strip().isdigit():
            sentences.append(line[begin : match.end()])
            begin = match.end()
    return [each for each in (*sentences, line[begin:]) if each.strip()]


def _has_value(text: str) -> bool:
    return any(letter.isdigit() for letter in text) or bool(find_formulas(text))


def stated_values(sentence: str) -> list[str]:
    """The formulas and numbers that a sentence states, in order of their weight: the last one is
    its answer. A formula or a bold number outweighs a number in a phrase such as "in 5 days"."""
    sentence = _last_conclusion(patterns.APPOSITION.sub("", sentence))
    bounds = patterns.BOUNDS.search(sentence)
    if bounds and _has_value(sentence[: bounds.start()]):
        sentence = sentence[: bounds.start()] + sentence[bounds.end() :]
    blank = patterns.BLANK_EQUATION.search(sentence)
    if blank and _has_value(sentence[: blank.start()]):
        sentence = sentence[: blank.start()]
    aside = patterns.ASIDE.search(sentence)
    if aside:
        before, after = sentence[: aside.start()], sentence[aside.end() :]
        is_enclosed = aside[0].endswith(",")
        if _has_value(before) or (is_enclosed and _has_value(after)):
            sentence = before + after
    formulas = [
        span for span in find_formulas(sentence)[-MAX_NUMBERS:] if not _is_denied(sentence, span)
    ]
    numbers = [span for span in _find_numbers(sentence) if not _is_denied(sentence, span)]
    named = [span for span in numbers if patterns.IS_ANSWER.match(sentence, span.end)]
    if named:
        return [named[-1].content.strip()]
    named = [span for span in formulas if not patterns.NAME.fullmatch(span.content.strip(" .,;"))]
    formulas = named or formulas
    result = _last_result(sentence, sorted(formulas + numbers))
    if result:
        return [result.content.strip()]
    if patterns.ALTERNATIVE.search(sentence) and _have_different_values(formulas + numbers):
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
    numbers = [span for span in numbers if not patterns.GIVEN.search(sentence[: span.start])]
    main = [span for span in numbers if not _is_adjunct(sentence, span)]
    return [span.content.strip() for span in main or numbers]


def _last_result(sentence: str, numbers: list[Span]) -> Span | None:
    """The result of the last calculation, if no clause after it states another value."""
    results = [span for span in numbers if _is_result(sentence, span)]
    if not results:
        return None
    later = [span for span in numbers if span.start > results[-1].start]
    later = [span for span in later if not _is_adjunct(sentence, span)]
    states_other = later and patterns.CLAUSE.search(sentence, results[-1].end, later[-1].start)
    return None if states_other else results[-1]


def _is_result(sentence: str, span: Span) -> bool:
    """Whether the value follows a calculation, before the formula or in it. An equation with an
    unknown, `2x + 3 = 27`, calculates nothing."""
    left, equals, _ = span.content.rpartition("=")
    if not equals:
        return patterns.RESULT.search(sentence[max(0, span.start - 300) : span.start]) is not None
    calculation = left.rpartition("=")[2] + equals
    return patterns.RESULT.search(calculation) is not None and not patterns.UNKNOWN.search(
        calculation
    )


def _last_conclusion(sentence: str) -> str:
    """From the last `so` that has a value after it."""
    for match in reversed(list(patterns.THEREFORE.finditer(sentence))):
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
    if (
        patterns.KNOWN.search(before)
        or patterns.GIVEN.search(before)
        or patterns.POINT.search(before)
    ):
        return True
    clauses = list(patterns.CLAUSE.finditer(before))
    begin = clauses[-1].end() if clauses else 0
    return patterns.ADJUNCT.search(before, begin) is not None and not patterns.QUANTITY_OF.search(
        before
    )


def _find_numbers(sentence: str) -> list[Span]:
    """The last numbers outside formulas. A number inside a word or a product does not count."""
    masked = sentence
    for span in find_formulas(sentence):
        masked = masked[: span.start] + " " * (span.end - span.start) + masked[span.end :]
    numbers: list[Span] = []
    for match in patterns.NUMBER.finditer(masked):
        if not any(letter.isdigit() for letter in match[0]):
            continue
        is_part = match[0][-1].isdigit() and not patterns.GLUED.match(masked, match.end())
        is_operand = patterns.OPERATOR.match(masked, match.end())
        if is_part or is_operand or patterns.ATTRIBUTE.match(masked, match.end()):
            continue
        scale = patterns.SCALE.match(masked, match.end())
        end = scale.end() if scale else match.end()
        unit = patterns.UNIT.match(masked, end)
        end = unit.end() if unit and unit_name(unit[0]) else end
        numbers.append(Span(match.start(), end, masked[match.start() : end]))
    return numbers[-MAX_NUMBERS:]


def _is_denied(sentence: str, span: Span) -> bool:
    before = sentence[max(0, span.start - 300) : span.start]
    after = sentence[span.end :].lstrip(" *$")
    after_relation = patterns.RELATION.match(sentence, span.end)
    equation = patterns.UNSOLVED.search(before)
    is_unsolved = patterns.UNSOLVED.search(span.content) or (
        equation and not before[equation.end() :].strip()
    )
    is_relation = span.content.lstrip()[:1] in "<>≠≤≥" or re.match(
        r"\s*(?:[a-zA-Z]\s*)?(?:[<>≠≤≥]|\\n?[lg]?eq?(?![a-z])|\\neq?(?![a-z]))", span.content
    )
    is_denied = patterns.NOT_STATED.search(
        before.rstrip(patterns.OPENING) + " "
    ) or patterns.OPERAND.search(before)
    is_denied = is_denied and not _is_result(sentence, span)
    is_denied = is_denied or patterns.DENIED_AFTER.match(sentence, span.end)
    is_unreal = before.endswith("would be ") and patterns.CONDITION.match(sentence, span.end)
    is_unclear = is_relation or after_relation or is_unsolved or is_unreal
    return bool(is_denied or is_unclear) or after.startswith("?")


def _is_bold(sentence: str, span: Span) -> bool:
    return "**" in sentence[: span.start] and sentence[: span.start].count("**") % 2 == 1


def _is_list(sentence: str, numbers: list[Span]) -> bool:
    """Whether the last number is one of a list, as in `30, 27`."""
    if len(numbers) < 2:
        return False
    between = sentence[numbers[-2].end : numbers[-1].start]
    return patterns.JOINED.fullmatch(between) is not None
