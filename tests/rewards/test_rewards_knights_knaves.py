"""The reward `knights_knaves`: the answer formats of models, and wrong answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rollick.rewards.knights_knaves import knights_knaves

NAMES = ["Michael", "Zoey", "Ethan", "Ava"]
SOLUTIONS = [
    [True, False, True, False],
    [False, True, True, False],
    [True, True, True, True],
    [False, False, False, False],
]
Pairs = list[tuple[str, str]]


def number_lines(pairs: Pairs) -> str:
    return "\n".join(f"({n}) {name} is a {role}" for n, (name, role) in enumerate(pairs, start=1))


FORMS: dict[str, Callable[[Pairs], str]] = {
    "numbered": number_lines,
    "numbered_with_dots": lambda pairs: "\n".join(
        f"{n}. {name} is a {role}." for n, (name, role) in enumerate(pairs, start=1)
    ),
    "sentence": lambda pairs: ", ".join(f"{name} is a {role}" for name, role in pairs) + ".",
    "sentence_with_and": lambda pairs: " and ".join(f"{name} is a {role}" for name, role in pairs),
    "dashed": lambda pairs: "\n".join(f"- {name} is a {role}" for name, role in pairs),
    "dash_between": lambda pairs: "\n".join(f"{name} - {role}" for name, role in pairs),
    "colons": lambda pairs: ", ".join(f"{name}: {role}" for name, role in pairs),
    "bold": lambda pairs: "\n".join(f"* **{name}**: {role.title()}" for name, role in pairs),
    "table": lambda pairs: "\n".join(f"| {name} | {role} |" for name, role in pairs),
    "boxed": lambda pairs: (
        "\\boxed{" + ", ".join(f"\\text{{{name} is a {role}}}" for name, role in pairs) + "}"
    ),
    "reordered": lambda pairs: number_lines(pairs[::-1]),
    "negated": lambda pairs: "\n".join(
        f"{name} is not a {'knave' if role == 'knight' else 'knight'}" for name, role in pairs
    ),
}


def make_pairs(solution: list[bool]) -> Pairs:
    return [
        (name, "knight" if role else "knave") for name, role in zip(NAMES, solution, strict=True)
    ]


@pytest.mark.parametrize("solution", SOLUTIONS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_right_answer_scores_one_and_of_a_wrong_answer_zero(
    form: str, solution: list[bool]
):
    text = FORMS[form](make_pairs(solution))
    thinking = "<think>Say that Michael is a knave and Ava is a knight.</think>"
    for completion in (f"{thinking}<answer>{text}</answer>", f"Assume not.\nThus:\n{text}"):
        assert knights_knaves(completion, NAMES, solution) == 1.0
        for index in range(len(NAMES)):
            other = [role != (n == index) for n, role in enumerate(solution)]
            assert knights_knaves(completion, NAMES, other) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Knights: Michael, Ethan\nKnaves: Zoey, Ava",
        "Michael and Ethan are knights, and Zoey and Ava are knaves.",
        "Michael and Ethan are both knights. The others are knaves.",
        "The knights are Michael and Ethan; the knaves are Zoey and Ava.",
        "Zoey and Ava aren't knights. Michael isn't a knave. Ethan must be a knight.",
    ],
)
def test_islanders_may_be_named_together(text: str):
    assert knights_knaves(f"<answer>{text}</answer>", NAMES, SOLUTIONS[0]) == 1.0
    assert knights_knaves(f"<answer>{text}</answer>", NAMES, SOLUTIONS[1]) == 0.0


def test_all_may_be_named_at_once():
    for text in ("All of them are knights.", "Everyone is a knight", "All four are knights"):
        assert knights_knaves(text, NAMES, SOLUTIONS[2]) == 1.0
        assert knights_knaves(text, NAMES, SOLUTIONS[3]) == 0.0


RIGHT = "Zoey is a knight, Ian is a knave"


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "Zoey is a knight",
        "Zoey is a knight or Ian is a knave",
        "If Zoey is a knight then Ian is a knave",
        "Zoey might be a knight, Ian might be a knave",
        f"{RIGHT}. Ian is a knight.",
        f"{RIGHT}\nIan is a knight.",
        "Zoey is a knight and a knave, Ian is a knave",
        "Not all are knights: Zoey is a knight, Ian is a knave",
        f"<think>{RIGHT}",
        f"<think>{RIGHT}</think>",
        f"{RIGHT}<answer>Zoey is a knave, Ian is a knight</answer>",
        f"<answer>{RIGHT}</answer><answer>Zoey is a knight</answer>",
    ],
)
def test_an_answer_that_is_incomplete_unsure_or_contradicts_itself_is_wrong(completion: str):
    assert knights_knaves(completion, ["Zoey", "Ian"], [True, False]) == 0.0


def test_the_row_may_have_other_words_for_the_roles():
    words = {"knight": "pioneer", "knave": "laggard"}
    options: Any = {"names": ["Zoey", "Ian"], "solution": [True, False], "knight_knave": words}
    assert knights_knaves("Zoey is a pioneer, Ian is a laggard", **options) == 1.0
    assert knights_knaves(RIGHT, **options) == 0.0


def test_a_row_whose_columns_do_not_fit_is_an_error():
    with pytest.raises(ValueError, match="2 names and 1 roles"):
        knights_knaves(RIGHT, ["Zoey", "Ian"], [True])


@pytest.mark.parametrize(
    "part",
    ["Zoey, ", "Zoey and ", "Zoey is a ", "all ", "knight: ", "knights ", "- ", "\n", " ", "("],
)
def test_repetitive_text_is_scored_in_linear_time(part: str):
    started_at = time.perf_counter()
    knights_knaves(part * (20_000 // len(part)), ["Zoey", "Ian"], [True, False])
    assert time.perf_counter() - started_at < 2
