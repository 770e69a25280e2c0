"""Finds what a pytest file needs of the candidate. Only parses code, never runs it.

    find_star_names     names that `from solution import *` must define
    shared_box_reason   why the file needs the candidate in the same box

Only the row's file is parsed, never the untrusted candidate: a candidate must not be able to choose
in which box it runs.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from rollick.sandbox.tested_names import parse


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNSUPPORTED_FIXTURES = _split_words(
    "capsys capfd capsysbinary capfdbinary caplog monkeypatch mocker recwarn tmp_path tmpdir "
    "tmp_path_factory tmpdir_factory"
)
"""Fixtures that act on the process or the disk of the tests, which the candidate does not share."""
UNSUPPORTED_MODULES = _split_words(
    "abc builtins concurrent doctest gc importlib inspect logging mock multiprocessing pickle "
    "tempfile threading types unittest.mock warnings weakref"
)
"""Modules that inspect objects, replace parts of the process or start threads."""
UNSUPPORTED_NAMES = _split_words(
    "contextlib.redirect_stderr contextlib.redirect_stdout os.chdir os.environ os.getenv os.putenv "
    "pytest.MonkeyPatch pytest.deprecated_call pytest.warns random.seed sys.getrefcount sys.stderr "
    "sys.stdin sys.stdout typing.get_type_hints unittest.mock"
)
"""Names in other modules that do the same."""
UNSUPPORTED_BUILTINS = frozenset({"dir", "id", "open"})
"""Builtin functions that do not see the candidate's objects or disk."""
SUPPORTED_NAMES = {"asyncio": {"run", "sleep"}, "dataclasses": {"dataclass", "field"}}
"""The only names in these modules that work with proxies."""
UNSUPPORTED_METHODS = _split_words(
    "assertIs assertIsNot assertLogs assertNoLogs assertWarns assertWarnsRegex"
)
"""Methods of unittest.TestCase that compare identities, or read logs or warnings."""
SUPPORTED_SPECIAL_NAMES = _split_words(
    "__name__ __qualname__ __class__ __dict__ __init__ __call__ __len__ __iter__ __next__ __file__ "
    "__contains__ __getitem__ __setitem__ __delitem__ __bool__ __str__ __repr__ __eq__ __ne__ "
    "__hash__ __enter__ __exit__"
)
"""Double-underscore attributes that proxies have."""


@dataclass(frozen=True, slots=True)
class StarNames:
    """What `from solution import *` must define for a pytest file."""

    names: tuple[str, ...] = ()
    """Names that the file reads and does not define; builtins are among them."""
    standard: tuple[str, ...] = ()
    """Those of them that are modules of the standard library: `math` in `math.sqrt`."""
    modules: tuple[str, ...] = ()
    """Modules that the file also imports with a star."""


@lru_cache(maxsize=256)
def find_star_names(source: str, module: str) -> StarNames:
    """Empty if the file does not import the candidate with a star, or cannot be parsed."""
    try:
        tree, table = parse(source), symtable.symtable(source, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError):
        return StarNames()
    nodes = list(ast.walk(tree))
    stars = [
        node.module or ""
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and not node.level
    ]
    if module not in stars:
        return StarNames()
    defined = {symbol.get_name() for symbol in table.get_symbols() if _is_bound(symbol)}
    read = dict.fromkeys(_global_names(table))
    names = tuple(name for name in read if name not in defined and name.isidentifier())
    owners = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in owners}
    # A candidate's `math` could say that everything is close to everything.
    standard = (sys.stdlib_module_names | {"pytest"}) - bare
    return StarNames(
        names,
        tuple(name for name in names if name in standard),
        tuple(dict.fromkeys(name for name in stars if name != module)),
    )


