"""Reads recipe files into a tree of Nodes: values with their locations.

Handles YAML, `extends` and overrides; interpolation.py resolves `${...}`. Of the schema it knows
only which sections are selected by name. Problems are collected and reported together.

    file.yaml -+- compose -> Node --+-- merge (extends) -- override a.b=c --> Node
    base.yaml -+- compose -> Node --+                    (then interpolation.py)

YAML is read by the rules of YAML 1.2: `on` and `12:30` are strings, `1e-6` is a number, and a
duplicate key is a problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rollick.config.problems import KeyPath, Location, Problem, format_path, show

PARTS = ("advantage", "loss", "correction")
"""Sections of the algorithm that are picked by name."""

MAX_BYTES = 256 << 10
"""Maximum size of a recipe file; checking a larger one would take minutes."""

MAX_NODES = 5_000
"""A recipe with more values than this is a YAML bomb (aliases that multiply)."""

MAX_DIGITS = 1000
"""A longer number is read as a string, which the schema rejects with its location."""

_TAG = "tag:yaml.org,2002:"
_RESOLVERS: Sequence[tuple[str, str, str]] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a recipe (a section, a list or a scalar) with the locations of value and key."""

    value: dict[str, Node] | list[Node] | bool | int | float | str | None
    location: Location
    key_location: Location

    def find(self, path: KeyPath) -> Node | None:
        """The node at `path`, if it is set."""
        node: Node | None = self
        for key in path:
            node = node.child(key) if node else None
        return node

    def find_nearest(self, path: KeyPath) -> Node:
        """The node at `path`, or the innermost one around it that is set."""
        for end in range(len(path), 0, -1):
            if node := self.find(path[:end]):
                return node
        return self

    def child(self, key: str | int) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(str(key))
        if isinstance(self.value, list) and isinstance(key, int) and key < len(self.value):
            return self.value[key]
        return None

    def children(self) -> Iterable[tuple[Any, Node]]:
        """The nodes of a section by key, or of a list by index; none of a scalar."""
        if isinstance(self.value, dict):
            return self.value.items()
        return enumerate(self.value) if isinstance(self.value, list) else ()

    def to_plain(self) -> Any:
        """The value alone, as Python dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.to_plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.to_plain() for node in self.value]
        return self.value


def node_from_plain(value: Any, location: Location, key_location: Location | None = None) -> Node:
    """A tree of nodes with one location: that of a call from Python or of an override."""
    if isinstance(value, Mapping):
        value = {str(key): node_from_plain(item, location) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, list | tuple):
        value = [node_from_plain(item, location) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return Node(value, location, key_location or location)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes strings that a YAML 1.1 or 1.2 reader would parse as another type."""


for _name, _pattern, _first in _RESOLVERS:
    _regex = re.compile(rf"^(?:{_pattern})$")
    _starts = [char if char != "\0" else "" for char in _first]
    _Loader.add_implicit_resolver(_TAG + _name, _regex, _starts)
    _Dumper.add_implicit_resolver(_TAG + _name, _regex, _starts)


