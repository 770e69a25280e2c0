"""Reads the rows of a source: a file, a hub dataset, a generator, or an object in Python.

Each row has a location for messages. A row that cannot be parsed is passed on with its problem; a
source that cannot be read raises DataError. prompt_rows.py validates the contents.
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
from rollick.config.problems import describe_value
from rollick.config.schema import Domain, EnvironmentSpec, environment_of
from rollick.data.reasoning_gym_source import gym_rows
from rollick.errors import DataError, MissingExtra
from rollick.types import stable_hash

DEFAULT_TASKS = 1000
"""Tasks of an environment without a source, if the domain has no limit."""

MAX_UNLIMITED_ROWS = 1_000_000
"""A generator that yields more rows than this, without `limit`, is considered endless."""

MAX_GROWTH = 200
"""Bytes that a compressed byte may become; real data grows less than a hundredfold."""

FREE_BYTES = 256 << 20
"""Data may always become this large."""

PARQUET_ROWS = 128
"""Rows that are decompressed at once."""

MAX_LINE = 64 << 20
"""Bytes of one line of JSON."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as read. `problem` is set if it could not be parsed, such as invalid JSON."""

    location: str
    value: Any
    problem: str = ""


def task_seed(seed: int, purpose: str, environment: str, task: int) -> int:
    """The seed of a task: equal for all samples of its group, in every process and run."""
    return stable_hash("task", seed, purpose, environment, task)


def read_rows(
    config: Domain, *, base: Path, objects: Mapping[str, Any], purpose: str = "train"
) -> Iterator[RawRow]:
    """The first `limit` rows of a source. Rows beyond the limit are not read.

    An environment without a source has one row per task, with its number and its seed. The seed
    depends on `purpose`.
    """
    source, environment = config.source, environment_of(config)
    if not source and environment is not None:
        return _task_rows(environment, purpose, tasks=config.limit or DEFAULT_TASKS)
    prefix, _, name = source.partition(":")
    if prefix == "object":
        if name not in objects:
            known = ", ".join(objects) or "none"
            raise DataError(
                f"there is no object {name!r} to read rows from (known: {known})",
                fix="pass the object to the run in Python, or name a file instead",
            )
        rows = _python_rows(objects[name], source, limited=config.limit > 0)
    elif prefix == "hub":
        rows = _hub_rows(name, source)
    elif prefix == "reasoning_gym":
        rows = _numbered(gym_rows(name, limit=config.limit), source, "puzzle")
    elif is_reference(source):
        folder = base if (base / prefix).is_file() else Path.cwd()
        function = load_reference(source, base_dir=folder)
        rows = _python_rows(function, source, limited=config.limit > 0)
    else:
        rows = _file_rows(_locate(source, base), source)
    return islice(rows, config.limit or None)


def _task_rows(environment: EnvironmentSpec, purpose: str, *, tasks: int) -> Iterator[RawRow]:
    name = environment.name
    for task in range(tasks):
        seed = task_seed(environment.seed, purpose, name, task)
        location = f"{name}: task {task}"
        yield RawRow(location, {"prompt": location, "task": task, "seed": seed})


def _locate(source: str, base: Path) -> Path:
    paths = dict.fromkeys([base / source, Path.cwd() / source])
    for path in paths:
        if path.is_file():
            return path
    raise DataError(
        f"{source} does not exist (tried {' and '.join(map(str, paths))})",
        fix="use a path relative to the recipe or the working directory, or hub:NAME",
    )


def _file_rows(path: Path, source: str) -> Iterator[RawRow]:
    readers = {".jsonl": _jsonl_rows, ".jsonl.gz": _jsonl_rows, ".json": _json_rows}
    for ending, read in {**readers, ".parquet": _parquet_rows}.items():
        if path.name.endswith(ending):
            return read(path, source)
    raise DataError(
        f"{source} has an unsupported file type",
        fix="use .jsonl, .jsonl.gz, .json or .parquet, hub:NAME, or file.py:function",
    )


