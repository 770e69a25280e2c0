"""Reads the configuration of a model from the header of a GGUF file, without its weights.

    file -> magic, version, counts -> key-value pairs -> names of tensors -> keys of a config.json

The package `gguf` reads the same, but importing it takes a second, which is too long for
`rollick check`. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
NUMBERS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Formats of the numbers in a header, by the number of their type."""
STRING, ARRAY = 8, 9
CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""Keys of a config.json, and the keys of a header after the name of the architecture."""
MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}
"""Architectures with another name in transformers."""


def read_gguf_config(file: Path) -> dict[str, Any]:
    """The sizes of the model as in its config.json. OSError or ValueError if the header is damaged;
    a key that the header lacks is left out."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as view:
        try:
            return _Header(view).config()
        except (struct.error, OverflowError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"the header of {file} is damaged: {error}") from error


class _Header:
    """Reads the header sequentially."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view, self._offset = view, 0

    def config(self) -> dict[str, Any]:
        if self._view[: len(MAGIC)] != MAGIC:
            raise ValueError("it does not begin with the magic number of a GGUF file")
        self._offset = len(MAGIC)
        version, tensors, pairs = self._unpack("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"version {version} of GGUF is not supported")
        values: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            values[key] = self._value(self._number("I"))
        return self._to_config(values, self._has_tensor("output.weight", tensors))

    def _to_config(self, values: dict[str, Any], has_head: bool) -> dict[str, Any]:
        architecture = str(values.get("general.architecture"))
        config = {
            config_key: values[key]
            for config_key, name in CONFIG_KEYS.items()
            if (key := f"{architecture}.{name}") in values
        }
        if "tokenizer.ggml.tokens" in values:
            config.setdefault("vocab_size", len(values["tokenizer.ggml.tokens"]))
        config["model_type"] = MODEL_TYPES.get(architecture, architecture)
        config["tie_word_embeddings"] = not has_head
        return config

    def _has_tensor(self, name: str, count: int) -> bool:
        is_present = False
        for _ in range(count):
            is_present = self._string() == name or is_present
            self._skip(8 * self._number("I") + 4 + 8)  # dimensions, type, offset
        return is_present

    def _value(self, kind: int) -> Any:
        """A number or a string; of an array only its length, as a range."""
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._number(_format(kind))
        item, count = self._unpack("IQ")
        if item in NUMBERS:
            self._skip(count * struct.calcsize(_format(item)))
        elif item == STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self._value(item)
        return range(count)

    def _skip_strings(self, count: int) -> None:
        """Skip strings without a call for each: a vocabulary has 100,000 of them or more."""
        read_size, view, offset = struct.Struct("<Q").unpack_from, self._view, self._offset
        for _ in range(count):
            offset += 8 + read_size(view, offset)[0]
        self._skip(offset - self._offset)

    def _string(self) -> str:
        size = self._number("Q")
        begin = self._offset
        self._skip(size)
        return self._view[begin : begin + size].decode("utf-8")

    def _number(self, format: str) -> Any:
        return self._unpack(format)[0]

    def _unpack(self, format: str) -> tuple[Any, ...]:
        format = f"<{format}"
        numbers = struct.unpack_from(format, self._view, self._offset)
        self._offset += struct.calcsize(format)
        return numbers

    def _skip(self, size: int) -> None:
        if size > len(self._view) - self._offset:
            raise ValueError("the header ends too early")
        self._offset += size


def _format(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"a value of the unknown type {kind}")
    return NUMBERS[kind]
