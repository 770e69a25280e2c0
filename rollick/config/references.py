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
    """The parameters of a function."""

    names: tuple[str, ...]
    """Those that can be passed by name."""
    required: tuple[str, ...]
    """Those without a default."""
    required_positional_only: tuple[str, ...]
    has_kwargs: bool
    """Whether it takes **kwargs."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A top-level name of a module. `other`: assigned or imported, so its kind is unknown."""

    kind: Literal["function", "class", "other"]
    parameters: Parameters | None = None


UNKNOWN = Definition("other")


def read_reference(reference: str, base_dir: Path) -> Definition:
    """The definition that `reference` names; ConfigError if the file or name does not exist."""
    match = REFERENCE.match(reference)
    assert match is not None, reference
    module, name = match["module"], match["attribute"]
    path = base_dir / module if module.endswith(".py") else _find_module_file(module)
    if path is None:
        return UNKNOWN
    body = _parse_file(path, module).body
    definitions = dict(_find_definitions(body))
    _add_declared_options(body, definitions)
    if name in definitions:
        return definitions[name]
    if "*" in definitions:
        return UNKNOWN
    public_names = [key for key in definitions if not key.startswith("_")]
    fix = did_you_mean(name, public_names) or f"it defines: {', '.join(public_names) or 'nothing'}"
    raise ConfigError(f"{module} does not define {name!r}", fix=fix)


def parameters_of(function: Callable[..., object]) -> Parameters | None:
    """The parameters of a Python function; None if they are unknown."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: item for name, item in parameters.items() if item.kind not in variadic}
    required = [name for name, item in named.items() if item.default is item.empty]
    positional_only = [name for name, item in named.items() if item.kind is item.POSITIONAL_ONLY]
    return Parameters(
        names=tuple(name for name in named if name not in positional_only),
        required=tuple(required),
        required_positional_only=tuple(name for name in positional_only if name in required),
        has_kwargs=any(item.kind is item.VAR_KEYWORD for item in parameters.values()),
    )


def _find_module_file(module: str) -> Path | None:
    """The file of a module, without importing it; None if it is not a Python file."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
    except ValueError:  # A module without a spec, such as __main__.
        spec = None
    if spec is None:
        fix = "to use a file, write its path relative to the recipe, such as rewards.py:name"
        raise ConfigError(f"there is no module {top!r}", fix=fix)
    if not rest or spec.submodule_search_locations is None:
        is_python = spec.has_location and str(spec.origin).endswith(".py") and not rest
        return Path(str(spec.origin)) if is_python else None
    for folder in spec.submodule_search_locations:
        path = Path(folder).joinpath(*rest)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise ConfigError(f"package {top!r} exists, but has no submodule {'.'.join(rest)!r}")


def _parse_file(path: Path, name: str) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        siblings = [file.name for file in path.parent.glob("*.py")]
        fix = did_you_mean(path.name, siblings) or "give its path relative to the recipe"
        raise ConfigError(f"there is no file {name!r}", fix=fix) from None
    except SyntaxError as error:
        message = f"{name} is not valid Python: line {error.lineno}: {error.msg}"
        raise ConfigError(message) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error


def _find_definitions(body: Sequence[ast.AST]) -> Iterator[tuple[str, Definition]]:
    """Names bound at the top level of a module, also inside if, try and with."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                # A decorator may change the parameters.
                parameters = None if statement.decorator_list else _read_parameters(statement.args)
                yield statement.name, Definition("function", parameters)
            case ast.ClassDef():
                yield statement.name, Definition("class")
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.split(".")[0], UNKNOWN
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While() | ast.ExceptHandler():
                yield from _find_definitions(list(ast.iter_child_nodes(statement)))
            case _:
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        yield node.id, UNKNOWN


def _read_parameters(arguments: ast.arguments) -> Parameters:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    required += [item for item, default in keywords if default is None]
    return Parameters(
        names=tuple(item.arg for item in (*arguments.args, *arguments.kwonlyargs)),
        required=tuple(item.arg for item in required),
        required_positional_only=tuple(
            item.arg for item in arguments.posonlyargs if item in required
        ),
        has_kwargs=arguments.kwarg is not None,
    )


def _add_declared_options(body: list[ast.stmt], definitions: dict[str, Definition]) -> None:
    """Add the fields of Class in `declare(reward, options=Class)` to the reward's parameters."""
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
        options_class = classes.get(options[0].id)
        fields = {
            item.target.id: item.value
            for item in (options_class.body if options_class else ())
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        parameters = replace(
            definition.parameters,
            names=(*definition.parameters.names, *fields),
            required=(
                *definition.parameters.required,
                *(name for name, default in fields.items() if default is None),
            ),
            has_kwargs=not fields,
        )
        definitions[reward] = replace(definition, parameters=parameters)
