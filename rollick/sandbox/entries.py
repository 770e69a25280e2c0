"""Which names tests take from the candidate: found by reading, nothing is run. Pure.

    tests (and the reference solution, where a row has one) -> Names: entries, classes, imports

What is decided here decides where code runs, so only what the author of the row wrote is read;
a candidate is never asked.
"""

from __future__ import annotations

import ast
import builtins
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Names:
    """What tests use and do not define themselves."""

    entries: tuple[str, ...]
    """Functions and constants that the candidate must define."""
    classes: tuple[str, ...]
    """Classes of the reference solution: the tests make objects of them, which are not data."""
    imports: str
    """Import statements of the reference that the tests rely on."""


def find_names(tests: Iterable[str], *, setup: str = "", reference: str = "") -> Names:
    """SyntaxError if the tests cannot be parsed; a reference that cannot be is ignored."""
    used, bound = _names_of([setup, *tests])
    defined, classes, imported = _definitions(reference)
    plain = set(dir(builtins)) | sys.stdlib_module_names | bound
    entries = [
        name
        for name in used
        if name not in bound and (name in defined or (name not in plain and name not in imported))
    ]
    return Names(
        entries=tuple(name for name in entries if name not in classes),
        classes=tuple(name for name in entries if name in classes),
        imports="\n".join(dict.fromkeys(imported[name] for name in used if name in imported)),
    )


def modules_used(texts: Iterable[str]) -> set[str]:
    """Modules of the standard library that the tests name without importing them."""
    try:
        used, bound = _names_of(texts)
    except (SyntaxError, ValueError):
        return set()
    known = sys.stdlib_module_names - set(dir(builtins))
    return {name for name in used if name not in bound and name in known}


def parse(code: str) -> ast.Module:
    """The syntax tree; what the compiler only warns of (such as "\\w") is the author's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(code)


def _names_of(texts: Iterable[str]) -> tuple[list[str], set[str]]:
    """Names that are read, in the order of their first use, and names that are bound."""
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


def _definitions(code: str) -> tuple[set[str], set[str], dict[str, str]]:
    """Top-level names of a solution: all that it defines, its classes, its imports by name."""
    defined: set[str] = set()
    classes: set[str] = set()
    imported: dict[str, str] = {}
    try:
        body = parse(code).body
    except (SyntaxError, ValueError):
        return defined, classes, imported
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ClassDef):
            defined.add(node.name)
            classes.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).partition(".")[0]
                imported[name] = ast.unparse(node)
        else:
            stores = (item for item in ast.walk(node) if isinstance(item, ast.Name))
            defined |= {item.id for item in stores if isinstance(item.ctx, ast.Store)}
    return defined, classes, {name: text for name, text in imported.items() if name not in defined}
