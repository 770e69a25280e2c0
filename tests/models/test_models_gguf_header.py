"""The sizes of a model from the header of its GGUF file."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollick.models.loading.gguf_header import read_gguf_config
from rollick.models.loading.shape import ModelShape

SIZES = {
    "qwen3.block_count": 2,
    "qwen3.embedding_length": 8,
    "qwen3.feed_forward_length": 16,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 4,
}
RECIPE = """\
model: {path: tiny.gguf}
data: {domains: {sums: {source: sums.jsonl, rewards: [exact_match]}}}
"""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value(content: Any) -> bytes:
    if isinstance(content, list):
        items = b"".join(map(text, content))
        return struct.pack("<IIQ", 9, 8, len(content)) + items
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    return struct.pack("<II", 4, content)


def make_header(values: dict[str, Any], tensors: list[str]) -> bytes:
    pairs = b"".join(text(key) + value(content) for key, content in values.items())
    infos = b"".join(text(name) + struct.pack("<IQQIQ", 2, 8, 100, 0, 0) for name in tensors)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + pairs + infos


@pytest.fixture
def file(tmp_path: Path) -> Path:
    values = {
        "general.architecture": "qwen3",
        "tokenizer.ggml.tokens": [str(number) for number in range(100)],
        **SIZES,
    }
    file = tmp_path / "tiny.gguf"
    file.write_bytes(make_header(values, ["token_embd.weight", "output_norm.weight"]))
    return file


def test_the_shape_of_a_gguf_file_is_read_without_converting_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROLLICK_CACHE", str(tmp_path / "cache"))
    expected = ModelShape(2, 8, 16, 4, 2, head_dim=4, vocabulary=100, tied=True, kind="qwen3")
    assert ModelShape.read(str(file)) == expected
    assert not (tmp_path / "cache").exists()


def test_a_head_of_its_own_is_found_among_the_tensors(tmp_path: Path):
    file = tmp_path / "untied.gguf"
    values = {"general.architecture": "qwen3", "qwen3.vocab_size": 100, **SIZES}
    file.write_bytes(make_header(values, ["token_embd.weight", "output.weight"]))
    assert read_gguf_config(file)["tie_word_embeddings"] is False


@pytest.mark.parametrize("kept", [4, 20, 40, 200, -3])
def test_a_header_that_ends_early_has_no_shape(file: Path, kept: int):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r".+"):
        read_gguf_config(file)
    assert ModelShape.read(str(file)) is None


@pytest.mark.parametrize(
    "damage",
    [
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + struct.pack("<I", 77),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + struct.pack("<IIQ", 9, 4, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 9) * 5000,
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text("k")
        + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 1),
    ],
    ids=["version", "type", "array", "string", "nesting", "strings"],
)
def test_a_damaged_header_has_no_shape(tmp_path: Path, damage: bytes):
    file = tmp_path / "damaged.gguf"
    file.write_bytes(damage)
    assert ModelShape.read(str(file)) is None


def test_check_prints_the_memory_of_a_gguf_model(file: Path, monkeypatch: pytest.MonkeyPatch):
    folder = file.parent
    monkeypatch.setenv("ROLLICK_CACHE", str(folder / "cache"))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    command = [sys.executable, "-m", "rollick", "check", "--recipe-only", "recipe.yaml"]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    assert "unknown until the run starts" not in child.stdout
    assert re.search(r"^memory +phase", child.stdout, re.MULTILINE)
    assert not (folder / "cache").exists()
