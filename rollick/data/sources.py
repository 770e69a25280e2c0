"""Sources of rows: files, hub datasets, generators, objects handed over by Python code.

Owns finding and reading, row by row, with the place of each for messages. What a row must hold
is no matter here (prompts.py): a row that cannot even be read is passed on with its problem; a
source that cannot be read is a DataError.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from rollick.config.names import is_reference, load_reference
from rollick.config.schema import DomainConfig, EnvironmentSpec
from rollick.data.gym import gym_rows
from rollick.errors import DataError, MissingExtra
from rollick.types import stable_hash

MOST_UNLIMITED_ROWS = 1_000_000
"""A generator without `limit` that gives more rows than this is taken to be endless."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as read. `problem` says why it is no value at all (a line that is not JSON)."""

    place: str
    value: Any
    problem: str = ""


def shown(value: Any) -> str:
    """Type and beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def task_seed(seed: int, purpose: str, environment: str, task: int) -> int:
    """The seed of a task: the same for all samples of its group, in every process and run."""
    return stable_hash("task", seed, purpose, environment, task)


def read_rows(
    config: DomainConfig, *, base: Path, objects: Mapping[str, Any], purpose: str = "train"
) -> Iterator[RawRow]:
    """The rows of a source, at most `limit` of them; nothing beyond the limit is read.

    An environment without a source has a row for each task: its number, and its seed, which is
    another one where the `purpose` is another one.
    """
    source, environment = config.source, config.environment
    if not source and environment is not None:
        return islice(_task_rows(environment, purpose), config.limit or None)
    kind, _, name = source.partition(":")
    if kind == "object":
        rows = _python_rows(_object(objects, name), source, limited=config.limit > 0)
    elif kind == "hub":
        rows = _hub_rows(name, source, split=config.split)
    elif kind == "reasoning_gym":
        puzzles = enumerate(gym_rows(name, limit=config.limit), start=1)
        rows = (RawRow(f"{source}: puzzle {number}", row) for number, row in puzzles)
    elif is_reference(source):
        rows = _python_rows(_reference(source, base), source, limited=config.limit > 0)
    else:
        rows = _file_rows(_locate(source, base), source)
    return islice(rows, config.limit or None)


def _task_rows(environment: EnvironmentSpec, purpose: str) -> Iterator[RawRow]:
    name = environment.name
    for task in range(environment.tasks):
        seed = task_seed(environment.seed, purpose, name, task)
        place = f"{name}: task {task}"
        yield RawRow(place, {"prompt": place, "task": task, "seed": seed})


def _locate(source: str, base: Path) -> Path:
    places = dict.fromkeys([base / source, Path.cwd() / source])
    for path in places:
        if path.is_file():
            return path
    raise DataError(
        f"{source} does not exist (looked for {' and '.join(map(str, places))})",
        fix="give a path relative to the recipe or to the working directory, or hub:NAME for a hub "
        "dataset",
    )


def _file_rows(path: Path, source: str) -> Iterator[RawRow]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _jsonl_rows(path, source)
    elif path.suffix == ".json":
        yield from _json_rows(path, source)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path, source)
    else:
        raise DataError(
            f"{source} is of no known kind",
            fix="use .jsonl, .jsonl.gz, .json or .parquet, hub:NAME, or file.py:function",
        )


def _jsonl_rows(path: Path, source: str) -> Iterator[RawRow]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(cast("Iterable[bytes]", lines), start=1):
                if line.strip():
                    yield _parse_line(line, f"{source}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be read: {error}", fix="replace the file") from error


def _parse_line(line: bytes, place: str) -> RawRow:
    try:
        return RawRow(place, json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return RawRow(place, None, str(error))


def _json_rows(path: Path, source: str) -> Iterator[RawRow]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{source} is not a JSON file: {error}",
            fix="write one list of objects, or one object a line in a .jsonl file",
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{source} holds {shown(rows)}, not a list", fix="write one list of objects"
        )
    for number, row in enumerate(cast("list[Any]", rows), start=1):
        yield RawRow(f"{source}: item {number}", row)


def _parquet_rows(path: Path, source: str) -> Iterator[RawRow]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{source}: row {number}", row)
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{source} cannot be read: {error}", fix="replace the file") from error


def _hub_rows(name: str, source: str, *, split: str) -> Iterator[RawRow]:
    """`hub:NAME`, or `hub:NAME:CONFIGURATION` where a dataset has several."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra.of("datasets", "hub") from error
    repository, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, configuration or None, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{source} (split {split!r}) cannot be loaded: {error}",
            fix="check the name and the split, and that the hub can be reached; a dataset with "
            "several configurations is named hub:NAME:CONFIGURATION",
        ) from error
    for number, row in enumerate(cast("Iterable[Any]", rows), start=1):
        yield RawRow(f"{source}: row {number}", row)


def _object(objects: Mapping[str, Any], name: str) -> Any:
    if name not in objects:
        known = ", ".join(objects) or "none"
        raise DataError(
            f"there is no object {name!r} to read rows from (known: {known})",
            fix="object:NAME works only where Python code hands the object over; name a file "
            "instead",
        )
    return objects[name]


def _reference(source: str, base: Path) -> Any:
    where = source.partition(":")[0]
    folder = base if (base / where).is_file() else Path.cwd()
    return load_reference(source, base=folder)


def _python_rows(rows: Any, source: str, *, limited: bool) -> Iterator[RawRow]:
    """Rows of a list, an iterable, or a function that gives one. A string is a prompt."""
    if callable(rows):
        rows = rows()
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise DataError(
            f"{source} gives {shown(rows)}", fix="give a list (or a generator) of texts or dicts"
        )
    bounded = limited or isinstance(rows, Sized)
    for number, row in enumerate(cast("Iterable[Any]", rows), start=1):
        if not bounded and number > MOST_UNLIMITED_ROWS:
            raise DataError(
                f"{source} gave more than {MOST_UNLIMITED_ROWS:,} rows and did not end",
                fix="rows are read before the run: end the generator, or set the domain's limit",
            )
        yield RawRow(f"{source}: row {number}", {"prompt": row} if isinstance(row, str) else row)
