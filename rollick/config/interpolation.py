"""Resolves `${a.b}` and `${oc.env:NAME}` in a recipe, by OmegaConf's rules.

A few lines can refer to each other so that their values grow without bound: the time and the size
of the values are limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rollick.config.problems import KeyPath, Problem, format_path, show
from rollick.config.source import MAX_NODES, Node, node_from_plain
from rollick.interrupt import interrupt_after

TIME_LIMIT_S = 2.0
MAX_CHARACTERS = 100_000
"""Maximum length of one string."""


def interpolate(root: Node, problems: list[Problem]) -> Node:
    """The tree with every `${a.b}` and `${oc.env:NAME}` resolved; null where that failed."""
    leaves = dict(_find_interpolations(root, ()))
    if not leaves:
        return root
    # Imported here: most recipes need no interpolation, and the import is a fifth of the start-up.
    from omegaconf import OmegaConf

    resolved: dict[KeyPath, Node] = {}

    def fail(path: KeyPath, reason: str) -> None:
        leaf = leaves[path]
        resolved[path] = replace(leaf, value=None)
        message = f"cannot resolve {show(leaf.value)}: {reason}"
        problems.append(Problem(leaf.location, format_path(path), message))

    for path, leaf in leaves.items():
        if not _is_well_formed(leaf.value):
            fail(path, "write it as ${a.b} or ${oc.env:NAME}")
    config: Any = OmegaConf.create(_substitute(root, (), resolved).to_plain())
    unresolved = [path for path in leaves if path not in resolved]
    try:
        with interrupt_after(TIME_LIMIT_S):
            for path in unresolved:
                leaf = leaves[path]
                try:
                    value = _resolve(config, path)
                    resolved[path] = node_from_plain(value, leaf.location, leaf.key_location)
                except LookupError as error:
                    fail(path, error.args[0])
    except TimeoutError:
        remaining = (path for path in unresolved if path not in resolved)
        fail(next(remaining), f"it takes longer than {TIME_LIMIT_S:g} s; the references multiply")
        resolved |= {path: replace(leaves[path], value=None) for path in remaining}
    return _substitute(root, (), resolved)


def _is_well_formed(text: Any) -> bool:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"leaf": text})
    except (OmegaConfBaseException, RecursionError):
        return False
    return True


def _resolve(config: Any, path: KeyPath) -> Any:
    """The value at `path`, as plain Python. Raises LookupError with the reason if there is none."""
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
        raise LookupError("it refers to itself") from None


def _check_size(value: Any) -> None:
    """Raises LookupError if the value is larger than a recipe needs."""
    pending = [value]
    for _ in range(MAX_NODES):
        if not pending:
            return
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
        elif isinstance(item, list):
            pending.extend(item)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(item, str) and len(item) > MAX_CHARACTERS:
            raise LookupError(f"it grows to {len(item)} characters")
    raise LookupError(f"it grows to more than {MAX_NODES} values")


def _substitute(node: Node, path: KeyPath, leaves: Mapping[KeyPath, Node]) -> Node:
    """The tree with the nodes in `leaves` at their paths."""
    if path in leaves:
        return leaves[path]
    children = {key: _substitute(child, (*path, key), leaves) for key, child in node.children()}
    if isinstance(node.value, dict):
        return replace(node, value=children)
    return replace(node, value=list(children.values())) if isinstance(node.value, list) else node


def _find_interpolations(node: Node, path: KeyPath) -> Iterator[tuple[KeyPath, Node]]:
    if isinstance(node.value, str) and "${" in node.value:
        yield path, node
    for key, child in node.children():
        yield from _find_interpolations(child, (*path, key))
