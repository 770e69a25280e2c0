"""Finds what `file.py:name` and `package.module:name` refer to, by parsing, never by importing.

`rollick check` must not run user code (or need its imports), so the file is parsed and searched for
the name. `check --deep` finds the problems that only an import shows.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rollick.config.names import REFERENCE
from rollick.config.problems import did_you_mean
from rollick.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function can be called with by name. `takes_any`: it has **kwargs."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    """Those without a default."""
    unfillable: tuple[str, ...]
    """Parameters without a default that can only be given by position."""
    takes_any: bool


@dataclass(frozen=True, slots=True)
class Definition:
    """A name at the top of a file. `other`: assigned or imported, so its kind is not known."""

    kind: Literal["function", "class", "other"]
    parameters: Parameters | None = None


UNKNOWN = Definition("other")


def read_reference(reference: str, base: Path) -> Definition:
    """What `reference` names; ConfigError if the file or the name does not exist."""
    match = REFERENCE.match(reference)
    assert match is not None, reference
    where, name = match["where"], match["attribute"]
    path = base / where if where.endswith(".py") else _module_file(where)
    if path is None:
        return UNKNOWN
    body = _parse(path, where).body
    definitions = dict(_definitions(body))
    _add_declared_options(body, definitions)
    if name in definitions:
        return definitions[name]
    if "*" in definitions:
        return UNKNOWN
    known = [key for key in definitions if not key.startswith("_")]
    fix = did_you_mean(name, known) or f"it defines: {', '.join(known) or 'nothing'}"
    raise ConfigError(f"{where} does not define {name!r}", fix=fix)


def parameters_of(function: Callable[..., object]) -> Parameters | None:
    """The parameters of a Python function; None if they are not known."""
    try:
        given = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: item for name, item in given.items() if item.kind not in variadic}
    required = [name for name, item in named.items() if item.default is item.empty]
    by_position = [name for name, item in named.items() if item.kind is item.POSITIONAL_ONLY]
    return Parameters(
        names=tuple(name for name in named if name not in by_position),
        required=tuple(required),
        unfillable=tuple(name for name in by_position if name in required),
        takes_any=any(item.kind is item.VAR_KEYWORD for item in given.values()),
    )


def _module_file(where: str) -> Path | None:
    """The file of a module, without importing it. None if it is not made of Python files."""
    top, *rest = where.split(".")
    try:
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
    except ValueError:  # A module that was not imported from anywhere, such as __main__.
        spec = None
    if spec is None:
        fix = "a file goes by its path, such as rewards.py:name, relative to the recipe"
        raise ConfigError(f"there is no module {top!r}", fix=fix)
    if not rest or spec.submodule_search_locations is None:
        is_python = spec.has_location and str(spec.origin).endswith(".py") and not rest
        return Path(str(spec.origin)) if is_python else None
    for folder in spec.submodule_search_locations:
        inside = Path(folder).joinpath(*rest)
        for file in (inside.with_name(f"{inside.name}.py"), inside / "__init__.py"):
            if file.is_file():
                return file
    raise ConfigError(f"there is no module {where!r}", fix=f"{top!r} exists, the rest does not")


def _parse(path: Path, where: str) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        siblings = [file.name for file in path.parent.glob("*.py")]
        fix = did_you_mean(path.name, siblings) or "give its path relative to the recipe"
        raise ConfigError(f"there is no file {where!r}", fix=fix) from None
    except SyntaxError as error:
        message = f"{where} is not valid Python: line {error.lineno}: {error.msg}"
        raise ConfigError(message) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _definitions(body: Sequence[ast.AST]) -> Iterator[tuple[str, Definition]]:
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
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While() | ast.ExceptHandler():
                yield from _definitions(list(ast.iter_child_nodes(statement)))
            case _:
                for name in ast.walk(statement):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        yield name.id, UNKNOWN


def _parameters(arguments: ast.arguments) -> Parameters:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [item for item, default in keywords if default is None]
    return Parameters(
        names=tuple(item.arg for item in (*arguments.args, *arguments.kwonlyargs)),
        required=tuple(item.arg for item in required),
        unfillable=tuple(item.arg for item in arguments.posonlyargs if item in required),
        takes_any=arguments.kwarg is not None,
    )


def _add_declared_options(body: list[ast.stmt], definitions: dict[str, Definition]) -> None:
    """`declare(reward, options=Class)`: the fields of the class are parameters of the reward."""
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for statement in body:
        match statement:
            case ast.Expr(ast.Call(ast.Name("declare"), [ast.Name(reward), *_], keywords)):
                options = [item.value for item in keywords if item.arg == "options"]
            case _:
                continue
        definition = definitions.get(reward, UNKNOWN)
        if definition.parameters is None or not options or not isinstance(options[0], ast.Name):
            continue
        settings = classes.get(options[0].id)
        fields = {
            item.target.id: item.value
            for item in (settings.body if settings else ())
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        parameters = replace(
            definition.parameters,
            names=(*definition.parameters.names, *fields),
            required=(
                *definition.parameters.required,
                *(name for name, default in fields.items() if default is None),
            ),
            takes_any=not fields,
        )
        definitions[reward] = replace(definition, parameters=parameters)
