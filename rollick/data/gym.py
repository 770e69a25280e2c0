"""reasoning-gym as a source of prompts: puzzles made by a task's generator, from a seed.

    source: reasoning_gym:TASK?seed=3&size=500&min_terms=2       TASK: see `rollick list`

Everything behind the `?` but seed and size are settings of the task. Some generators depend on the
order of Python's sets or on its global random numbers, so puzzles are made in a process of their
own where both are fixed: the same source gives the same rows in every run. A row carries its puzzle
as a Python literal (tuples and sets included) in the column `entry`, for the reward reasoning_gym.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from rollick.config.gym_tasks import GYM_TASKS
from rollick.config.names import nearest
from rollick.errors import DataError, MissingExtra

DEFAULT_SIZE = 500
"""Puzzles of a source that names no size and no limit."""

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from rollick.data.gym import main; main(*sys.argv[1:])"
)


def gym_rows(spec: str, *, limit: int = 0) -> Iterator[dict[str, Any]]:
    """The rows of `TASK?settings`: prompt, reference answer (None where there are many), puzzle."""
    task, settings = read_gym_source(spec)
    size = int(settings.pop("size", limit or DEFAULT_SIZE))
    if limit:
        size = min(size, limit)
    settings = {"seed": 0, **settings, "size": size}
    paths = json.dumps([path or os.getcwd() for path in sys.path])
    command = (sys.executable, "-c", BOOT, task, json.dumps(settings), paths)
    # A child that only makes puzzles needs no secrets of this process.
    fixed = {"PYTHONHASHSEED": "0", "PATH": os.environ.get("PATH", "")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=fixed) as maker:
        assert maker.stdout is not None
        made = 0
        for line in maker.stdout:
            row: dict[str, Any] = json.loads(line)
            if "error" in row:
                raise DataError(row["error"], fix=row["fix"])
            made += 1
            yield row
    if made < size:
        raise DataError(
            f"reasoning-gym made {made} of {size} puzzles of the task {task} and ended with exit "
            f"code {maker.returncode}",
            fix="look at what it printed, or ask for other settings",
        )


def read_gym_source(spec: str) -> tuple[str, dict[str, Any]]:
    """Task and settings of `TASK?a=1&b=x`; DataError for a task that nobody knows."""
    task, _, query = spec.partition("?")
    if task not in GYM_TASKS:
        close = nearest(task, list(GYM_TASKS))
        raise DataError(
            f"reasoning-gym has no task {task!r}",
            fix=f"did you mean {', '.join(close)}?" if close else "see `rollick list`",
        )
    return task, {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}


@lru_cache(maxsize=64)
def open_task(task: str, settings: str) -> Any:
    """The generator of a task; `settings` is JSON. DataError for settings that it does not take."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise MissingExtra.of("reasoning-gym", "rewards") from error
    given: Mapping[str, Any] = json.loads(settings)
    try:
        return create_dataset(task, **given)
    except (TypeError, ValueError, AssertionError) as error:
        fields = getattr(DATASETS[task][1], "__dataclass_fields__", {})
        raise DataError(
            f"the task {task} of reasoning-gym cannot be made with {settings}: {error}",
            fix=f"its settings are {', '.join(fields)}",
        ) from error


def make_row(task: str, settings: str, index: int) -> dict[str, Any]:
    """A puzzle as a row. The few that are no literal (`entry` is None) are made again by index."""
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
    """The maker's program: a row a line on what was standard output; prints go to the error
    stream."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            for index in range(json.loads(settings)["size"]):
                out.write(json.dumps(make_row(task, settings, index)) + "\n")
        except (DataError, MissingExtra) as error:
            out.write(json.dumps({"error": error.message, "fix": error.fix}) + "\n")
        except BrokenPipeError:  # whoever reads has enough
            os._exit(0)


def _is_literal(text: str) -> bool:
    try:
        return repr(ast.literal_eval(text)) == text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _value(text: str) -> Any:
    """A number, true, false or a list as JSON has it; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
