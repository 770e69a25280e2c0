"""Text and format rewards: tables of correct and wrong completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollick.rewards.text import (
    f1,
    json_schema,
    length,
    multiple_choice,
    regex,
    repeated_share,
    repetition,
    tags,
)
from rollick.testing.fakes import sample

COLOURS = ["red", "dark blue", "green", "blue"]


@pytest.mark.parametrize(
    ("completion", "answer", "choices", "value"),
    [
        ("B", "B", None, 1),
        ("(B)", "B", None, 1),
        ("The answer is B.", "B", None, 1),
        ("The answer is (B) dark blue.", "B", COLOURS, 1),
        ("\\boxed{B}", "(B)", None, 1),
        ("b", "B", None, 1),
        ("I choose B because A is wrong.\nAnswer: B", "B", None, 1),
        ("<think>A</think>B", "B", None, 1),
        ("<think>B", "B", None, 0),
        ("A", "B", None, 0),
        ("A or B", "B", None, 0),
        ("The answer is A or B", "B", COLOURS, 0),
        ("", "B", None, 0),
        ("dark blue", 1, COLOURS, 1),
        ("The answer is dark blue", "dark blue", COLOURS, 1),
        ("It must be the green one", "green", COLOURS, 1),
        ("blue", "dark blue", COLOURS, 0),
        ("red and green", "green", COLOURS, 0),
        ("D", 3, COLOURS, 1),
        ("2", "2", {"label": ["1", "2"], "text": ["up", "down"]}, 1),
        ("down", "2", {"label": ["1", "2"], "text": ["up", "down"]}, 1),
        ("C", "c", {"a": "x", "b": "y", "c": "z"}, 1),
    ],
)
def test_a_choice_is_made_by_letter_or_by_words(
    completion: str, answer: Any, choices: Any, value: float
):
    assert multiple_choice(completion, answer, choices) == value


def test_an_answer_that_is_not_a_choice_raises():
    with pytest.raises(ValueError, match="not one of the choices"):
        multiple_choice("A", "yellow", COLOURS)
    with pytest.raises(ValueError, match="not one of the choices"):
        multiple_choice("A", 4, COLOURS)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("The Eiffel Tower", "Eiffel tower", 1.0),
        ("Eiffel", "Eiffel tower", 2 / 3),
        ("Big Ben", "Eiffel tower", 0.0),
        ("tower tower tower tower", "tower", 2 / 5),
        ("Rome", ["Paris", "Rome"], 1.0),
        ("It is long, but the answer is Rome.", "Rome", 1.0),
        ("", "Rome", 0.0),
    ],
)
def test_f1_is_the_overlap_of_words(completion: str, answer: Any, value: float):
    assert f1(completion, answer) == pytest.approx(value)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        ('Here:\n```json\n{"name": "Ada"}\n```\nDone.', 1),
        ('<think>{"age": 1}</think>{"name": "Ada"}', 1),
        ('{"age": 36}', 0),
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada", "more": 1}', 0),
        ('Sure! {"name": "Ada"}', 0),
        ("[" * 5000, 0),
        ("null", 0),
        ("", 0),
    ],
)
def test_json_must_fit_its_schema(completion: str, value: float):
    assert json_schema(completion, SCHEMA) == value
    assert json_schema(completion, json.dumps(SCHEMA)) == value


def test_an_invalid_schema_raises_and_no_url_is_followed():
    with pytest.raises(ValueError, match="not a JSON Schema"):
        json_schema("{}", {"type": "thing"})
    with pytest.raises(ValueError, match="is an object"):
        json_schema("{}", "[]")
    with pytest.raises(Exception, match="127"):
        json_schema("{}", {"$ref": "http://127.0.0.1:9/schema.json"})


def test_a_pattern_is_searched_or_matched_fully():
    assert regex("a 12 b", r"\d+") == 1
    assert regex("a 12 b", r"\d+", fullmatch=True) == 0
    assert regex(" 12\n", r"\d+", fullmatch=True) == 1
    assert regex("a\nb", "a.b") == 1


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"min_length": 2, "max_length": 4}, 1.0),
        ({"min_length": 4}, 0.0),
        ({"max_length": 2}, 0.0),
        ({"max_length": 2, "slope": 4}, 0.75),
        ({"min_length": 5, "slope": 4}, 0.5),
        ({"max_length": 13, "unit": "characters"}, 1.0),
        ({"max_length": 12, "unit": "characters"}, 0.0),
        ({"min_length": 13, "unit": "tokens"}, 1.0),
        ({"min_length": 14, "unit": "tokens"}, 0.0),
    ],
)
def test_a_length_is_within_limits_or_near_them(options: dict[str, Any], value: float):
    text = "one two three"  # every character is a token of the fake
    assert length(text, sample(text), **options) == value


def test_a_length_in_an_unknown_unit_raises():
    with pytest.raises(ValueError, match="unit"):
        length("a", sample("a"), unit="pages")  # pyright: ignore[reportArgumentType]


def test_repetition_is_the_share_of_repeated_phrases():
    assert repeated_share("a b c d e f") == 0.0
    assert repeated_share("a b c d a b c d", phrase=4) == pytest.approx(1 / 5)
    assert repetition("na na na na na na na na") == pytest.approx(-4 / 5)
    assert repetition("short") == 0.0
    assert repetition("x" * 200) < -0.9


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("<think>hm</think><answer>4</answer>", 1),
        ("<think>hm</think>\n\n<answer>4</answer>\n", 1),
        ("<answer>4</answer>", 0),
        ("<think>hm</think>4", 0),
        ("<think></think><answer>4</answer>", 0),
        ("<answer>4</answer><think>hm</think>", 0),
        ("So: <think>hm</think><answer>4</answer>", 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0),
        ("<think>hm</think><answer>4", 0),
    ],
)
def test_tags_come_in_order_once_and_with_content(completion: str, value: float):
    assert tags(completion) == value


def test_a_template_may_have_opened_the_first_tag():
    assert tags("hm</think><answer>4</answer>", prefilled=True) == 1
    assert tags("hm</think><answer>4</answer>") == 0
    assert tags("<plan>a</plan><code>b</code>", order="plan,code") == 1


def test_a_language_is_given_by_its_code():
    pytest.importorskip("py3langid", reason="the extra rewards is not installed")
    from rollick.rewards.text import language

    assert language("Der Hund schläft heute den ganzen Tag im Garten.", "de") == 1
    assert language("Der Hund schläft heute den ganzen Tag im Garten.", "en") == 0
    assert language("The dog sleeps in the garden all day today.", "en") == 1
    assert language("THE DOG SLEEPS IN THE GARDEN ALL DAY TODAY.", "EN") == 1
    assert language("12345", "en") == 0