def _is_bound(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """The module's names that a scope and its inner scopes read."""
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _global_names(inner)


@lru_cache(maxsize=256)
def shared_box_reason(source: str, module: str) -> str:
    """Why tests and candidate must share a box; empty if proxies of its objects suffice."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    star = set(find_star_names(source, module).names) - set(dir(builtins))
    return next(_ReasonFinder(tree, module, star).find(), "")


@dataclass(slots=True)
class _ReasonFinder:
    """Finds in one file why tests and candidate must share a box."""

    tree: ast.Module
    module: str
    candidate: set[str]
    """Names of the candidate's functions, classes and data in the file."""
    aliases: set[str] = field(default_factory=set[str])
    """Names of the candidate's module."""
    imported: dict[str, str] = field(default_factory=dict[str, str])
    """Dotted names of other modules and their parts, by the name in the file."""
    modules: list[str] = field(default_factory=list[str])
    """All dotted names that the file imports from elsewhere."""

    def find(self) -> Iterator[str]:
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._read_import(node)
        yield from filter(None, map(_import_reason, self.modules))
        for node in nodes:
            yield from self._check_node(node)

    def _read_import(self, node: ast.Import | ast.ImportFrom) -> None:
        origin = node.module if isinstance(node, ast.ImportFrom) else None
        for alias in node.names:
            name = f"{origin}.{alias.name}" if origin else alias.name
            bound = alias.asname or (alias.name if origin else alias.name.partition(".")[0])
            if origin == self.module:
                self.candidate.add(bound)
            elif name == self.module:
                self.aliases.add(alias.asname or alias.name)
            else:
                # `import os.path` binds `os`.
                self.imported[bound] = name if origin or alias.asname else bound
                self.modules.append(name)

    def _check_node(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.ClassDef():
                for base in (*node.bases, *(keyword.value for keyword in node.keywords)):
                    if self._is_of_candidate(base):
                        yield f"the class {node.name} of the tests derives from {ast.unparse(base)}"
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for argument in (*node.args.args, *node.args.kwonlyargs):
                    if argument.arg in UNSUPPORTED_FIXTURES:
                        yield f"the tests use the fixture {argument.arg}"
            case ast.Compare():
                yield from self._check_comparison(node)
            case ast.Attribute():
                yield from self._check_attribute(node)
            case ast.Call():
                yield from self._check_call(node)
            case ast.AsyncFor() | ast.AsyncWith():
                yield "the tests use `async for` or `async with`"
            case ast.comprehension(is_async=1):
                yield "the tests use `async for`"
            case _:
                pass

    def _check_comparison(self, node: ast.Compare) -> Iterator[str]:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            if isinstance(operator, ast.Is | ast.IsNot) and not (
                self._keeps_identity(left) or self._keeps_identity(right)
            ):
                yield f"the tests compare identities: {ast.unparse(node)}"

    def _keeps_identity(self, node: ast.expr) -> bool:
        """Whether `is` gives the same result with proxies: for constants, types, and attributes of
        the candidate's classes (members of an Enum)."""
        if isinstance(node, ast.Call):
            return isinstance(node.func, ast.Name) and node.func.id == "type"
        if isinstance(node, ast.Attribute):
            return node.attr == "__class__" or (
                self._is_of_candidate(node.value)
                and ast.unparse(node.value).rpartition(".")[2][:1].isupper()
            )
        if isinstance(node, ast.Name):
            return node.id == "NotImplemented"
        return isinstance(node, ast.Constant)

    def _check_attribute(self, node: ast.Attribute) -> Iterator[str]:
        owner = ast.unparse(node.value)
        is_assigned = not isinstance(node.ctx, ast.Load)
        if owner in self.aliases and is_assigned:
            yield f"the tests replace {owner}.{node.attr}"
        if owner in self.imported and (
            reason := _import_reason(f"{self.imported[owner]}.{node.attr}")
        ):
            yield reason
        if _is_special(node.attr) and node.attr not in SUPPORTED_SPECIAL_NAMES:
            yield f"the tests use the attribute {node.attr}"
        if node.attr in UNSUPPORTED_METHODS:
            yield f"the tests use {node.attr}"

    def _check_call(self, node: ast.Call) -> Iterator[str]:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in UNSUPPORTED_BUILTINS and name not in self.candidate:
            yield f"the tests use {name}()"
        if name == "setattr" and node.args and ast.unparse(node.args[0]) in self.aliases:
            yield f"the tests replace parts of {ast.unparse(node.args[0])}"
        if name in ("hasattr", "getattr") and len(node.args) > 1:
            attribute = node.args[1]
            if isinstance(attribute, ast.Constant) and _is_special(str(attribute.value)):
                yield f"the tests use the attribute {attribute.value}"

    def _is_of_candidate(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript):
            return self._is_of_candidate(node.value)
        if isinstance(node, ast.Attribute):
            return ast.unparse(node.value) in self.aliases or self._is_of_candidate(node.value)
        return isinstance(node, ast.Name) and node.id in self.candidate


def _import_reason(name: str) -> str:
    module, _, part = name.rpartition(".")
    top = name.partition(".")[0]
    is_denied = module in SUPPORTED_NAMES and part not in SUPPORTED_NAMES[module]
    if name in UNSUPPORTED_NAMES or is_denied or {name, module, top} & UNSUPPORTED_MODULES:
        return f"the tests use {name}"
    return ""


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
