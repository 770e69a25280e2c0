"""Damaged or malicious model folders give one clear error at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollick.config.model_sizes import ModelSizes
from rollick.config.schema import ModelConfig
from rollick.errors import ModelError
from rollick.models.loading.load import (
    empty_model,
    load_config,
    load_end_ids,
    load_model,
    load_score_model,
    load_tokenizer,
)
from rollick.models.loading.shape import ModelShape

pytestmark = pytest.mark.timeout(60)

LOADERS: dict[str, Callable[[ModelConfig], Any]] = {
    "config": load_config,
    "model": lambda config: load_model(config, device="cpu", attention="sdpa"),
    "score_model": lambda config: load_score_model(config, device="cpu", attention="sdpa"),
    "empty_model": lambda config: empty_model(config, attention="sdpa"),
    "tokenizer": load_tokenizer,
    "end_ids": load_end_ids,
}


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def edit_json(folder: Path, name: str, **keys: Any) -> ModelConfig:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | keys))
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("loader", ["config", "model", "score_model", "empty_model"])
def test_a_folder_that_names_a_kernel_of_the_hub_is_refused(folder: Path, key: str, loader: str):
    config = edit_json(folder, "config.json", **{key: "somebody/kernel"})
    with pytest.raises(ModelError, match="names the kernel 'somebody/kernel'"):
        LOADERS[loader](config)


def test_a_kernel_in_a_part_of_the_configuration_is_refused_too(folder: Path):
    inner = {"vision_config": {"_attn_implementation": "somebody/kernel"}}
    with pytest.raises(ModelError, match="names the kernel"):
        load_config(edit_json(folder, "config.json", **inner))


@pytest.mark.parametrize("named", ["eager", "flash_attention_2", "flex_attention"])
def test_the_attention_that_a_folder_names_is_not_used(folder: Path, named: str):
    config = edit_json(folder, "config.json", _attn_implementation=named)
    model: Any = load_model(config, device="cpu", attention="sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert load_config(config)._attn_implementation != named


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b""),
        ("config.json", b"[]"),
        ("config.json", b"[" * 100_000),
        ("config.json", b"\xff\xfe"),
        ("generation_config.json", b"{"),
        ("tokenizer_config.json", b"3"),
    ],
)
def test_a_file_that_is_not_a_json_object_is_named(folder: Path, name: str, content: bytes):
    (folder / name).write_bytes(content)
    for load in LOADERS.values():
        with pytest.raises(ModelError, match=name):
            load(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_link_to_a_device_is_not_read(folder: Path, name: str):
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    for load in LOADERS.values():
        with pytest.raises(ModelError, match=f"{name} is neither a file nor a folder"):
            load(ModelConfig(path=str(folder)))
    if name == "config.json":
        assert ModelShape.read(str(folder)) is None
        assert ModelSizes.read(str(folder)) is None


@pytest.mark.parametrize(
    ("loader", "name", "keys"),
    [
        ("model", "config.json", {"hidden_size": "x"}),
        ("model", "config.json", {"num_attention_heads": 0}),
        ("model", "config.json", {"num_hidden_layers": 10**9}),
        ("model", "config.json", {"hidden_act": {"a": 1}}),
        ("empty_model", "config.json", {"hidden_act": "x"}),
        ("tokenizer", "tokenizer_config.json", {"model_max_length": "x"}),
        ("tokenizer", "tokenizer_config.json", {"added_tokens_decoder": ["a"]}),
        ("end_ids", "generation_config.json", {"eos_token_id": ["a"]}),
    ],
)
def test_values_that_no_model_has_give_a_model_error(
    folder: Path, loader: str, name: str, keys: dict[str, Any]
):
    with pytest.raises(ModelError):
        LOADERS[loader](edit_json(folder, name, **keys))


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_half_a_file_gives_a_model_error(folder: Path, name: str):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    load = LOADERS["tokenizer" if name == "tokenizer.json" else "model"]
    with pytest.raises(ModelError, match="cannot load"):
        load(ModelConfig(path=str(folder)))
