"""What `file.py:name` and `package.module:name` stand for, found by reading, never by importing.

So that `rollick check` runs no code of the user's (and needs none of its imports), the file is
parsed and searched for the name. What only an import can tell is left to `check --deep`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollick.config.names import REFERENCE
from rollick.config.problems import did_you_mean
from rollick.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function can be called with by name."""

    names: tuple[str, ...]
    """Parameters that can be given by name."""
    unfillable: tuple[str, ...]
    """Parameters without a default that can only be given by position."""
    takes_any: bool
    """Whether there is a **kwargs."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A name at the top of a file. `other`: assigned or imported, so its kind is not known."""

    kind: Literal["function", "class", "other"]
    parameters: Parameters | None = None


UNKNOWN = Definition("other")


def read_reference(reference: str, base: Path) -> Definition:
    """What `reference` names; ConfigError if the file or the name is not there."""
    match = REFERENCE.match(reference)
    assert match is not None, reference
    where, name = match["where"], match["attribute"]
    path = base / where if where.endswith(".py") else _module_file(where)
    if path is None:
        return UNKNOWN
    definitions = dict(_definitions(_parse(path, where).body))
    if name in definitions:
        return definitions[name]
    if "*" in definitions:
        return UNKNOWN
    known = [key for key in definitions if not key.startswith("_")]
    raise ConfigError(
        f"{where} does not define {name!r}",
        fix=did_you_mean(name, known) or f"it defines: {', '.join(known) or 'nothing'}",
    )


def _module_file(where: str) -> Path | None:
    """The file of a module, without importing it. None if it is not made of Python files."""
    top, *rest = where.split(".")
    try:
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
    except ValueError:  # A module that was not imported from anywhere, such as __main__.
        spec = None
    if spec is None:
        raise ConfigError(
            f"there is no module {top!r}",
            fix="a file goes by its path, such as rewards.py:name, relative to the recipe",
        )
    if not rest or spec.submodule_search_locations is None:
        is_python = spec.has_location and str(spec.origin).endswith(".py") and not rest
        return Path(str(spec.origin)) if is_python else None
    for folder in spec.submodule_search_locations:
        inside = Path(folder).joinpath(*rest)
        for file in (inside.with_name(f"{inside.name}.py"), inside / "__init__.py"):
            if file.is_file():
                return file
    raise ConfigError(f"there is no module {where!r}", fix=f"{top!r} is there, the rest is not")


def _parse(path: Path, where: str) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        siblings = [file.name for file in path.parent.glob("*.py")]
        advice = did_you_mean(path.name, siblings)
        raise ConfigError(
            f"there is no file {where!r}", fix=advice or "give its path relative to the recipe"
        ) from None
    except SyntaxError as error:
        raise ConfigError(
            f"{where} is not valid Python: line {error.lineno}: {error.msg}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Definition]]:
    """Names bound at the top of a module, also inside if, try and with."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                # A decorator may change the parameters; then they are not known.
                known = None if statement.decorator_list else _parameters(statement.args)
                yield statement.name, Definition("function", known)
            case ast.ClassDef():
                yield statement.name, Definition("class")
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.split(".")[0], UNKNOWN
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                yield from _definitions(_inner_statements(statement))
            case _:
                for name in ast.walk(statement):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        yield name.id, UNKNOWN


def _inner_statements(statement: ast.stmt) -> list[ast.stmt]:
    handlers = [
        item for item in ast.iter_child_nodes(statement) if isinstance(item, ast.ExceptHandler)
    ]
    inner = [item for handler in handlers for item in handler.body]
    return [item for item in ast.iter_child_nodes(statement) if isinstance(item, ast.stmt)] + inner


def _parameters(arguments: ast.arguments) -> Parameters:
    required = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return Parameters(
        names=tuple(item.arg for item in (*arguments.args, *arguments.kwonlyargs)),
        unfillable=tuple(item.arg for item in arguments.posonlyargs[: max(0, required)]),
        takes_any=arguments.kwarg is not None,
    )
