"""A few rows for each built-in reward, with completions that score well and badly.

`rollick reward test NAME` runs them where no rows are given. They are documentation that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollick.types import Row

COMPLETION = "completion"
"""The column of these rows that holds the completion; all others are the row's own."""


def _rows(*completions: str, **columns: Any) -> list[Row]:
    return [{COMPLETION: text, **columns} for text in completions]


EXAMPLES: Mapping[str, Sequence[Row]] = {
    "exact_match": _rows("4", "It is 4", answer="4"),
    "last_number": _rows("First 3, then 4", "4, or rather 5", answer="4"),
    "contains": _rows("The capital is Rome.", "The capital is Paris.", answer="Rome"),
    "multiple_choice": _rows(
        "The answer is (B).", "A or B", "It is down.", answer="B", choices=["up", "down"]
    ),
    "f1": _rows("the Eiffel Tower", "a tower", "Big Ben", answer="Eiffel tower"),
    "math": [
        *_rows("so \\boxed{\\frac{1}{2}}", "#### 0.5", "The answer is 2.", answer="1/2"),
        *_rows("<think>\\boxed{x}</think> It is $2(k+1)$", answer="2k+2"),
    ],
    "instructions": _rows(
        "<<Rain>> It falls",
        "Rain, it falls",
        instruction_id_list=["punctuation:no_comma", "detectable_format:title"],
        kwargs=[{}, {}],
    ),
    "json_schema": _rows(
        '{"age": 3}', '{"age": "3"}', schema={"properties": {"age": {"type": "integer"}}}
    ),
    "regex": _rows("call 555-0199", "call me", pattern=r"\d{3}-\d{4}"),
    "length": _rows("three words here", "one", least=2, most=5),
    "tags": _rows("<think>2+2</think><answer>4</answer>", "<answer>4</answer>"),
    "repetition": _rows("every word here is said once", "and so on and so on and so on"),
    "language": _rows(
        "Das Wetter ist heute wirklich schön.", "The weather is fine.", language="de"
    ),
    "reasoning_gym": [
        {
            COMPLETION: f"<answer>{said}</answer>",
            "task": "chain_sum",
            "settings": '{"seed": 0, "size": 1}',
            "index": 0,
            "entry": None,
        }
        for said in ("-14282", "7")
    ],
}
