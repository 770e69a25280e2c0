"""The reward `code`: takes the program out of a completion and runs the row's tests in a sandbox.

    completion -> extract_code -> plan (by the row's columns) -> rollick.sandbox -> Score

The columns say which kind of tests a row has, in this order:

    cases                                  [{input, output}]: a script, input and output
    calls                                  [{entry, args, expected}]: a function, as data
    test_file (and module)                 a pytest file that imports the candidate
    test, entry_point, prompt              HumanEval's: a function check(candidate)
    test_list (and test_setup_code, code)  MBPP's: assert statements; `code` is the reference

A program that fails, hangs or is not there scores 0. A sandbox that is not there, that failed, or
tests that are broken are a failed Score, never the number 0.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rollick.rewards.base import declare
from rollick.sandbox.base import Call, Isolation, Limits, Sandbox, Status
from rollick.sandbox.entries import parse
from rollick.sandbox.verdict import (
    Case,
    Verdict,
    check_asserts,
    check_cases,
    check_function,
    check_pytest,
)
from rollick.types import Row, Score

VERSION = "1"
FENCE = re.compile(
    r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3", "")
THINK_END = "</think>"
SHOWN_MESSAGES = 3


async def code(
    completion: Sequence[str],
    row: Sequence[Row],
    *,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    partial: bool = False,
    url: str = "",
    allow_unsafe: bool = False,
) -> list[Score]:
    """Of each completion `score_code`, which says what the options are; side by side."""
    scored = (
        score_code(
            said,
            of,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            partial=partial,
            url=url,
            allow_unsafe=allow_unsafe,
        )
        for said, of in zip(completion, row, strict=True)
    )
    return await asyncio.gather(*scored)


declare(code, batch=16, cache=True, version=VERSION)


async def score_code(
    completion: str,
    row: Row,
    *,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    partial: bool = False,
    url: str = "",
    allow_unsafe: bool = False,
) -> Score:
    """1 if the program of the completion passes all tests of its row, else 0.

    `partial` gives the share of the tests that pass instead. `timeout_s` is for all tests of a row
    together. `url` names a sandbox server; without it the boxes are on this machine, and
    `allow_unsafe` lets programs run without isolation where the machine has none.
    """
    limits = Limits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_mb=memory_mb)
    sandbox = find_sandbox(url, allow_unsafe)
    verdict = await judge(sandbox, completion, row, limits)
    if not verdict.judged:
        return Score.failed(f"{verdict.status}: {verdict.detail}")
    value = verdict.share if partial else float(verdict.all_passed)
    return Score(
        value,
        parts={"passed_share": verdict.share, "all_passed": float(verdict.all_passed)},
        detail=describe(verdict),
        version=VERSION,
        isolation=str(verdict.isolation),
    )


def describe(verdict: Verdict) -> str:
    """How it went, with the first reasons; a weaker isolation is always told."""
    said = f"{verdict.passed} of {verdict.total} tests, isolation {verdict.isolation}"
    failed = [outcome.message for outcome in verdict.outcomes if not outcome.passed]
    reasons = list(dict.fromkeys(failed))[:SHOWN_MESSAGES]
    return "; ".join([said, *reasons])


async def judge(sandbox: Sandbox, completion: str, row: Row, limits: Limits) -> Verdict:
    """Run the tests of a row on the program of a completion."""
    entry = str(row.get("entry_point", ""))
    program = extract_code(completion, entry=entry)
    if "cases" in row:
        cases = [Case(str(case["input"]), str(case["output"])) for case in row["cases"]]
        return await check_cases(sandbox, program, cases=cases, limits=limits)
    if "calls" in row:
        return await check_function(sandbox, program, calls=read_calls(row["calls"]), limits=limits)
    if "test_file" in row:
        module = str(row.get("module", "solution"))
        file = str(row["test_file"])
        return await check_pytest(sandbox, program, file=file, module=module, limits=limits)
    if "test" in row and entry:
        prompt = str(row.get("prompt", ""))
        return await check_asserts(
            sandbox,
            complete(program, prompt, entry),
            asserts=[f"check({entry})"],
            # The prompt's helpers come from the row, never from the candidate.
            setup=f"{prompt}\n    pass\n{row['test']}" if prompt else str(row["test"]),
            entries=[entry],
            limits=limits,
        )
    if "test_list" in row:
        return await check_asserts(
            sandbox,
            program,
            asserts=[str(test) for test in row["test_list"]],
            setup=str(row.get("test_setup_code", "") or ""),
            reference=str(row.get("code", "") or ""),
            limits=limits,
        )
    detail = f"the row has no tests; it has the columns {', '.join(map(str, row)) or 'none'}"
    return Verdict((), Status.INFRASTRUCTURE, Isolation.NONE, detail=detail)


def read_calls(calls: Sequence[Mapping[str, Any]]) -> list[Call]:
    return [
        Call(str(call["entry"]), tuple(call["args"]), call["expected"], call.get("kwargs", {}))
        for call in calls
    ]


def extract_code(completion: str, *, entry: str = "") -> str:
    """The program of a completion: the last Python block that defines `entry` (or the last one).

    What is thought before </think> does not count. Without any block the whole text is taken, so
    that a base model's plain continuation can be scored.
    """
    text = completion.rpartition(THINK_END)[2]
    blocks = [found[2] for found in FENCE.finditer(text) if found[1].lower() in PYTHON]
    if not blocks:
        return text
    wanted = re.compile(rf"\bdef {re.escape(entry)}\b")
    defining = [block for block in blocks if entry and wanted.search(block)]
    return (defining or blocks)[-1]


def complete(program: str, prompt: str, entry: str) -> str:
    """A program that defines the entry, put after the prompt's helpers; else the prompt's
    continuation."""
    if not re.search(rf"^(?:async )?def {re.escape(entry)}\b", program, re.MULTILINE):
        return prompt + program
    try:
        helpers = [
            node
            for node in parse(prompt).body
            if not (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry)
        ]
    except (SyntaxError, ValueError):
        return program
    return "\n".join([*(ast.unparse(node) for node in helpers), program])


@cache
def find_sandbox(url: str, allow_unsafe: bool) -> Sandbox:
    """One for this process; its waiting boxes end with it."""
    if url:
        from rollick.sandbox.remote import HttpSandbox

        return HttpSandbox(url)
    from rollick.sandbox.local import LocalSandbox

    sandbox = LocalSandbox(allow_unsafe=allow_unsafe)
    atexit.register(sandbox.close)
    return sandbox
