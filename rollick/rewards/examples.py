"""Example rows of built-in rewards (not judge, model, code): completions that score high and low.

`rollick reward test NAME` uses them if no rows are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollick.types import Row

COMPLETION = "completion"
"""The column with the completion; all other columns are passed to the reward."""


def _rows(*completions: str, **columns: Any) -> list[Row]:
    return [{COMPLETION: text, **columns} for text in completions]


_UP_OR_DOWN = {"answer": "B", "choices": ["up", "down"]}
_INSTRUCTIONS = ["punctuation:no_comma", "detectable_format:title"]
_TITLE_WITHOUT_COMMA = {"instruction_id_list": _INSTRUCTIONS, "kwargs": [{}, {}]}
_AGE_SCHEMA = {"properties": {"age": {"type": "integer"}}}
_CHAIN_SUM = {"task": "chain_sum", "settings": '{"seed": 0, "size": 1}', "index": 0, "entry": None}
_ISLANDERS = {"names": ["Zoey", "Ian"], "solution": [True, False]}
EXAMPLES: Mapping[str, Sequence[Row]] = {
    "exact_match": _rows("4", "It is 4", answer="4"),
    "last_number": _rows("First 3, then 4", "4, or rather 5", answer="4"),
    "contains": _rows("The capital is Rome.", "The capital is Paris.", answer="Rome"),
    "multiple_choice": _rows("The answer is (B).", "A or B", "It is down.", **_UP_OR_DOWN),
    "f1": _rows("the Eiffel Tower", "a tower", "Big Ben", answer="Eiffel tower"),
    "math": [
        *_rows("so \\boxed{\\frac{1}{2}}", "#### 0.5", "The answer is 2.", answer="1/2"),
        *_rows("<think>\\boxed{x}</think> It is $2(k+1)$", answer="2k+2"),
    ],
    "knights_knaves": _rows(
        "(1) Zoey is a knight\n(2) Ian is a knave", "Both are knights.", **_ISLANDERS
    ),
    "instructions": _rows("<<Rain>> It falls", "Rain, it falls", **_TITLE_WITHOUT_COMMA),
    "json_schema": _rows('{"age": 3}', '{"age": "3"}', schema=_AGE_SCHEMA),
    "regex": _rows("call 555-0199", "call me", pattern=r"\d{3}-\d{4}"),
    "length": _rows("three words here", "one", min_length=2, max_length=5),
    "tags": _rows("<think>2+2</think><answer>4</answer>", "<answer>4</answer>"),
    "repetition": _rows("every word here is said once", "and so on and so on and so on"),
    "language": _rows(
        "Das Wetter ist heute wirklich schön.", "The weather is fine.", language="de"
    ),
    "reasoning_gym": _rows("<answer>-14282</answer>", "<answer>7</answer>", **_CHAIN_SUM),
}
