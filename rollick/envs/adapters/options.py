"""Options that are mappings. A recipe's options are plain values, so there they are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from rollick.errors import EnvError


def mapping_option(name: str, said: str | Mapping[str, Any]) -> dict[str, Any]:
    """The mapping, or what the JSON object says; nothing said is an empty one."""
    try:
        read: object = json.loads(said or "{}") if isinstance(said, str) else said
    except ValueError as error:
        raise EnvError(f"{name} is not JSON: {error}") from error
    if not isinstance(read, Mapping):
        raise EnvError(f"{name} must be an object, not {said!r}")
    return dict(cast("Mapping[str, Any]", read))
