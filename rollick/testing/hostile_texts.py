"""Long repetitive texts that make careless parsers slow: test your own rewards with them.

for name, text in (hostile_texts(20_000) | mixed_texts(20_000)).items():
    my_reward(completion=text, answer="4")
"""

from __future__ import annotations

REPEATED = {
    "boxes": "\\boxed{",
    "closed_boxes": "\\boxed{1}",
    "nested_boxes": "\\boxed{ ",
    "joined_boxes": "\\boxed{1} and ",
    "braces": "{",
    "backslashes": "\\",
    "round_formulas": "\\(",
    "square_formulas": "\\[",
    "formulas": "$a$",
    "double_dollars": "$$",
    "dollars": "$",
    "prices": "$5 ",
    "number_formulas": "$1$ 1 ",
    "answers": "answer: ",
    "answers_are": "the answer is ",
    "questions": "the answer is 4? ",
    "conditions": "if the answer is 4, ",
    "denials": "the answer is not 4. ",
    "adjectives": "the final correct ",
    "headings": "## Answer\n",
    "hashes": "#### ",
    "tags": "<answer>",
    "closed_tags": "<answer></answer>",
    "think": "<think>",
    "thought": "</think>",
    "dots": ".",
    "spaced_dots": ". ",
    "ellipses": "... ",
    "initials": "A. ",
    "list_numbers": "1. a ",
    "exclamations": "!",
    "quotes": '."',
    "fences": "```",
    "json_fences": "```json\n",
    "fences_and_spaces": "``` \n ",
    "bullets": "- ",
    "bullet_lines": "-\n",
    "asterisks": "*",
    "bold": "**a** ",
    "stars": "* ",
    "newlines": "\n",
    "blank_lines": "\n \n",
    "spaces": " ",
    "tabs": "\t",
    "digits": "1",
    "numbers": "1 ",
    "groups": "1,111,",
    "decimals": "1.1.",
    "signs": "-",
    "sums": "1+",
    "powers": "9^",
    "fractions": "\\frac",
    "units": "5 km/h ",
    "words": "a ",
    "capitals": "A",
    "choices": "A B ",
    "negations": "not ",
    "or_": "1 or ",
    "between": "between 1 and ",
    "brackets": "[",
    "placeholders": "[a] ",
    "titles": "<<",
    "json": "[",
    "json_objects": '{"a":',
    "separators": "***",
    "six_asterisks": "******",
    "postscripts": "P.S. ",
    "sections": "Section 1 ",
    "commas": ",",
    "invisible": "\u200b",
    "accents": "\u0301",
    "chinese": "\u4e2d",
    "sentences": "So it is 4. ",
    "next_questions": "Q: \n",
    "repeated_questions": "Question: a\n",
    "end_tokens": "<eos>",
    "retractions": ". no",
    "mistakes": "\nwait wrong ",
    "explanations": "note:\n",
    "number_words": "one ",
    "clauses": "he had ",
    "asides": ", which is ",
    "parentheses": " (a",
    "asked": "what is ",
    "tails": "in ",
    "equations": "x=",
    "functions": "\\sin ",
    "tall_powers": "x^2",
    "factorials": "i!",
    "absolute_values": "|1",
    "line_separators": "\u2028",
    "accents_of_two_classes": "\u0316\u0301",
    "ligatures": "\ufdfa",
    "names": "Zoey, ",
    "roles": "Zoey is a knight and ",
}
REPEAT_COUNTS = ((1, 1), (40, 1), (3, 20))
"""Repetitions of the first and of the second part of a mixed text, before both begin again."""
OPENINGS = (
    "",
    "The answer is 27",
    "So he has 27 ",
    "\\boxed{",
    "#### ",
    "<answer>",
    "27\n",
    "It is ",
)
ENDINGS = ("x", " 27", "apples", "}", "</answer>", ".", "?")


def hostile_texts(length: int) -> dict[str, str]:
    """Texts of this length by name: each repeats one part, some between an opening and an end."""
    texts: dict[str, str] = {}
    for name, part in REPEATED.items():
        texts[name] = (part * (length // len(part) + 1))[:length]
    for name, opening in (("fence", "```"), ("answer", "The answer is "), ("box", "\\boxed{")):
        closing = "}" if opening.endswith("{") else "x"
        for inner in ("spaces", "dots", "newlines", "dollars", "formulas", "words", "digits"):
            body = texts[inner][: length - len(opening) - 1]
            texts[f"{inner}_in_{name}"] = f"{opening}{body}{closing}"
    return texts


def mixed_texts(length: int) -> dict[str, str]:
    """Texts of this length by name: each mixes two parts between the opening and the end of an
    answer. A fixed selection of the pairs; every part is in two."""
    texts: dict[str, str] = {}
    names = list(REPEATED)
    for index, name in enumerate(names):
        other = names[(index + 41) % len(names)]
        first, second = REPEAT_COUNTS[index % len(REPEAT_COUNTS)]
        opening, ending = OPENINGS[index % len(OPENINGS)], ENDINGS[index % len(ENDINGS)]
        part = REPEATED[name] * first + REPEATED[other] * second
        size = length - len(opening) - len(ending)
        body = (part * (size // len(part) + 1))[:size]
        texts[f"{name}_and_{other}"] = f"{opening}{body}{ending}"
    return texts
