"""Puzzles of reasoning-gym as a source of prompts, generated from a seed.

    source: reasoning_gym:TASK?seed=3&size=500&min_terms=2       TASK: see `rollick list`

The parameters after `?`, other than seed and size, are settings of the task. Some generators depend
on the order of Python's sets or on global random numbers, so a separate process with both fixed
generates the puzzles: a source has the same rows in every run. The column `entry` holds the puzzle
as a Python literal, for the reward reasoning_gym.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from rollick.config.names import NAMES, find_similar
from rollick.errors import DataError, MissingExtra

DEFAULT_SIZE = 500
"""Puzzles of a source without size and limit."""

CHILD_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from rollick.data.reasoning_gym_source import main; main(*sys.argv[1:])"
)


def gym_rows(spec: str, *, limit: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of `TASK?settings`: prompt, answer (None if there are many), and puzzle."""
    task, settings = read_gym_source(spec)
    size = int(settings.pop("size", limit or DEFAULT_SIZE))
    size = min(size, limit or size)
    settings = {"seed": 0, **settings, "size": size}
    paths = json.dumps([path or os.getcwd() for path in sys.path])
    command = (sys.executable, "-c", CHILD_PROGRAM, task, json.dumps(settings), paths)
    # The child needs no secrets from the environment of this process.
    environment = {"PYTHONHASHSEED": "0", "PATH": os.environ.get("PATH", "")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        count = 0
        for line in child.stdout:
            row: dict[str, Any] = json.loads(line)
            if "error" in row:
                raise DataError(row["error"], fix=row["fix"])
            count += 1
            yield row
    if count < size:
        problem = f"reasoning-gym generated {count} of {size} puzzles of the task {task}"
        raise DataError(
            f"{problem} and exited with code {child.returncode}",
            fix="check its output above, or change the settings of the task",
        )


def read_gym_source(spec: str) -> tuple[str, dict[str, Any]]:
    """Task and settings of `TASK?a=1&b=x`. Raises DataError for an unknown task."""
    task, _, query = spec.partition("?")
    if task not in NAMES["gym_tasks"]:
        suggestions = find_similar(task, list(NAMES["gym_tasks"]))
        raise DataError(
            f"reasoning-gym has no task {task!r}",
            fix=f"did you mean {', '.join(suggestions)}?" if suggestions else "see `rollick list`",
        )
    settings = parse_qsl(query, keep_blank_values=True)
    return task, {name: _parse_value(text) for name, text in settings}


@lru_cache(maxsize=64)
def open_task(task: str, settings: str) -> Any:
    """The generator of a task; `settings` is JSON. Raises DataError for invalid settings."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise MissingExtra.of("reasoning-gym", "rewards") from error
    try:
        return create_dataset(task, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        fields = getattr(DATASETS[task][1], "__dataclass_fields__", {})
        raise DataError(
            f"the task {task} of reasoning-gym rejects the settings {settings}: {error}",
            fix=f"its settings are {', '.join(fields)}",
        ) from error


def make_row(task: str, settings: str, index: int) -> dict[str, Any]:
    """A puzzle as a row. If it is not a literal, `entry` is None; the index recreates it."""
    random.seed(index)
    puzzle = open_task(task, settings)[index]
    entry = repr(puzzle)
    return {
        "prompt": puzzle["question"],
        "answer": puzzle["answer"],
        "task": task,
        "settings": settings,
        "index": index,
        "entry": entry if _is_literal(entry) else None,
    }


def main(task: str, settings: str) -> None:
    """The child's program. Writes one row per line to stdout; redirects prints to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            for index in range(json.loads(settings)["size"]):
                out.write(json.dumps(make_row(task, settings, index)) + "\n")
        except (DataError, MissingExtra) as error:
            out.write(json.dumps({"error": error.message, "fix": error.fix}) + "\n")
        except BrokenPipeError:  # The parent needs no more rows.
            os._exit(0)


def _is_literal(text: str) -> bool:
    try:
        return repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _parse_value(text: str) -> Any:
    """The value of a JSON number, boolean or list; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
