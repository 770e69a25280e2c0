"""Back end of `rollick sandbox run`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollick.errors import ConfigError
from rollick.sandbox.base import Limits, Program, Result
from rollick.sandbox.local import LocalSandbox


def run_file(
    file: Path, stdin: str, *, timeout_s: float, memory_mb: int, allow_unsafe: bool
) -> Result:
    """Run a Python file in a new sandbox."""
    try:
        code = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", fix="give a Python file") from None
    limits = Limits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1, memory_mb=memory_mb)
    with LocalSandbox(warm=0, allow_unsafe=allow_unsafe) as sandbox:
        return asyncio.run(sandbox.run(Program(code, stdin, limits)))
