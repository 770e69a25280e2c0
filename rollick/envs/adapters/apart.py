"""Packages that want older versions than other parts of rollick, and so are no extra of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rollick.errors import EnvError


def import_apart(module: str, *, named: str, requirement: str, older: str) -> Any:
    """The module of the project `named`; EnvError says how to come by it. `older`: packages of
    which it wants older versions."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise EnvError(
            f"environments of {named} need the package {package} ({error})",
            fix=f"pip install '{requirement}'; it wants older versions of {older} than "
            "other parts of rollick, so give it a Python environment of its own",
        ) from None
