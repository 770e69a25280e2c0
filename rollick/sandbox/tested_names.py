"""Finds the names of the candidate that tests use. Only parses code, never runs it.

The result decides in which box code runs, so only the row's code is parsed, never the untrusted
candidate.
"""

from __future__ import annotations

import ast
import builtins
import sys
import warnings
from collections.abc import Iterable, Sequence

from rollick.sandbox.base import Tests


def plan_asserts(
    asserts: Sequence[str], *, setup: str = "", reference: str = "", entries: Sequence[str] = ()
) -> Tests:
    """Decide which names come from the candidate, and whether the box is shared: if the tests
    create objects of the reference's classes. Raises SyntaxError if the tests cannot be parsed;
    ignores an invalid reference."""
    used, bound = _collect_names([setup, *asserts])
    defined, classes, imported = _collect_definitions(reference)
    provided = set(dir(builtins)) | sys.stdlib_module_names | imported.keys()
    free = [name for name in used if name not in bound]
    names = [name for name in free if name in defined or name not in provided]
    functions = [name for name in names if name not in classes]
    imports = "\n".join(dict.fromkeys(imported[name] for name in used if name in imported))
    shared = not classes.isdisjoint(names)
    return Tests(
        cases=tuple(asserts),
        setup=f"{imports}\n{setup}" if imports and not shared else setup,
        entries=tuple(dict.fromkeys([*functions, *entries])),
        shared=shared,
    )


def find_used_modules(texts: Iterable[str]) -> set[str]:
    """Standard-library modules that the tests use without importing them."""
    try:
        used, bound = _collect_names(texts)
    except (SyntaxError, ValueError):
        return set()
    return (set(used) - bound) & (sys.stdlib_module_names - set(dir(builtins)))


def parse(code: str) -> ast.Module:
    """Parse without the compiler's warnings (such as for "\\w")."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _collect_names(texts: Iterable[str]) -> tuple[list[str], set[str]]:
    """(names that are read, in order of first use; names that are bound)."""
    used: dict[str, None] = {}
    bound: set[str] = set()
    for text in texts:
        for node in ast.walk(parse(text)):
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load):
                    used[node.id] = None
                else:
                    bound.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
    return list(used), bound


def _collect_definitions(code: str) -> tuple[set[str], set[str], dict[str, str]]:
    """Top-level names of a solution: all definitions, classes, and imports by name."""
    defined: set[str] = set()
    classes: set[str] = set()
    imported: dict[str, str] = {}
    try:
        body = parse(code).body
    except (SyntaxError, ValueError):
        return defined, classes, imported
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                imported[name] = ast.unparse(node)
        else:
            names = (item for item in ast.walk(node) if isinstance(item, ast.Name))
            defined |= {item.id for item in names if isinstance(item.ctx, ast.Store)}
    return defined, classes, {name: text for name, text in imported.items() if name not in defined}
