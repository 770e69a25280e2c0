"""Shared by adapters of packages that no extra installs, because their requirements conflict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from rollick.errors import EnvError


def import_optional(module: str, requirement: str, *, older: str) -> Any:
    """Import a module. `older`: packages of which it requires older versions."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise EnvError(
            f"the package {package} cannot be imported: {error}",
            fix=f"pip install '{requirement}'; it requires older versions of {older} than "
            "other parts of rollick, so give it a Python environment of its own",
        ) from None


def mapping_option(name: str, value: str | Mapping[str, Any]) -> dict[str, Any]:
    """An option that is a mapping or, since options in a recipe are scalars, a JSON object."""
    try:
        parsed: object = json.loads(value or "{}") if isinstance(value, str) else value
    except ValueError as error:
        raise EnvError(f"{name} is not JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise EnvError(f"{name} must be a JSON object, not {value!r}")
    return dict(cast("Mapping[str, Any]", parsed))
