"""The reward `code`: extracts the program of a completion and runs the row's tests in a sandbox.

    completion -> extract_code -> tests by the row's columns -> rollick.sandbox -> Score

The first of these columns that a row has defines its tests:

    cases                                  [{input, output}]: a script, its input and output
    calls                                  [{entry, args, expected}]: calls of a function
    test_file (and module)                 a pytest file that imports the candidate
    test, entry_point (and prompt)         HumanEval: a function check(candidate)
    test_list (and test_setup_code, code)  MBPP: assert statements; `code` is the reference

An entry point may be a method, as on LeetCode: `Solution().twoSum`.

A program that fails, hangs or is missing scores 0. A missing or failing sandbox and broken tests
give a failed Score.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rollick.rewards.answers import after_thinking
from rollick.rewards.base import declare
from rollick.sandbox.base import CallCase, Limits, Program, Result, Sandbox, Status, Tests
from rollick.sandbox.checks import ScriptCase, check_asserts, check_scripts
from rollick.sandbox.local import LocalSandbox
from rollick.sandbox.remote import HttpSandbox
from rollick.sandbox.tested_names import parse
from rollick.types import Row, Score, ScoreStatus

VERSION = "2"
FENCE = re.compile(
    r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE
)
PYTHON = ("python", "py", "python3", "")
MAX_MESSAGES = 3
METHOD = re.compile(r"[A-Za-z_]\w*\(\)\.[A-Za-z_]\w*")
"""An entry point on LeetCode: `Solution().twoSum`."""
METHOD_ENTRY = "rollick_entry"
"""The function that calls the method."""
FUTURE_IMPORT = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)
_IMPORTED = "bisect collections copy functools heapq itertools math operator random re string"
PRELUDES: Mapping[str, str] = {
    "leetcode": "".join(
        [
            *(f"import {name}\nfrom {name} import *\n" for name in _IMPORTED.split()),
            "from typing import *\n",
            "from builtins import *\n",  # restores `pow`, which math and operator replace
            "class ListNode:\n    def __init__(self, val=0, next=None):\n"
            "        self.val, self.next = val, next\n",
            "class TreeNode:\n    def __init__(self, val=0, left=None, right=None):\n"
            "        self.val, self.left, self.right = val, left, right\n",
        ]
    )
}
"""Preludes by name. Any other text in a recipe is used as code."""


@dataclass(frozen=True, slots=True)
class CodeSettings:
    """The options of the reward `code` in a recipe."""

    timeout_s: float = 10.0
    """Time limit for all tests of a row together."""
    memory_mb: int = 512
    partial: bool = False
    """The score is the share of passed tests instead of 0 or 1."""
    url: str = ""
    """URL of a sandbox server; if empty, programs run in a sandbox on this machine."""
    allow_unsafe: bool = False
    """Run programs without isolation if this machine has none."""
    prelude: str = ""
    """Code before each program: `leetcode` for the modules that LeetCode imports (typing,
    collections, heapq, math …), ListNode and TreeNode, or code of your own."""


DEFAULTS = CodeSettings()


async def code(completion: Sequence[str], row: Sequence[Row], **options: Any) -> list[Score]:
    """`score_code` of each completion, concurrently. The options are those of CodeSettings."""
    settings = CodeSettings(**options)
    scores = (score_code(*pair, settings) for pair in zip(completion, row, strict=True))
    return await asyncio.gather(*scores)


declare(code, batch=16, cache=True, version=VERSION, options=CodeSettings)


async def score_code(completion: str, row: Row, settings: CodeSettings = DEFAULTS) -> Score:
    """1 if the program passes all tests of the row, else 0; with `partial`, the share passed."""
    cpu_s = int(settings.timeout_s) + 1
    limits = Limits(wall_s=settings.timeout_s, cpu_s=cpu_s, memory_mb=settings.memory_mb)
    program = extract_code(completion, entry=str(row.get("entry_point", "")))
    if program is None:
        return Score(0.0, detail="the completion has no text after its thinking", version=VERSION)
    sandbox = open_sandbox(settings.url, settings.allow_unsafe)
    prelude = PRELUDES.get(settings.prelude, settings.prelude)
    result = await run_tests(sandbox, program, row, limits, prelude=prelude)
    if not result.status.is_conclusive:
        is_unavailable = result.status is Status.UNAVAILABLE
        status = ScoreStatus.UNAVAILABLE if is_unavailable else ScoreStatus.FAILED
        return Score.failed(f"{result.status}: {result.detail}", status=status)
    summary = f"{result.passed} of {len(result.outcomes)} tests, isolation {result.level}"
    failures = dict.fromkeys(outcome.message for outcome in result.outcomes if not outcome.passed)
    share, all_passed = result.pass_rate, float(result.all_passed)
    return Score(
        share if settings.partial else all_passed,
        parts={"passed_share": share, "all_passed": all_passed},
        detail="; ".join([summary, *list(failures)[:MAX_MESSAGES]]),
        version=VERSION,
        isolation=str(result.isolation),
    )


async def run_tests(
    sandbox: Sandbox, program: str, row: Row, limits: Limits, *, prelude: str = ""
) -> Result:
    source = add_prelude(program, prelude)
    if "cases" in row:
        cases = [ScriptCase(str(case["input"]), str(case["output"])) for case in row["cases"]]
        return await check_scripts(sandbox, source, cases=cases, limits=limits)
    if "calls" in row:
        tests = Tests(cases=tuple(map(_make_call_case, row["calls"])))
        return await sandbox.run(Program(source, limits=limits, tests=tests))
    if "test_file" in row:
        tests = Tests(cases=(str(row["test_file"]),), module=str(row.get("module", "solution")))
        return await sandbox.run(Program(source, limits=limits, tests=tests))
    if "test" in row and row.get("entry_point"):
        run = _run_method if METHOD.fullmatch(str(row["entry_point"])) else _run_check
        return await run(sandbox, program, row, limits, prelude)
    if "test_list" in row:
        asserts = [str(test) for test in row["test_list"]]
        setup, reference = (str(row.get(name) or "") for name in ("test_setup_code", "code"))
        return await check_asserts(
            sandbox, source, asserts=asserts, setup=setup, reference=reference, limits=limits
        )
    columns = ", ".join(map(str, row)) or "none"
    return Result.not_run(f"the row has no tests; it has the columns {columns}")


async def _run_check(
    sandbox: Sandbox, program: str, row: Row, limits: Limits, prelude: str
) -> Result:
    """HumanEval: the entry point is a function, which the prompt begins."""
    entry, prompt = str(row["entry_point"]), str(row.get("prompt", ""))
    source = add_prelude(complete_program(program, prompt, entry), prelude)
    # The prompt's helpers come from the row, never from the candidate.
    setup = f"{prompt}\n    pass\n{row['test']}" if prompt else str(row["test"])
    return await check_asserts(
        sandbox, source, asserts=[f"check({entry})"], setup=setup, entries=[entry], limits=limits
    )


async def _run_method(
    sandbox: Sandbox, program: str, row: Row, limits: Limits, prelude: str
) -> Result:
    """LeetCode: the entry point is a method. A prompt that is code has imports and helpers. Tests
    that use these helpers pass objects (linked lists, trees), so they share the candidate's box."""
    call = f"def {METHOD_ENTRY}(*args, **kwargs):\n    return {row['entry_point']}(*args, **kwargs)"
    helpers, test = f"{prelude}\n{_read_prompt_code(str(row.get('prompt', '')))}", str(row["test"])
    try:
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        defined = {node.name for node in parse(helpers).body if isinstance(node, definitions)}
        names = {node.id for node in ast.walk(parse(test)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError) as error:
        return Result.not_run(f"the tests cannot be parsed: {error}")
    uses_helpers = not defined.isdisjoint(names)
    tests = Tests(
        cases=(f"check({METHOD_ENTRY})",),
        setup=test if uses_helpers else f"{helpers}\n{test}",
        entries=(METHOD_ENTRY,),
        shared=uses_helpers,
    )
    source = f"{add_prelude(program, helpers)}\n\n{call}\n"
    return await sandbox.run(Program(source, limits=limits, tests=tests))


def _read_prompt_code(prompt: str) -> str:
    """The code of a prompt; empty if the prompt is not Python."""
    try:
        return ast.unparse(parse(prompt))
    except (SyntaxError, ValueError):
        return ""


def _make_call_case(call: Mapping[str, Any]) -> CallCase:
    kwargs: Mapping[str, Any] = call.get("kwargs", {})
    return CallCase(str(call["entry"]), tuple(call["args"]), call["expected"], kwargs)


def extract_code(completion: str, *, entry: str = "") -> str | None:
    """The program of a completion: the last Python block that defines `entry` (or the last one).
    Thinking is ignored; None if it does not end. Without any block the program is the full text, so
    that the plain continuation of a base model can be scored."""
    text = after_thinking(completion)
    if text is None:
        return None
    blocks = [match[2] for match in FENCE.finditer(text) if match[1].lower() in PYTHON]
    kind, name = ("class", entry.partition("(")[0]) if METHOD.fullmatch(entry) else ("def", entry)
    definition = re.compile(rf"\b{kind} {re.escape(name)}\b")
    defining_blocks = [block for block in blocks if entry and definition.search(block)]
    return (defining_blocks or blocks or [text])[-1]


def add_prelude(program: str, prelude: str) -> str:
    """Insert the prelude before a program, but after its `from __future__` imports."""
    if not prelude:
        return program
    future_imports = "".join(FUTURE_IMPORT.findall(program))
    return f"{future_imports}{prelude}\n{FUTURE_IMPORT.sub('', program)}"


def complete_program(program: str, prompt: str, entry: str) -> str:
    """Prepend the prompt to a program that does not define `entry`, otherwise only its helpers."""
    if not re.search(rf"^(?:async )?def {re.escape(entry)}\b", program, re.MULTILINE):
        return prompt + program
    try:
        nodes = parse(prompt).body
    except (SyntaxError, ValueError):
        return program
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    helpers = [node for node in nodes if not (isinstance(node, functions) and node.name == entry)]
    return "\n".join([*map(ast.unparse, helpers), program])


@cache
def open_sandbox(url: str, allow_unsafe: bool) -> Sandbox:
    """The process-wide sandbox for these arguments, closed at exit."""
    if url:
        return HttpSandbox(url)
    sandbox = LocalSandbox(allow_unsafe=allow_unsafe)
    atexit.register(sandbox.close)
    return sandbox
