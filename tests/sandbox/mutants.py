"""Wrong programs made from right ones: one operator, constant, comparison or return is changed.

reference -> every place that can be changed -> one of them, chosen by the seed -> mutant
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollick.sandbox.tested_names import parse

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
COMPARISONS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass(frozen=True)
class Mutant:
    """A changed program, and what was changed."""

    code: str
    kind: str
    line: int


def mutate(code: str, seed: int) -> Mutant | None:
    """One mutant; None if nothing in a function can be changed. Equal seeds give equal mutants."""
    tree = parse(code)
    places = [place for node in functions(tree) for place in changes(node)]
    if not places:
        return None
    kinds = sorted({kind for kind, _, _ in places})
    kind = random.Random(seed).choice(kinds)
    of_kind = [place for place in places if place[0] == kind]
    kind, line, change = random.Random(seed).choice(of_kind)
    change()
    return Mutant(ast.unparse(ast.fix_missing_locations(tree)), kind, line)


def functions(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from node.body


def changes(root: ast.AST) -> Iterator[tuple[str, int, Callable[[], None]]]:
    for node in ast.walk(root):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            yield "operator", line, lambda node=node: swap(node, OPERATORS)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield "comparison", line, lambda node=node: compare(node)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
            yield "constant", line, lambda node=node: shift(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield "return", line, lambda node=node: drop(node)


def swap(
    node: ast.BinOp | ast.BoolOp | ast.AugAssign, table: dict[type[ast.AST], type[ast.AST]]
) -> None:
    node.op = table[type(node.op)]()  # type: ignore[assignment]


def compare(node: ast.Compare) -> None:
    node.ops[0] = COMPARISONS[type(node.ops[0])]()  # type: ignore[assignment]


def shift(node: ast.Constant) -> None:
    """n becomes -n - 1: one more would leave a bound that is only far away as good as it was."""
    node.value = not node.value if isinstance(node.value, bool) else -node.value - 1


def drop(node: ast.Return) -> None:
    """return x becomes return [x]: it runs on, and the answer is wrong."""
    assert node.value is not None
    node.value = ast.List(elts=[node.value], ctx=ast.Load())
