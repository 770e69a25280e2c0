"""The reward `code`: from a completion to a score, in real boxes."""

from __future__ import annotations

from typing import Any

import pytest

from rollick.rewards import code as module
from rollick.rewards.code import complete, extract_code, score_code
from rollick.sandbox.base import Isolation
from rollick.sandbox.host import Host
from rollick.sandbox.local import LocalSandbox

MBPP_ROW = {
    "text": "Write a function that adds.",
    "code": "def add(a, b):\n    return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"],
}
HUMANEVAL_ROW = {
    "prompt": """import math

def double(x):
    return 2 * x

def quad(x):
    '''Four times x.'''
""",
    "test": """def check(candidate):
    assert candidate(2) == 8
    assert quad(1) == double(2)
""",
    "entry_point": "quad",
}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("def f(): ...", "def f(): ..."),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nand\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\nprints\n```text\n1\n```", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>```python\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("", ""),
    ],
)
def test_the_program_of_a_completion_is_found(completion: str, expected: str) -> None:
    assert extract_code(completion) == expected


def test_the_block_that_defines_the_entry_is_taken() -> None:
    text = "```python\ndef f(): ...\n```\nUse it:\n```python\nprint(f())\n```"
    assert extract_code(text, entry="f") == "def f(): ...\n"


def test_a_continuation_is_put_after_its_prompt_and_a_whole_function_after_its_helpers() -> None:
    prompt = HUMANEVAL_ROW["prompt"]
    assert complete("    return 4 * x", prompt, "quad") == prompt + "    return 4 * x"
    whole = complete("def quad(x):\n    return double(double(x))", prompt, "quad")
    assert whole.count("def quad") == 1
    assert "def double" in whole


async def test_a_right_program_scores_one_and_says_how_it_was_isolated() -> None:
    score = await score_code("```python\ndef add(a, b):\n    return a + b\n```", MBPP_ROW)
    assert (score.value, score.ok) == (1.0, True)
    assert score.parts == {"passed_share": 1.0, "all_passed": 1.0}
    assert score.isolation in ("full", "user")


async def test_a_program_that_passes_half_scores_nothing_unless_parts_count() -> None:
    wrong = "```python\ndef add(a, b):\n    return 4\n```"
    assert (await score_code(wrong, MBPP_ROW)).value == 0.0
    score = await score_code(wrong, MBPP_ROW, partial=True)
    assert (score.value, score.parts) == (0.5, {"passed_share": 0.5, "all_passed": 0.0})


@pytest.mark.parametrize(
    "completion", ["I do not know.", "", "```python\nimport os; os._exit(0)\n```"]
)
async def test_no_program_is_a_judgement(completion: str) -> None:
    score = await score_code(completion, MBPP_ROW)
    assert (score.ok, score.value) == (True, 0.0)


async def test_a_program_that_hangs_is_a_judgement() -> None:
    score = await score_code("```python\nwhile True: pass\n```", MBPP_ROW, timeout_s=0.5)
    assert (score.ok, score.value) == (True, 0.0)
    assert "timeout" in score.detail


@pytest.mark.parametrize(
    "answer", ["    return 4 * x\n", "```python\ndef quad(x):\n    return 4 * x\n```"]
)
async def test_rows_of_humaneval_are_scored(answer: str) -> None:
    assert (await score_code(answer, HUMANEVAL_ROW)).value == 1.0


async def test_helpers_of_the_prompt_are_not_the_candidates() -> None:
    cheat = (
        "```python\ndef double(x):\n    return 3\ndef quad(x):\n    return 8 if x == 2 else 3\n```"
    )
    assert (await score_code(cheat, HUMANEVAL_ROW)).value == 0.0


@pytest.mark.parametrize(
    ("row", "program"),
    [
        ({"cases": [{"input": "2 3", "output": "5"}]}, "print(sum(map(int, input().split())))"),
        ({"calls": [{"entry": "f", "args": [2], "expected": 4}]}, "def f(x):\n    return x * x"),
        (
            {"test_file": "from solution import f\ndef test_f():\n    assert f(2) == 4\n"},
            "def f(x):\n    return x * x",
        ),
    ],
)
async def test_other_kinds_of_tests_are_scored(row: dict[str, Any], program: str) -> None:
    score = await score_code(f"```python\n{program}\n```", row, timeout_s=60.0)
    assert score.value == 1.0, score


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"test_list": ["assert add(1"]},
        {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": "import nothing_like_it"},
    ],
)
async def test_rows_without_tests_or_with_broken_ones_fail_and_do_not_score(
    row: dict[str, Any],
) -> None:
    score = await score_code("```python\ndef add(a, b):\n    return a + b\n```", row)
    assert not score.ok


async def test_a_machine_without_isolation_fails_and_does_not_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing = LocalSandbox(host=Host(Isolation.NONE, "no namespaces"))
    monkeypatch.setattr(module, "find_sandbox", lambda url, allow_unsafe: refusing)
    score = await score_code("```python\ndef add(a, b):\n    return a + b\n```", MBPP_ROW)
    assert not score.ok
    assert "no namespaces" in score.detail
