"""Checks a model's folder before transformers reads it. The files of a model are untrusted: they
must not select code to run, nor block loading forever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rollick.errors import ModelError

MAX_CONFIG_BYTES = 64 << 20
MAX_LAYERS = 10_000
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
FIX = "get the model again from a source that you trust"


def check_folder(folder: str) -> None:
    """Raises ModelError for files that cannot be part of a model. A hub name is not checked; the
    configuration that the hub delivers passes `check_config` too."""
    path = Path(folder)
    if not path.is_dir():
        return
    for file in path.iterdir():
        if not file.is_file() and not file.is_dir():
            raise ModelError(f"{file} is neither a file nor a folder", fix=FIX)
    for name in JSON_FILES:
        if (path / name).is_file():
            _check_json(path / name)


def _check_json(file: Path) -> None:
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ModelError(f"{file} has {size} bytes, over the limit of {MAX_CONFIG_BYTES}", fix=FIX)
    try:
        content: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}", fix=FIX) from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no JSON object", fix=FIX)
    check_config(cast("dict[str, Any]", content), str(file))


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Raises ModelError if a configuration names a kernel of the hub, which is code, or too many
    layers."""
    for key, value in _walk(config):
        if key.endswith("_implementation") and isinstance(value, str) and "/" in value:
            problem = f"{name} names the kernel {value!r}, which is code that the hub delivers"
            raise ModelError(problem, fix=f"remove {key} from the file if you trust the model")
        if key == "num_hidden_layers" and isinstance(value, int) and value > MAX_LAYERS:
            problem = f"{name} asks for {value} layers, over the limit of {MAX_LAYERS}"
            raise ModelError(problem, fix=FIX)


def forget_implementations(config: Any) -> Any:
    """Remove the attention and experts implementations from a configuration, because the caller
    sets them."""
    sub_configs: Mapping[str, Any] = getattr(config, "sub_configs", None) or {}
    for part in (config, *(getattr(config, name, None) for name in sub_configs)):
        for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
            if getattr(part, name, None) is not None:
                setattr(part, name, None)
    return config


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth."""
    remaining = [value]
    while remaining:
        part = remaining.pop()
        if isinstance(part, dict):
            pairs = cast("dict[Any, Any]", part).items()
            yield from ((str(key), item) for key, item in pairs)
            remaining.extend(item for _, item in pairs)
        elif isinstance(part, list):
            remaining.extend(cast("list[Any]", part))
