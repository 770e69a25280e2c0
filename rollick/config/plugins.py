"""Plugins: names that installed packages register as entry points in the group `rollick.KIND`.

    [project.entry-points."rollick.losses"]        in the package's pyproject.toml
    my_loss = "my_package.losses:my_loss"

Finds plugins, and rejects names that are registered more than once. Reads only the metadata of
packages, on first use; does not import the packages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from rollick.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "rollick."
OURS = "rollick itself"
"""Shown in messages as the package that registered a built-in name."""


class Plugin(NamedTuple):
    """One registered name: the package, and its target as module:attribute."""

    package: str
    target: str


def plugins(kind: str) -> Mapping[str, tuple[Plugin, ...]]:
    """The plugins of one kind, such as `losses`: name -> registrations, sorted by name."""
    # Cached by sys.path, so that packages added to it later are found.
    return _registered(tuple(sys.path)).get(kind, {})


def plugin_target(kind: str, name: str, *, own: str | None) -> str | None:
    """The target of `name`: `own` (the built-in one), or that of a plugin; None if unknown.

    Raises ConfigError if there are several: the meaning of a recipe must not depend on what else
    is installed.
    """
    registered = plugins(kind).get(name, ())
    packages = [plugin.package for plugin in registered]
    owners = [OURS, *packages] if own else packages
    if len(owners) > 1:
        whose = f"{name!r} of the {kind.replace('_', ' ')}"
        remove = (" and " if own else " or ").join(packages)
        fix = f"uninstall {remove}, or name its function as package.module:function"
        raise ConfigError(f"{whose} is registered by {' and by '.join(owners)}", fix=fix)
    return registered[0].target if registered else own


@cache
def _registered(path: tuple[str, ...]) -> dict[str, dict[str, tuple[Plugin, ...]]]:
    # Imported on first use: most importers of this module never look up a plugin.
    from importlib.metadata import entry_points

    entries = entry_points()
    return {
        group.removeprefix(GROUP): _by_name(entries.select(group=group))
        for group in entries.groups
        if group.startswith(GROUP)
    }


def _by_name(entries: Iterable[EntryPoint]) -> dict[str, tuple[Plugin, ...]]:
    table: dict[str, list[Plugin]] = {}
    for entry in entries:
        package = entry.dist.name if entry.dist else "an unknown package"
        table.setdefault(entry.name, []).append(Plugin(package, entry.value.strip()))
    return {name: tuple(sorted(set(table[name]))) for name in sorted(table)}
