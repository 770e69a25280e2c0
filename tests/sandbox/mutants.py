"""Makes wrong programs from correct ones by changing one operator, constant, comparison or return.

reference -> all possible changes -> one of them, chosen by the seed -> mutant
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
    """A changed program, with the kind and the line of the change."""

    code: str
    kind: str
    line: int


def mutate(code: str, seed: int) -> Mutant | None:
    """One mutant; None if nothing in a function can be changed. Equal seeds give equal mutants."""
    tree = parse(code)
    changes = [entry for node in iterate_function_bodies(tree) for entry in find_changes(node)]
    if not changes:
        return None
    kinds = sorted({kind for kind, _, _ in changes})
    kind = random.Random(seed).choice(kinds)
    same_kind = [entry for entry in changes if entry[0] == kind]
    kind, line, change = random.Random(seed).choice(same_kind)
    change()
    return Mutant(ast.unparse(ast.fix_missing_locations(tree)), kind, line)


def iterate_function_bodies(tree: ast.Module) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from node.body


def find_changes(root: ast.AST) -> Iterator[tuple[str, int, Callable[[], None]]]:
    for node in ast.walk(root):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            yield "operator", line, lambda node=node: swap_operator(node, OPERATORS)
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield "comparison", line, lambda node=node: invert_comparison(node)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
            yield "constant", line, lambda node=node: change_constant(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield "return", line, lambda node=node: wrap_return(node)


def swap_operator(
    node: ast.BinOp | ast.BoolOp | ast.AugAssign, table: dict[type[ast.AST], type[ast.AST]]
) -> None:
    node.op = table[type(node.op)]()  # type: ignore[assignment]


def invert_comparison(node: ast.Compare) -> None:
    node.ops[0] = COMPARISONS[type(node.ops[0])]()  # type: ignore[assignment]


def change_constant(node: ast.Constant) -> None:
    """n becomes -n - 1. n + 1 might not change the result if n is only a generous bound."""
    node.value = not node.value if isinstance(node.value, bool) else -node.value - 1


def wrap_return(node: ast.Return) -> None:
    """return x becomes return [x]: the function still returns, but the value is wrong."""
    assert node.value is not None
    node.value = ast.List(elts=[node.value], ctx=ast.Load())