def dump_yaml(data: Any) -> str:
    """YAML that `read_file` reads back as the same values; `${` in a string is escaped."""
    escaped = _escape_interpolation(data)
    return yaml.dump(escaped, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _escape_interpolation(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _escape_interpolation(value) for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, list | tuple):
        return [_escape_interpolation(value) for value in data]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", data)
    return data


def read_file(path: Path, problems: list[Problem], *, seen: tuple[Path, ...] = ()) -> Node | None:
    """Read a recipe file, merged over the recipes that it extends. None if it cannot be read."""
    try:
        text = _read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(Problem(Location(str(path)), "", f"cannot be read: {reason}"))
        return None
    node = _compose(text, str(path), problems)
    if node is None or not isinstance(node.value, dict) or "extends" not in node.value:
        return node
    extends = node.value["extends"]
    recipe = replace(node, value={k: v for k, v in node.value.items() if k != "extends"})
    base = _read_base(extends, path, problems, seen=(*seen, path.resolve()))
    return merge(base, recipe) if base else recipe


def _read_text(path: Path) -> str:
    """Raises ValueError if the file is not UTF-8 or too large. The size limit also ends a read of a
    device file."""
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8 text") from error


def _read_base(
    extends: Node, path: Path, problems: list[Problem], *, seen: tuple[Path, ...]
) -> Node | None:
    def report(message: str) -> None:
        problems.append(Problem(extends.location, "extends", message))

    if not isinstance(extends.value, str):
        return report(f"must be the path of one recipe, but is {show(extends.to_plain())}")
    target = path.parent / extends.value
    if target.resolve() in seen:
        return report(f"is circular: {extends.value!r} extends this recipe")
    if not target.is_file():
        return report(f"there is no file {extends.value!r} relative to this recipe")
    base = read_file(target, problems, seen=seen)
    return base or report(f"{extends.value!r} cannot be read")


def _compose(text: str, origin: str, problems: list[Problem]) -> Node | None:
    start = Location(origin, 1, 1)
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return Node({}, start, start)
        node = _Builder(origin, problems).build(root, (), start)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = Location(origin, mark.line + 1, mark.column + 1) if mark else Location(origin)
        line = "".join(text.split("\n")[mark.line : mark.line + 1]) if mark else ""
        fix = "put quotes around a value with ${...}" if "${" in line else ""
        problems.append(Problem(location, "", f"is not valid YAML: {error.problem}", fix))
        return None
    except (yaml.YAMLError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        reason = "nested too deeply" if nested else str(error).splitlines()[0]
        problems.append(Problem(Location(origin), "", f"is not valid YAML: {reason}"))
        return None
    if not isinstance(node.value, dict):
        message = f"a recipe is made of `key: value` lines, but this is {show(node.to_plain())}"
        problems.append(Problem(node.location, "", message))
        return None
    return replace(node, location=start, key_location=start)


class _Builder:
    """Converts composed YAML into Nodes."""

    def __init__(self, origin: str, problems: list[Problem]) -> None:
        self.origin = origin
        self.problems = problems
        self._ancestors: set[int] = set()
        """ids of the enclosing nodes, to detect recursive aliases."""
        self._node_count = 0

    def build(self, raw: yaml.Node, path: KeyPath, key_location: Location) -> Node:
        location = self._locate(raw)
        if id(raw) in self._ancestors:
            message, fix = "the alias refers to a section that contains it", "write the values out"
            self.problems.append(Problem(location, format_path(path), message, fix))
            return Node(None, location, key_location)
        self._node_count += 1
        if self._node_count > MAX_NODES:
            raise yaml.YAMLError(f"it has more than {MAX_NODES} values")
        self._ancestors.add(id(raw))
        if isinstance(raw, yaml.MappingNode):
            value = self._build_mapping(raw, path)
        elif isinstance(raw, yaml.SequenceNode):
            items = enumerate(raw.value)
            value = [self.build(item, (*path, i), self._locate(item)) for i, item in items]
        else:
            value = self._build_scalar(raw, path)
        self._ancestors.discard(id(raw))
        return Node(value, location, key_location)

    def _locate(self, raw: yaml.Node) -> Location:
        return Location(self.origin, raw.start_mark.line + 1, raw.start_mark.column + 1)

    def _build_mapping(self, raw: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        values: dict[str, Node] = {}
        merged_keys: dict[str, Node] = {}
        for key, value in raw.value:
            location = self._locate(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem(location, format_path(path), "a key must be a string"))
            elif key.tag == _TAG + "merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):
                    section = self.build(source, path, location).value
                    merged_keys.update(section if isinstance(section, dict) else {})
            elif key.value in values:
                first_line = values[key.value].key_location.line
                message = f"duplicate key; the first is at line {first_line}"
                self.problems.append(Problem(location, format_path((*path, key.value)), message))
            else:
                values[key.value] = self.build(value, (*path, key.value), location)
        return {**merged_keys, **values}

    def _build_scalar(self, raw: yaml.Node, path: KeyPath) -> bool | int | float | str | None:
        text = raw.value
        match raw.tag.removeprefix(_TAG):
            case "str" | "merge":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" | "float" as number_type:
                try:
                    return _parse_number(text, number_type)
                except ValueError:  # only with an explicit tag
                    message = f"{show(text)} is not a number"
            case _:
                message = f"the YAML tag {raw.tag!r} is not allowed in a recipe"
        self.problems.append(Problem(self._locate(raw), format_path(path), message))
        return None


def _parse_number(text: str, number_type: str) -> int | float | str:
    if number_type == "float":
        return float(re.sub(r"\.(?=[ni])", "", text.lower()))
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base) if len(text) < MAX_DIGITS else text


def merge(base: Node, override: Node, path: KeyPath = ()) -> Node:
    """`override` merged into `base`: sections key by key; other values are replaced."""
    if key := _selector_key(path):
        base, override = _expand_short_form(base, key), _expand_short_form(override, key)
        name, base_name = override.find((key,)), base.find((key,))
        if name is not None and (base_name is None or name.value != base_name.value):
            return override
    if not isinstance(base.value, dict) or not isinstance(override.value, dict):
        return override
    merged = dict(base.value)
    for key, node in override.value.items():
        merged[key] = merge(merged[key], node, (*path, key)) if key in merged else node
    return replace(override, value=merged)


def _selector_key(path: KeyPath) -> str:
    """The key that selects the type of the section at `path`; empty if it has none. A new value of
    this key discards the other settings of the section."""
    match path:
        case ("algorithm",) | ("data", _, _, "algorithm"):
            return "preset"
        case ("algorithm", part) | ("data", _, _, "algorithm", part):
            return "name" if part in PARTS else ""
        case ("data", _, _, "rewards", int()) | ("data", _, _, "environment"):
            return "name"
        case _:
            return ""


def _expand_short_form(node: Node, key: str) -> Node:
    """`loss: ppo` is short for `loss: {name: ppo}`, `algorithm: dapo` for `{preset: dapo}`."""
    return replace(node, value={key: node}) if isinstance(node.value, str) else node


def apply_override(root: Node, override: str, problems: list[Problem]) -> Node:
    """Set `a.b=c` in the tree. A list element is addressed by its index: `a.0.b=c`."""
    location = Location(f"override {override}")
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(re.fullmatch(r"[^\s+~]+", part) for part in path):
        problems.append(Problem(location, "", "is not of the form a.b=c"))
        return root
    value_problems: list[Problem] = []
    try:
        raw = yaml.compose(text, Loader=_Loader)
        builder = _Builder(location.origin, value_problems)
        value = builder.build(raw, (), location).to_plain() if raw else None
    except (yaml.YAMLError, RecursionError):
        problems.append(Problem(location, "", f"the value {text!r} is not valid YAML"))
        return root
    if value_problems:
        problems.extend(replace(problem, location=location) for problem in value_problems)
        return root
    return _set(root, path, node_from_plain(value, location), problems, parents=())


def _set(
    node: Node, path: tuple[str, ...], value: Node, problems: list[Problem], *, parents: KeyPath
) -> Node:
    """A copy of `node` with `value` at `path` below it. `parents`: the path of `node`."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if selector := _selector_key(parents):
        node = _expand_short_form(node, selector)
        name = node.find((selector,))
        if key == selector and not rest and (name is None or name.value != value.value):
            return replace(node, value={key: value})
    if isinstance(node.value, list):
        index = int(key) if key.isdecimal() else -1
        if not 0 <= index < len(node.value):
            message = f"has no element {key!r}; it has {len(node.value)}, counted from 0"
            problems.append(Problem(value.location, format_path(parents), message))
            return node
        items = list(node.value)
        items[index] = _set(items[index], rest, value, problems, parents=(*parents, index))
        return replace(node, value=items)
    if node.value is not None and not isinstance(node.value, dict):
        message = f"is {show(node.value)}, so it has no key {key!r}"
        problems.append(Problem(value.location, format_path(parents), message))
        return node
    section = dict(node.value or {})
    child = section.get(key, Node(None, value.location, value.location))
    section[key] = _set(child, rest, value, problems, parents=(*parents, key))
    return replace(node, value=section)
