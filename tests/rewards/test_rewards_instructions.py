"""Instruction following: for each IFEval type, responses that follow it and that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollick.rewards.instructions import CHECKERS, follows, instructions, split_sentences

pytest.importorskip("py3langid", reason="the extra rewards is not installed")

DATA = Path(__file__).parents[3] / "shared" / "data" / "ifeval.jsonl"

GERMAN = "Das ist ein kurzer Text über das Wetter, und er ist auf Deutsch geschrieben."
ENGLISH = "This is a short text about the weather, and it is written in English."

TABLE: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    # instruction: (arguments, followed, not followed)
    "keywords:existence": [
        (
            {"keywords": ["rain", "Sun"]},
            ["The sun, then rain.", "RAINY and sunny"],
            ["Only rain.", "neither", ""],
        )
    ],
    "keywords:forbidden_words": [
        (
            {"forbidden_words": ["bad", "run"]},
            ["A badge for running", "good"],
            ["This is bad.", "Run!", "a bad, bad day", "BAD"],
        )
    ],
    "keywords:frequency": [
        (
            {"keyword": "cat", "frequency": 2, "relation": "at least"},
            ["cat cat", "Cat and cat and cat"],
            ["one cat", "dog"],
        ),
        (
            {"keyword": "cat", "frequency": 2, "relation": "less than"},
            ["one cat", "dog"],
            ["cat cat", "Cat, cat, cat"],
        ),
    ],
    "keywords:letter_frequency": [
        (
            {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
            ["Eleven e", "see me"],
            ["e e", "a"],
        ),
        (
            {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
            ["Hi!", "hi"],
            ["Hi!!", "! ! !"],
        ),
    ],
    "language:response_language": [
        ({"language": "de"}, [GERMAN], [ENGLISH, "12 34"]),
        (
            {"language": "hi"},
            ["यह मौसम के बारे में एक छोटा पाठ है और यह हिंदी में लिखा गया है।"],
            [ENGLISH],
        ),
    ],
    "length_constraints:number_words": [
        (
            {"num_words": 3, "relation": "at least"},
            ["one two three", "one, two: three four"],
            ["one two", "..."],
        ),
        ({"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    ],
    "length_constraints:number_sentences": [
        (
            {"num_sentences": 2, "relation": "at least"},
            ["It rains. It pours!", "Really? Yes. No."],
            ["It rains", "Dr. Who came at 3.5 p.m. to the U.S. office"],
        ),
        (
            {"num_sentences": 2, "relation": "less than"},
            ["It rains.", "Mr. Smith arrived."],
            ["It rains. It pours."],
        ),
    ],
    "length_constraints:number_paragraphs": [
        (
            {"num_paragraphs": 2},
            ["one\n***\ntwo", "one *** two", "***\none\n***\ntwo"],
            ["one", "one\n\ntwo", "one\n***\n***\ntwo", "a *** b *** c"],
        )
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "rain"},
            ["Sun.\n\nRain falls.", "Sun.\n\n\n'Rain', she said."],
            ["Rain.\n\nSun.", "Sun. Rain.", "a\n\nrain\n\nb", "Sun.\n\nRainy."],
        )
    ],
    "detectable_content:number_placeholders": [
        (
            {"num_placeholders": 2},
            ["Dear [name], [date]", "[a][b][c]"],
            ["[name]", "(name) (date)", "[] []"],
        )
    ],
    "detectable_content:postscript": [
        (
            {"postscript_marker": "P.S."},
            ["Bye.\nP.S. I know.", "Bye.\np. s. more", "Bye\n**P.S.** more"],
            ["Bye.", "Bye. P.S.", "Bye PS more", "P.P.S. more"],
        ),
        (
            {"postscript_marker": "P.P.S"},
            ["Bye.\nP.P.S I know.", "Bye.\nP.P.S. more"],
            ["Bye.\nP.S. I know.", "Bye."],
        ),
    ],
    "detectable_format:number_bullet_lists": [
        (
            {"num_bullets": 2},
            ["* one\n* two", "- one\n- two", "Intro:\n* one\n  - two"],
            ["* one", "* a\n* b\n* c", "one\ntwo", "**bold**\n* one"],
        )
    ],
    "detectable_format:constrained_response": [
        (
            {},
            ["My answer is yes.", "My answer is maybe."],
            ["Yes.", "My answer is perhaps.", "my answer is yes"],
        )
    ],
    "detectable_format:number_highlighted_sections": [
        (
            {"num_highlights": 2},
            ["*one* and *two*", "**one** and *two*", "*a b* *c* *d*"],
            ["*one*", "one two", "* one\n* two", "** ** **"],
        )
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            ["Section 1\na\nSection 2\nb", "Section1 a Section 2 b Section 3 c"],
            ["Section 1", "section 1 section 2", "Section one Section two"],
        )
    ],
    "detectable_format:json_format": [
        (
            {},
            ['{"a": 1}', '```json\n{"a": [1, 2]}\n```', "```\n[1]\n```"],
            ["{a: 1}", 'Here: {"a": 1}', "```json\n{\n```"],
        )
    ],
    "detectable_format:title": [
        (
            {},
            ["<<A title>>\ntext", "text <<x>>"],
            ["A title", "<title>", "<< >>", "<<a\nb>>"],
        )
    ],
    "combination:repeat_prompt": [
        (
            {"prompt_to_repeat": "Write a poem."},
            ["Write a poem.\nRoses", "  write a poem. Here"],
            ["Here: Write a poem.", "Write a song."],
        )
    ],
    "combination:two_responses": [
        (
            {},
            ["one ****** two", "one\n******\ntwo\n******"],
            ["one", "one ****** one", "a ****** b ****** c", "one ***** two", "a ****** ****** b"],
        )
    ],
    "change_case:english_capital": [
        ({}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "123"]),
    ],
    "change_case:english_lowercase": [
        ({}, [ENGLISH.lower()], [ENGLISH, GERMAN.lower(), "123"]),
    ],
    "change_case:capital_word_frequency": [
        (
            {"capital_frequency": 2, "capital_relation": "at least"},
            ["THIS IS it", "A WELL-KNOWN fact"],
            ["This IS it", "this is it"],
        ),
        (
            {"capital_frequency": 2, "capital_relation": "less than"},
            ["This IS it", "nothing"],
            ["THIS IS it"],
        ),
    ],
    "startend:end_checker": [
        (
            {"end_phrase": "Hope you agree with me."},
            ["So it is. Hope you agree with me.", '"hope you agree with me."  '],
            ["Hope you agree with me. Bye!", "Hope you agree"],
        )
    ],
    "startend:quotation": [
        ({}, ['"All of it."', ' "so" '], ["All of it.", '"Half', '""', "'single'"]),
    ],
    "punctuation:no_comma": [({}, ["No such sign.", "a; b"], ["One, two", ","])],
}
CASES = [
    (name, arguments, text, expected)
    for name, rows in TABLE.items()
    for arguments, right, wrong in rows
    for expected, texts in ((True, right), (False, wrong))
    for text in texts
]


def test_every_instruction_type_has_positive_and_negative_examples():
    assert set(TABLE) == set(CHECKERS)
    assert all(right and wrong for rows in TABLE.values() for _, right, wrong in rows)


@pytest.mark.parametrize(("name", "arguments", "text", "expected"), CASES)
def test_a_response_follows_an_instruction_or_not(
    name: str, arguments: dict[str, Any], text: str, expected: bool
):
    assert follows(text, name, arguments) is expected


LOOSE = [
    ("startend:quotation", {}, 'Sure, here it is:\n"All of it."'),
    ("startend:quotation", {}, '"All of it."\nI hope that helps!'),
    ("startend:end_checker", {"end_phrase": "Bye."}, "So long. Bye.\nAnything else?"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "Sure:\n**Say hi.** Hi!"),
    ("punctuation:no_comma", {}, "Sure, with pleasure:\nNo such sign"),
    ("detectable_format:constrained_response", {}, "My answer is *yes*."),
]


@pytest.mark.parametrize(("name", "arguments", "text"), LOOSE)
def test_loose_ignores_a_greeting_a_farewell_and_asterisks(
    name: str, arguments: dict[str, Any], text: str
):
    assert not follows(text, name, arguments)
    assert follows(text, name, arguments, loose=True)


def test_loose_accepts_all_that_strict_accepts():
    accepted = [(name, kwargs, text) for name, kwargs, text, expected in CASES if expected]
    assert all(follows(text, name, kwargs, loose=True) for name, kwargs, text in accepted)


def test_the_score_is_all_or_nothing_or_a_share():
    rules = ["punctuation:no_comma", "detectable_format:title"]
    strict = instructions("no title", rules, [{}, {}])
    assert (strict.value, strict.parts) == (0.0, {"followed": 0.5})
    assert "title" in strict.detail
    assert instructions("no title", rules, [{}, {}], partial=True).value == 0.5
    assert instructions("<think>a, b</think><<t>>", rules, [{}, {}]).value == 1.0


INVISIBLE = ["\u200b", "\u2060", "\ufeff", "\u00ad", "\u2800", "\u3164", "\x00", "\U000e0020"]


@pytest.mark.parametrize("letter", INVISIBLE)
def test_characters_that_show_nothing_follow_no_instruction(letter: str):
    arguments: dict[str, dict[str, Any]] = {
        "punctuation:no_comma": {},
        "keywords:forbidden_words": {"forbidden_words": ["rain"]},
        "keywords:frequency": {"keyword": "a", "frequency": 3, "relation": "less than"},
        "length_constraints:number_words": {"num_words": 5, "relation": "less than"},
        "length_constraints:number_sentences": {"num_sentences": 5, "relation": "less than"},
        "length_constraints:number_paragraphs": {"num_paragraphs": 1},
        "change_case:capital_word_frequency": {
            "capital_frequency": 2,
            "capital_relation": "less than",
        },
    }
    assert [name for name, kwargs in arguments.items() if follows(letter, name, kwargs)] == []
    assert not follows(f"<<{letter}>>", "detectable_format:title", {})
    assert not follows(
        f"*{letter}*", "detectable_format:number_highlighted_sections", {"num_highlights": 1}
    )
    assert not follows(
        f"[{letter}]", "detectable_content:number_placeholders", {"num_placeholders": 1}
    )
    assert not follows(f"a{letter} ****** a", "combination:two_responses", {})
    assert not follows(
        f"a *** {letter} *** b", "length_constraints:number_paragraphs", {"num_paragraphs": 3}
    )
    assert follows(f"Hello{letter} there", "punctuation:no_comma", {})


def test_null_arguments_are_ignored():
    assert follows("a", "keywords:existence", {"keywords": ["a"], "relation": None})


def test_an_unknown_instruction_raises():
    with pytest.raises(ValueError, match="not one of"):
        follows("a", "keywords:rhyme", {})
    with pytest.raises(ValueError, match="kwargs for 1"):
        instructions("a", ["punctuation:no_comma"] * 2, [{}])


@pytest.mark.skipif(not DATA.exists(), reason="the shared datasets are not here")
def test_every_row_of_ifeval_can_be_checked():
    rows = [json.loads(line) for line in DATA.open()]
    names = {name for row in rows for name in row["instruction_id_list"]}
    assert names <= set(CHECKERS)
    for row in rows:
        for loose in (False, True):
            score = instructions(
                "A short answer. It follows little",
                row["instruction_id_list"],
                row["kwargs"],
                loose,
            )
            assert score.value in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Dr. A. Smith paid 3.50 to Mr. Jones.", 1),
        ("Wait... what? Yes.", 2),
        ('He said "Stop." Then he left.', 2),
        ("1. First point.\n2. Second point.", 2),
        ("A heading\n\nA sentence.", 2),
        ("これは文です。もう一つ。", 2),
        ("", 0),
    ],
)
def test_sentences_are_counted_by_rules(text: str, count: int):
    assert len(split_sentences(text)) == count
