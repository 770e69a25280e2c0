"""Names that installed packages add to the table: their entry points of the group `rollick.KIND`.

    [project.entry-points."rollick.losses"]        in the package's pyproject.toml
    my_loss = "my_package.losses:my_loss"

Owns finding them and refusing names that more than one registers. Only the metadata of packages
is read, once and when first asked for; nothing of theirs is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from rollick.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "rollick."
OURS = "rollick itself"
"""Stands for a package in messages about a name of our own table."""


@dataclass(frozen=True, slots=True, order=True)
class Plugin:
    """What one package registered under a name."""

    package: str
    target: str
    """module:attribute."""


def plugins(kind: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Name -> who registered it, of one kind, by name."""
    # By path: a package that comes onto sys.path later is found, too.
    return _registered(tuple(sys.path)).get(kind, {})


def plugin_target(kind: str, name: str, *, own: str | None) -> str | None:
    """Where `name` is: `own`, that of our table, or a package's; None if nobody has it.

    ConfigError if more than one has: which of them a recipe means must not depend on what else
    happens to be installed.
    """
    found = plugins(kind).get(name, ())
    packages = [plugin.package for plugin in found]
    owners = [OURS, *packages] if own else packages
    if len(owners) > 1:
        raise ConfigError(
            f"{name!r} of the {kind.replace('_', ' ')} is registered by {' and by '.join(owners)}",
            fix=f"uninstall {' and '.join(packages) if own else ' or '.join(packages)}, "
            "or name its function as package.module:function",
        )
    return found[0].target if found else own


@cache
def _registered(path: tuple[str, ...]) -> dict[str, dict[str, tuple[Plugin, ...]]]:
    # Imported here: most of what loads this module asks for a built-in name or for none.
    from importlib.metadata import entry_points

    found = entry_points()
    return {
        group.removeprefix(GROUP): _by_name(found.select(group=group))
        for group in found.groups
        if group.startswith(GROUP)
    }


def _by_name(entries: Iterable[EntryPoint]) -> dict[str, tuple[Plugin, ...]]:
    table: dict[str, list[Plugin]] = {}
    for entry in entries:
        package = entry.dist.name if entry.dist else "an unknown package"
        table.setdefault(entry.name, []).append(Plugin(package, entry.value.strip()))
    return {name: tuple(sorted(set(table[name]))) for name in sorted(table)}
