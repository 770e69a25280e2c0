"""The tool `python`: runs what the policy wrote in a box of the sandbox; what it prints comes back.

A program that fails or hangs is a text for the policy to read. A sandbox that is not there, or that
fails, is an error of the environment: the sample gets a status and no score.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from rollick.envs.tools.kit import Tool
from rollick.errors import EnvError
from rollick.sandbox.base import Limits, Program, Status
from rollick.sandbox.local import LocalSandbox

_OF_THREAD = threading.local()
"""Each thread has its own sandbox: the queue of boxes and the semaphore of one have no locks."""


def python(*, timeout_s: float = 5.0, allow_unsafe: bool = False) -> Tool:
    """`allow_unsafe` lets programs run without isolation where the machine has none."""
    return Tool(
        "python",
        "runs a Python program; what it prints comes back",
        {"code": "the program"},
        partial(run_python, timeout_s=timeout_s, allow_unsafe=allow_unsafe),
    )


def run_python(arguments: Mapping[str, Any], *, timeout_s: float, allow_unsafe: bool) -> str:
    """What a program printed, and how it failed, if it did. EnvError where it could not be run."""
    limits = Limits(wall_s=timeout_s, cpu_s=int(timeout_s) + 1)
    program = Program(str(arguments.get("code", "")), limits=limits)
    result = asyncio.run(_sandbox(allow_unsafe).run(program))
    if not result.status.judged:
        raise EnvError(f"no program can be run here ({result.status}): {result.detail}")
    printed = result.stdout.strip()
    if result.status is Status.OK:
        return printed or "(it printed nothing)"
    said = result.stderr.strip().rpartition("\n")[2] if result.status is Status.FAILED else ""
    return "\n".join(filter(None, [printed, f"error: {said or result.status}"]))


def _sandbox(allow_unsafe: bool) -> LocalSandbox:
    known: dict[bool, LocalSandbox] = _OF_THREAD.__dict__.setdefault("sandboxes", {})
    if allow_unsafe not in known:
        known[allow_unsafe] = LocalSandbox(warm=1, at_once=1, allow_unsafe=allow_unsafe)
        atexit.register(known[allow_unsafe].close)
    return known[allow_unsafe]
