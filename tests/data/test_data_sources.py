"""Sources of rows: files, the hub, generators, objects."""

import gzip
import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from rollick.config.schema import Domain
from rollick.data import sources
from rollick.data.sources import RawRow, read_rows
from rollick.errors import ConfigError, DataError, MissingExtra

ROWS = [{"prompt": "a", "n": 1}, {"prompt": "ü", "n": None}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def read(source: str, base: Path, *, objects: Any = None, **options: Any) -> list[RawRow]:
    config = Domain(source=source, **options)
    return list(read_rows(config, base=base, objects=objects or {}))


def write_sources(folder: Path) -> None:
    (folder / "r.jsonl").write_text(LINES)
    (folder / "r.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (folder / "r.json").write_text(json.dumps(ROWS))
    parquet.write_table(arrow.Table.from_pylist(ROWS), folder / "r.parquet")
    (folder / "r.py").write_text(f"ROWS = {ROWS!r}\ndef rows():\n    yield from ROWS\n")


@pytest.mark.parametrize(
    "source", ["r.jsonl", "r.jsonl.gz", "r.json", "r.parquet", "r.py:rows", "r.py:ROWS"]
)
def test_every_kind_of_source_gives_the_same_rows_up_to_its_limit(tmp_path: Path, source: str):
    write_sources(tmp_path)
    assert [row.value for row in read(source, tmp_path)] == ROWS
    assert [row.value for row in read(source, tmp_path, limit=1)] == ROWS[:1]


def test_lines_are_counted_as_an_editor_counts_them_and_blank_ones_skipped(tmp_path: Path):
    (tmp_path / "r.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}\r\n')
    assert read("r.jsonl", tmp_path) == [
        RawRow("r.jsonl:1", {"a": 1}),
        RawRow("r.jsonl:4", {"a": 2}),
    ]


@pytest.mark.parametrize("line", [b"{", b'{"a": "\xff"}', b"[" * 100_000])
def test_a_line_that_is_not_json_is_passed_on_with_its_problem(tmp_path: Path, line: bytes):
    (tmp_path / "r.jsonl").write_bytes(b'{"a": 1}\n' + line)
    good, bad = read("r.jsonl", tmp_path)
    assert not good.problem
    assert (bad.location, bad.value) == ("r.jsonl:2", None)
    assert bad.problem


def test_a_file_is_looked_for_beside_the_recipe_and_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe, working_dir = tmp_path / "recipe", tmp_path / "here"
    for folder in (recipe, working_dir):
        folder.mkdir()
        write_sources(folder)
    monkeypatch.chdir(working_dir)
    (recipe / "r.jsonl").write_text('{"prompt": "recipe"}\n')
    assert read("r.jsonl", recipe)[0].value == {"prompt": "recipe"}
    for name in ("r.jsonl", "r.py"):
        (recipe / name).unlink()
    assert read("r.jsonl", recipe)[0].value == ROWS[0]
    assert read("r.py:rows", recipe)[0].value == ROWS[0]
    assert read(str(working_dir / "r.json"), recipe)[0].value == ROWS[0]


BAD_FILES = {
    "gone.jsonl": (None, "gone.jsonl does not exist .tried"),
    "r.csv": (b"a,b", "r.csv has an unsupported file type. use .jsonl"),
    "r.json": (b'{"a": 1}', "r.json holds dict {'a': 1}, not a list"),
    "s.json": (b'[{"a": 1},\n oops]', "s.json is not a JSON file: .*line 2 column 2"),
    "r.parquet": (b"not parquet at all", "r.parquet cannot be read"),
    "r.jsonl.gz": (gzip.compress(LINES.encode())[:-9], "r.jsonl.gz cannot be read"),
    "s.jsonl.gz": (b"plain text", "s.jsonl.gz cannot be read"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_source_that_cannot_be_read_is_an_error_with_advice(tmp_path: Path, name: str):
    content, message = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(name, tmp_path)
    assert caught.value.fix


def test_a_missing_function_is_named_with_what_the_file_has(tmp_path: Path):
    write_sources(tmp_path)
    with pytest.raises(ConfigError, match=r"has no 'rowz'. it defines: .*rows"):
        read("r.py:rowz", tmp_path)


@pytest.mark.parametrize("rows", [["a", {"prompt": "b"}], ("a", {"prompt": "b"})])
def test_an_object_is_a_list_or_a_function_and_a_string_is_a_prompt(tmp_path: Path, rows: Any):
    expected = [{"prompt": "a"}, {"prompt": "b"}]
    for rows_object in (rows, lambda: iter(rows)):
        assert [r.value for r in read("object:x", tmp_path, objects={"x": rows_object})] == expected


@pytest.mark.parametrize("value", ["a text", {"prompt": "x"}, 7, lambda: None])
def test_an_object_that_is_no_list_of_rows_is_refused(tmp_path: Path, value: Any):
    with pytest.raises(DataError, match=r"object:x is .* list or generator of texts or dicts"):
        read("object:x", tmp_path, objects={"x": value})


def test_an_object_that_was_not_passed_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"no object 'x' to read rows from .known: y."):
        read("object:x", tmp_path, objects={"y": []})


def test_an_endless_generator_needs_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "MAX_UNLIMITED_ROWS", 50)
    endless = {"x": lambda: (f"p{n}" for n in count())}
    assert len(read("object:x", tmp_path, objects=endless, limit=60)) == 60
    with pytest.raises(DataError, match=r"more than 50 rows and did not end.*limit"):
        read("object:x", tmp_path, objects=endless)
    assert len(read("object:x", tmp_path, objects={"x": ["p"] * 60})) == 60


def test_a_hub_dataset_is_loaded_by_name_configuration_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((*args, options))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert [row.value for row in read("hub:org/gsm:main?split=test", tmp_path)] == ROWS
    read("hub:plain", tmp_path)
    assert calls == [("org/gsm", "main", {"split": "test"}), ("plain", None, {"split": "train"})]


def test_an_unreachable_hub_and_a_missing_package_have_different_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match="hub:x cannot be loaded: no route"):
        read("hub:x", tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rollick\[hub\]'"):
        read("hub:x", tmp_path)


@pytest.mark.timeout(60)
def test_compressed_data_that_grows_without_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "FREE_BYTES", 1 << 20)
    row = json.dumps({"prompt": "a" * 1000, "answer": "b"}) + "\n"
    bomb, honest = tmp_path / "bomb.jsonl.gz", tmp_path / "honest.jsonl.gz"
    bomb.write_bytes(gzip.compress(row.encode() * 20_000))
    honest.write_bytes(gzip.compress(row.encode() * 900))
    with pytest.raises(DataError, match=r"bomb\.jsonl\.gz has \d+ bytes and became more than"):
        read(bomb.name, tmp_path)
    assert len(read(honest.name, tmp_path)) == 900


@pytest.mark.timeout(60)
def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "MAX_LINE", 1 << 16)
    path = tmp_path / "line.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "b"}\n' + b"a" * (1 << 24)))
    with pytest.raises(DataError, match=r"line 2 of line\.jsonl\.gz has more than 65536 bytes"):
        read(path.name, tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_a_parquet_file_that_repeats_one_value_without_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dictionary: bool
):
    monkeypatch.setattr(sources, "FREE_BYTES", 1 << 20)
    path = tmp_path / "bomb.parquet"
    column = arrow.array(["a" * 10_000] * 5000)
    table = arrow.table({"prompt": column.dictionary_encode() if is_dictionary else column})
    parquet.write_table(table, path)
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match=r"bomb\.parquet has \d+ bytes and became more than"):
        read(path.name, tmp_path)
