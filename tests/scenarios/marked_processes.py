"""Finds all processes of a run, wherever they are in the process tree: they inherit a variable."""

import os
import sys
import uuid
from pathlib import Path

VARIABLE = "ROLLICK_TEST_MARK"


def marked_environment() -> tuple[str, dict[str, str]]:
    """A new mark, and an environment that contains it. Descendants inherit it."""
    mark = uuid.uuid4().hex
    return mark, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), VARIABLE: mark}


def processes_with(mark: str) -> dict[int, str]:
    """The command lines of the processes with this mark, by process id."""
    commands: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{VARIABLE}={mark}".encode() in (folder / "environ").read_bytes():
                commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # It has ended.
            continue
    return commands
