"""Tools: what a policy may call. Calculator and search; python and MCP servers have their own file.

A tool takes arguments by name and gives text. What it cannot do is a text, too, for the policy to
read: only a tool that breaks raises. Only `python` runs what the policy wrote as a program.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollick.envs.shop.search import Index
from rollick.errors import EnvError

MOST_DIGITS = 60
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
    """One tool: its name, what it is for, its parameters with a word on each, and what it does."""

    name: str
    about: str
    parameters: Mapping[str, str]
    run: Callable[[Mapping[str, Any]], str]

    def schema(self) -> dict[str, Any]:
        """As chat templates and clients write tools."""
        properties = {
            name: {"type": "string", "description": about}
            for name, about in self.parameters.items()
        }
        parameters = {
            "type": "object", "properties": properties, "required": list(self.parameters),
        }  # fmt: skip
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}


def calculator() -> Tool:
    return Tool(
        "calculator",
        "computes an arithmetic expression",
        {"expression": "such as 3 * (4 + 5) / 2"},
        lambda arguments: calculate(str(arguments.get("expression", ""))),
    )


def calculate(expression: str) -> str:
    """The value of an expression of numbers and + - * / // % **; else what is wrong with it."""
    try:
        if len(expression) > 500:
            raise ValueError("it is too long")
        tree = ast.parse(expression.replace(",", "").replace("^", "**").strip(), mode="eval")
        value = _value(tree.body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as bad:
        return f"error: {bad.msg if isinstance(bad, SyntaxError) else bad}"
    if isinstance(value, float):
        return f"{value:.10g}"
    return str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 100 or abs(left) > 10**6):
            raise ValueError("the power is too large")
        value = OPERATIONS[type(node.op)](left, right)
        if isinstance(value, complex):
            raise ValueError("the result is not a real number")
        if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            raise ValueError("the result is too large")
        return value
    raise ValueError("only numbers and + - * / // % ** can be used")


def search(corpus: Path, *, results: int = 3) -> Tool:
    """Finds texts in a .jsonl file with a column `text`, or in the lines of a .txt file."""

    def find(arguments: Mapping[str, Any]) -> str:
        texts, index = _read_corpus(corpus)
        found = index.search(str(arguments.get("query", "")), limit=results)
        return "\n".join(f"- {texts[place]}" for place in found) or "nothing was found"

    return Tool("search", "finds texts", {"query": "words to look for"}, find)


@lru_cache(8)
def _read_corpus(path: Path) -> tuple[Sequence[str], Index]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] if path.suffix == ".jsonl" else line for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvError(
            f"the corpus {path} cannot be read: {error}",
            fix="give a .txt file, or a .jsonl file with a column text",
        ) from error
    return texts, Index(texts)
