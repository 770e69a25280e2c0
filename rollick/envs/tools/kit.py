"""Tools that a policy can call: the Tool class, calculator, search and python.

A tool takes named arguments and returns text. An invalid request, or a program that fails or times
out, returns an error text for the policy; a broken tool (such as a missing sandbox) raises, and the
sample gets a status and no score. Only the tool `python` runs programs of the policy.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import json
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollick.envs.shop.search import SearchIndex
from rollick.errors import EnvError
from rollick.sandbox.base import Limits, Program, Result, Status
from rollick.sandbox.local import LocalSandbox

MAX_DIGITS = 60
_THREAD_LOCAL = threading.local()
"""One sandbox per thread: a sandbox is not thread-safe."""
OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: name, description, description of each parameter, and function."""

    name: str
    description: str
    parameters: Mapping[str, str]
    run: Callable[[Mapping[str, Any]], str]
    start_reply: Callable[[], None] = lambda: None
    """Called before the calls of a reply are run."""

    def schema(self) -> dict[str, Any]:
        """The JSON schema for chat templates and clients."""
        properties = {
            name: {"type": "string", "description": description}
            for name, description in self.parameters.items()
        }
        required = list(self.parameters)
        parameters = {"type": "object", "properties": properties, "required": required}
        return function_schema(self.name, self.description, parameters)


def function_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def calculator() -> Tool:
    return Tool(
        "calculator",
        "computes an arithmetic expression",
        {"expression": "such as 3 * (4 + 5) / 2"},
        lambda arguments: calculate(str(arguments.get("expression", ""))),
    )


def calculate(expression: str) -> str:
    """The value of an expression of numbers and + - * / // % **, or an error text."""
    try:
        if len(expression) > 500:
            raise ValueError("it is too long")
        tree = ast.parse(expression.replace(",", "").replace("^", "**").strip(), mode="eval")
        value = _evaluate(tree.body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as bad:
        return f"error: {bad.msg if isinstance(bad, SyntaxError) else bad}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _evaluate(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 100 or abs(left) > 10**6):
            raise ValueError("the power is too large")
        value = OPERATIONS[type(node.op)](left, right)
        if isinstance(value, complex):
            raise ValueError("the result is not a real number")
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise ValueError("the result is too large")
        return value
    raise ValueError("only numbers and + - * / // % ** can be used")


def search(corpus: Path, *, results: int = 3) -> Tool:
    """Search over a .jsonl file with a column `text`, or the lines of a .txt file."""

    def find(arguments: Mapping[str, Any]) -> str:
        texts, index = _read_corpus(corpus)
        hits = index.search(str(arguments.get("query", "")), limit=results)
        return "\n".join(f"- {texts[hit]}" for hit in hits) or "nothing was found"

    return Tool("search", "finds texts", {"query": "words to look for"}, find)


@lru_cache(8)
def _read_corpus(path: Path) -> tuple[Sequence[str], SearchIndex]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] if path.suffix == ".jsonl" else line for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "use a .txt file, or a .jsonl file with a column text"
        raise EnvError(f"cannot read the corpus {path}: {error}", fix=fix) from error
    return texts, SearchIndex(texts)


def python(*, timeout_s: float = 5.0, allow_unsafe: bool = False) -> Tool:
    """`timeout_s` is for all programs of a reply together. `allow_unsafe`: run programs even if the
    machine has no isolation."""
    runner = PythonRunner(timeout_s, allow_unsafe)
    description = "runs a Python program; what it prints comes back"
    return Tool("python", description, {"code": "the program"}, runner.run, runner.start_reply)


@dataclass(slots=True)
class PythonRunner:
    """Runs programs within one time limit for each reply. Otherwise a reply with many slow programs
    would exceed the time of its step, and its sample would be masked instead of scored."""

    timeout_s: float
    allow_unsafe: bool
    spent_s: float = 0.0

    def start_reply(self) -> None:
        self.spent_s = 0.0

    def run(self, arguments: Mapping[str, Any]) -> str:
        """The output of a program, and its error if it failed. EnvError if it did not run."""
        left_s = self.timeout_s - self.spent_s
        if left_s <= 0:
            return f"error: {Status.TIMEOUT} (all programs of a reply have {self.timeout_s:g} s)"
        limits = Limits(wall_s=left_s, cpu_s=int(left_s) + 1)
        program = Program(str(arguments.get("code", "")), limits=limits)
        started = time.monotonic()
        result = asyncio.run(_sandbox(self.allow_unsafe).run(program))
        self.spent_s += time.monotonic() - started
        if not result.status.is_conclusive:
            text = f"the sandbox could not run the program ({result.status}): {result.detail}"
            raise EnvError(text)
        return describe_result(result)


def describe_result(result: Result) -> str:
    """What the policy sees of a program."""
    printed = result.stdout.strip()
    if result.status is Status.OK:
        return printed or "(it printed nothing)"
    last_line = result.stderr.strip().rpartition("\n")[2] if result.status is Status.FAILED else ""
    return "\n".join(filter(None, [printed, f"error: {last_line or result.status}"]))


def _sandbox(allow_unsafe: bool) -> LocalSandbox:
    sandboxes: dict[bool, LocalSandbox] = _THREAD_LOCAL.__dict__.setdefault("sandboxes", {})
    if allow_unsafe not in sandboxes:
        sandboxes[allow_unsafe] = LocalSandbox(warm=1, concurrency=1, allow_unsafe=allow_unsafe)
        atexit.register(sandboxes[allow_unsafe].close)
    return sandboxes[allow_unsafe]
