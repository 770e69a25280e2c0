"""Fills in `${a.b}` and `${oc.env:NAME}` in a recipe that was read, by OmegaConf's rules.

A few lines can refer to each other so that their values grow without bound: time and size of what
is filled in are limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rollick.config.problems import KeyPath, Problem, dotted, show
from rollick.config.source import MAX_NODES, Node, from_plain
from rollick.interrupt import interrupt_after

LIMIT_S = 2.0
MAX_CHARACTERS = 100_000
"""Length of one value, without its section."""


def interpolate(root: Node, problems: list[Problem]) -> Node:
    """The tree with every `${a.b}` and `${oc.env:NAME}` filled in; null where that failed."""
    leaves = dict(_interpolated_leaves(root, ()))
    if not leaves:
        return root
    # Imported here: most recipes interpolate nothing, and the import is a fifth of the start-up.
    from omegaconf import OmegaConf

    filled: dict[KeyPath, Node] = {}

    def fail(path: KeyPath, reason: str) -> None:
        leaf = leaves[path]
        filled[path] = replace(leaf, value=None)
        message = f"cannot resolve {show(leaf.value)}: {reason}"
        problems.append(Problem(leaf.location, dotted(path), message))

    for path, leaf in leaves.items():
        if not _is_well_formed(leaf.value):
            fail(path, "write it as ${a.b} or ${oc.env:NAME}")
    config: Any = OmegaConf.create(_fill(root, (), filled).plain())
    unresolved = [path for path in leaves if path not in filled]
    try:
        with interrupt_after(LIMIT_S):
            for path in unresolved:
                leaf = leaves[path]
                try:
                    value = _resolve(config, path)
                    filled[path] = from_plain(value, leaf.location, leaf.key_location)
                except LookupError as error:
                    fail(path, error.args[0])
    except TimeoutError:
        too_long = (path for path in unresolved if path not in filled)
        fail(next(too_long), f"it does not end within {LIMIT_S:g} s; the references multiply")
        filled |= {path: replace(leaves[path], value=None) for path in too_long}
    return _fill(root, (), filled)


def _is_well_formed(text: Any) -> bool:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"leaf": text})
    except (OmegaConfBaseException, RecursionError):
        return False
    return True


def _resolve(config: Any, path: KeyPath) -> Any:
    """The value at `path`, as plain Python; LookupError says why there is none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for part in path:
            config = config[part]
        is_section = OmegaConf.is_config(config)
        value = OmegaConf.to_container(config, resolve=True) if is_section else config
        _check_size(value)
        return value
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].split("interpolation: ")[-1].strip('"')
        raise LookupError(reason[:1].lower() + reason[1:]) from error
    except RecursionError:
        raise LookupError("it leads back to itself") from None


def _check_size(value: Any) -> None:
    """Raises LookupError if the value is larger than a recipe needs."""
    pending = [value]
    for _ in range(MAX_NODES):
        if not pending:
            return
        part = pending.pop()
        if isinstance(part, dict):
            pending.extend(part.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        elif isinstance(part, list):
            pending.extend(part)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(part, str) and len(part) > MAX_CHARACTERS:
            raise LookupError(f"it grows to {len(part)} characters")
    raise LookupError(f"it grows to more than {MAX_NODES} values")


def _fill(node: Node, path: KeyPath, filled: Mapping[KeyPath, Node]) -> Node:
    if path in filled:
        return filled[path]
    inside = {key: _fill(child, (*path, key), filled) for key, child in node.children()}
    if isinstance(node.value, dict):
        return replace(node, value=inside)
    return replace(node, value=list(inside.values())) if isinstance(node.value, list) else node


def _interpolated_leaves(node: Node, path: KeyPath) -> Iterator[tuple[KeyPath, Node]]:
    if isinstance(node.value, str) and "${" in node.value:
        yield path, node
    for key, child in node.children():
        yield from _interpolated_leaves(child, (*path, key))
