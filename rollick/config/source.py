"""A recipe as written: values, and the location of each of them.

Owns YAML, `extends` and overrides; interpolation.py fills in `${...}`. It knows nothing of the
schema except which sections are named parts. Problems are collected, not raised: all are reported
together.

    file.yaml -+- compose -> Node --+-- merge (extends) -- override a.b=c --> Node
    base.yaml -+- compose -> Node --+                    (then interpolation.py)

YAML is read by the rules of YAML 1.2: `on` and `12:30` are text, `1e-6` is a
number, and a repeated key is a problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rollick.config.problems import KeyPath, Location, Problem, dotted, show

PARTS = ("advantage", "loss", "correction")
"""Sections of the algorithm that are picked by name."""

MAX_BYTES = 256 << 10
"""Size of a recipe file; checking a larger one would take minutes."""

MAX_NODES = 5_000
"""A recipe with more values than this is a YAML bomb (aliases that multiply)."""

MAX_DIGITS = 1000
"""A longer number stays a text, which the schema refuses with its location."""

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
        for part in path:
            node = node.child(part) if node else None
        return node

    def nearest(self, path: KeyPath) -> Node:
        """The node at `path`, or the innermost one around it that is set."""
        for end in range(len(path), 0, -1):
            if node := self.find(path[:end]):
                return node
        return self

    def child(self, part: str | int) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(str(part))
        if isinstance(self.value, list) and isinstance(part, int) and part < len(self.value):
            return self.value[part]
        return None

    def children(self) -> Iterable[tuple[Any, Node]]:
        """The nodes of a section by key, or of a list by index; none of a scalar."""
        if isinstance(self.value, dict):
            return self.value.items()
        return enumerate(self.value) if isinstance(self.value, list) else ()

    def plain(self) -> Any:
        """The value alone, as Python dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def from_plain(value: Any, location: Location, key_location: Location | None = None) -> Node:
    """A node, and all below it, at one location (a call from Python, an override)."""
    if isinstance(value, Mapping):
        value = {str(key): from_plain(item, location) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, list | tuple):
        value = [from_plain(item, location) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return Node(value, location, key_location or location)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's own rules too: text that any reader could take for another type is quoted."""


for _name, _pattern, _first in _RESOLVERS:
    _regex = re.compile(rf"^(?:{_pattern})$")
    _starts = [char if char != "\0" else "" for char in _first]
    _Loader.add_implicit_resolver(_TAG + _name, _regex, _starts)
    _Dumper.add_implicit_resolver(_TAG + _name, _regex, _starts)


def dump_yaml(data: Any) -> str:
    """YAML that `read_file` reads back as the same values; `${` in a text stays a text."""
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
    """The recipe in a file, on top of the ones it extends. None if it cannot be read at all."""
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
    rest = replace(node, value={k: v for k, v in node.value.items() if k != "extends"})
    base = _read_base(extends, path, problems, seen=(*seen, path.resolve()))
    return merge(base, rest) if base else rest


def _read_text(path: Path) -> str:
    """Raises ValueError if the file is not UTF-8 or too large; reading a device would never end."""
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
    def refuse(message: str) -> None:
        problems.append(Problem(extends.location, "extends", message))

    if not isinstance(extends.value, str):
        return refuse(f"must be the path of one recipe, but is {show(extends.plain())}")
    target = path.parent / extends.value
    if target.resolve() in seen:
        return refuse(f"{extends.value!r} leads back to itself")
    if not target.is_file():
        return refuse(f"there is no file {extends.value!r} next to this recipe")
    base = read_file(target, problems, seen=seen)
    return base or refuse(f"{extends.value!r} cannot be used")


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
        message = f"a recipe is made of `key: value` lines, but this is {show(node.plain())}"
        problems.append(Problem(node.location, "", message))
        return None
    return replace(node, location=start, key_location=start)


class _Builder:
    """Turns composed YAML into Nodes. `open`: nodes around the current one; no alias may be one."""

    def __init__(self, origin: str, problems: list[Problem]) -> None:
        self.origin = origin
        self.problems = problems
        self.open: set[int] = set()
        self.count = 0

    def build(self, raw: yaml.Node, path: KeyPath, key_location: Location) -> Node:
        location = self.location(raw)
        if id(raw) in self.open:
            message, fix = "the alias refers to a section that contains it", "write the values out"
            self.problems.append(Problem(location, dotted(path), message, fix))
            return Node(None, location, key_location)
        self.count += 1
        if self.count > MAX_NODES:
            raise yaml.YAMLError(f"it has more than {MAX_NODES} values")
        self.open.add(id(raw))
        if isinstance(raw, yaml.MappingNode):
            value = self._mapping(raw, path)
        elif isinstance(raw, yaml.SequenceNode):
            items = enumerate(raw.value)
            value = [self.build(item, (*path, i), self.location(item)) for i, item in items]
        else:
            value = self._scalar(raw, path)
        self.open.discard(id(raw))
        return Node(value, location, key_location)

    def location(self, raw: yaml.Node) -> Location:
        return Location(self.origin, raw.start_mark.line + 1, raw.start_mark.column + 1)

    def _mapping(self, raw: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        values: dict[str, Node] = {}
        merged_keys: dict[str, Node] = {}
        for key, value in raw.value:
            location = self.location(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(Problem(location, dotted(path), "a key must be text"))
            elif key.tag == _TAG + "merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):
                    section = self.build(source, path, location).value
                    merged_keys.update(section if isinstance(section, dict) else {})
            elif key.value in values:
                message = f"repeated; the first is at line {values[key.value].key_location.line}"
                self.problems.append(Problem(location, dotted((*path, key.value)), message))
            else:
                values[key.value] = self.build(value, (*path, key.value), location)
        return {**merged_keys, **values}

    def _scalar(self, raw: yaml.Node, path: KeyPath) -> bool | int | float | str | None:
        text = raw.value
        match raw.tag.removeprefix(_TAG):
            case "str" | "merge":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int" | "float" as kind:
                try:
                    return _read_number(text, kind)
                except ValueError:  # only with an explicit tag
                    message = f"{show(text)} is not a number"
            case _:
                message = f"the YAML tag {raw.tag!r} is not allowed in a recipe"
        self.problems.append(Problem(self.location(raw), dotted(path), message))
        return None


def _read_number(text: str, kind: str) -> int | float | str:
    if kind == "float":
        return float(re.sub(r"\.(?=[ni])", "", text.lower()))
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base) if len(text) < MAX_DIGITS else text


def merge(base: Node, over: Node, path: KeyPath = ()) -> Node:
    """`over` on top of `base`: sections are merged key by key, other values are replaced."""
    if key := _naming_key(path):
        base, over = _expand_short_form(base, key), _expand_short_form(over, key)
        name, before = over.find((key,)), base.find((key,))
        if name is not None and (before is None or name.value != before.value):
            return over
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node, (*path, key)) if key in merged else node
    return replace(over, value=merged)


def _naming_key(path: KeyPath) -> str:
    """The key that selects the kind of the section at `path`; empty if it has none. A new value of
    this key drops the other settings of the section."""
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
    """The tree with `a.b=c` set. A list element is named by its index: `a.0.b=c`."""
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
        value = builder.build(raw, (), location).plain() if raw else None
    except (yaml.YAMLError, RecursionError):
        problems.append(Problem(location, "", f"the value {text!r} is not valid YAML"))
        return root
    if value_problems:
        problems.extend(replace(problem, location=location) for problem in value_problems)
        return root
    return _set(root, path, from_plain(value, location), problems, parents=())


def _set(
    node: Node, path: tuple[str, ...], value: Node, problems: list[Problem], *, parents: KeyPath
) -> Node:
    """The node with `value` at `path` below it. `parents`: the path of the node."""
    if not path:
        return value
    part, rest = path[0], path[1:]
    if key := _naming_key(parents):
        node = _expand_short_form(node, key)
        before = node.find((key,))
        if part == key and not rest and (before is None or before.value != value.value):
            return replace(node, value={key: value})
    if isinstance(node.value, list):
        index = int(part) if part.isdecimal() else -1
        if not 0 <= index < len(node.value):
            message = f"has no element {part!r}; it has {len(node.value)}, counted from 0"
            problems.append(Problem(value.location, dotted(parents), message))
            return node
        items = list(node.value)
        items[index] = _set(items[index], rest, value, problems, parents=(*parents, index))
        return replace(node, value=items)
    if node.value is not None and not isinstance(node.value, dict):
        message = f"is {show(node.value)}, so it has no key {part!r}"
        problems.append(Problem(value.location, dotted(parents), message))
        return node
    section = dict(node.value or {})
    inner = section.get(part, Node(None, value.location, value.location))
    section[part] = _set(inner, rest, value, problems, parents=(*parents, part))
    return replace(node, value=section)