def _jsonl_rows(path: Path, source: str) -> Iterator[RawRow]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        size_limit = _DecompressionLimit(path, source)
        with opener(path, "rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE:
                    problem = f"line {number} of {source} has more than {MAX_LINE} bytes"
                    raise DataError(problem, fix="write one JSON object per line")
                size_limit.add(len(line))
                if line.strip():
                    yield _parse_line(line, f"{source}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{source} cannot be read: {error}", fix="replace the file") from error


class _DecompressionLimit:
    """Counts the bytes that a file became, and stops at a decompression bomb."""

    def __init__(self, path: Path, source: str) -> None:
        self._source = source
        self._size = path.stat().st_size
        self._read = 0

    def add(self, count: int) -> None:
        self._read += count
        if self._read > max(FREE_BYTES, MAX_GROWTH * self._size):
            raise DataError(
                f"{self._source} has {self._size} bytes and became more than {self._read}",
                fix="decompress it yourself if you trust it, and use the .jsonl file",
            )


def _parse_line(line: bytes, location: str) -> RawRow:
    try:
        return RawRow(location, json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        return RawRow(location, None, str(error))


def _json_rows(path: Path, source: str) -> Iterator[RawRow]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{source} is not a JSON file: {error}",
            fix="write one list of objects, or one object per line in a .jsonl file",
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{source} holds {describe_value(rows)}, not a list", fix="write one list of objects"
        )
    yield from _numbered(cast("list[Any]", rows), source, "item")


def _parquet_rows(path: Path, source: str) -> Iterator[RawRow]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        size_limit = _DecompressionLimit(path, source)
        with parquet.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            largest = max((file.metadata.row_group(n).total_byte_size for n in groups), default=0)
            _DecompressionLimit(path, source).add(largest)

            def rows() -> Iterator[Any]:
                for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                    columns: list[Any] = batch.columns
                    kind = arrow.DictionaryArray
                    plain = (c.dictionary_decode() if isinstance(c, kind) else c for c in columns)
                    size_limit.add(sum(column.nbytes for column in plain))
                    yield from batch.to_pylist()

            yield from _numbered(rows(), source)
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{source} cannot be read: {error}", fix="replace the file") from error


def _hub_rows(name: str, source: str) -> Iterator[RawRow]:
    """Rows of hub:NAME[:CONFIGURATION][?split=SPLIT]; the default split is train."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra.of("datasets", "hub") from error
    name, _, query = name.partition("?")
    split = query.removeprefix("split=") or "train"
    repository, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, configuration or None, split=split)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{source} cannot be loaded: {error}",
            fix="check the connection and hub:NAME:CONFIGURATION?split=SPLIT",
        ) from error
    yield from _numbered(cast("Iterable[Any]", rows), source)


def _numbered(rows: Iterable[Any], source: str, kind: str = "row") -> Iterator[RawRow]:
    return (RawRow(f"{source}: {kind} {n}", row) for n, row in enumerate(rows, start=1))


def _python_rows(rows: Any, source: str, *, limited: bool) -> Iterator[RawRow]:
    """Rows of an iterable, or of a function that returns one. A string is a prompt."""
    if callable(rows):
        rows = rows()
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise DataError(
            f"{source} is {describe_value(rows)}", fix="use a list or generator of texts or dicts"
        )
    bounded = limited or isinstance(rows, Sized)
    for number, row in enumerate(cast("Iterable[Any]", rows), start=1):
        if not bounded and number > MAX_UNLIMITED_ROWS:
            raise DataError(
                f"{source} yielded more than {MAX_UNLIMITED_ROWS:,} rows and did not end",
                fix="rows are read before the run: end the generator, or set the domain's limit",
            )
        yield RawRow(f"{source}: row {number}", {"prompt": row} if isinstance(row, str) else row)
