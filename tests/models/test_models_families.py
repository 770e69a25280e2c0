"""No family is silently wrong: engine and learner compute it exactly, or refuse it at load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_verdicts import (
    RESULTS,
    Verdict,
    judge_engine,
    judge_learner,
    judge_paged,
    reason_only,
    save_family,
    vllm_lists,
)
from tiny_families import FAMILIES, tiny_family
from torch import nn

from rollick.config.schema import ModelConfig
from rollick.errors import ModelError
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import load_model
from rollick.models.loading.probe import EXACT_FAMILIES, check_learner

DOCS = Path(__file__).parent.parent.parent / "docs"

RECORDED: dict[str, dict[str, list[str]]] = json.loads(RESULTS.read_text("utf-8"))

pytestmark = [
    pytest.mark.timeout(120),
    # Warnings about slower implementations that some families fall back to.
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]


def test_the_table_has_at_least_35_families_and_none_that_is_wrong():
    assert len(RECORDED) >= 35
    assert RECORDED.keys() == FAMILIES.keys()
    results = {
        (family, column): verdict[0]
        for family, columns in RECORDED.items()
        for column, verdict in columns.items()
        if column in ("cpu_engine", "gpu_engine", "learner")
    }
    assert set(results.values()) <= {"exact", "refused"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_exact_or_refused_at_load_as_in_the_table(family: str, tmp_path: Path):
    folder = save_family(family, tmp_path / family)
    reference = load_model(ModelConfig(path=str(folder)), device="cpu", attention="eager")
    actual = {
        "cpu_engine": judge_engine(folder, reference, device="cpu"),
        "learner": judge_learner(folder, reference),
    }
    cleaned = {name: reason_only(verdict, folder) for name, verdict in actual.items()}
    assert cleaned == {name: Verdict(*RECORDED[family][name]) for name in actual}
    # The runner of the GPU engine, with the reference implementations of its kernels.
    assert judge_paged(folder, reference).result in ("exact", "refused")


def test_the_families_that_load_without_a_probe_are_exact():
    assert RECORDED.keys() >= EXACT_FAMILIES
    for family in EXACT_FAMILIES:
        assert RECORDED[family]["cpu_engine"][0] == RECORDED[family]["learner"][0] == "exact"


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2", "gpt_bigcode", "gpt_oss", "jetmoe"])
def test_the_gpu_runner_computes_what_it_used_to_fail_on(family: str, tmp_path: Path):
    folder = save_family(family, tmp_path)
    reference = load_model(ModelConfig(path=str(folder)), device="cpu", attention="eager")
    assert judge_paged(folder, reference) == Verdict("exact")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "a head dim of 12 for keys and 8 for values"),
        ("gemma4", "its layers have caches of 2 shapes"),
        ("stablelm", "StableLmAttention does not get the arguments"),
    ],
)
def test_the_gpu_runner_refuses_at_load_with_the_reason(family: str, reason: str, tmp_path: Path):
    folder = save_family(family, tmp_path)
    verdict = judge_paged(folder, tiny_family(family))
    assert verdict.result == "refused"
    assert reason in verdict.detail


def test_the_column_of_vllm_is_its_registry():
    pytest.importorskip("vllm", reason="vllm is not installed")
    for family in ("llama", "gemma2", "bloom", "rwkv"):
        name = type(tiny_family(family)).__name__
        assert vllm_lists(name) == RECORDED[family]["vllm"][0]


class _WithoutPositions(nn.Module):
    """Calls a decoder as if every token were the first of its sequence."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, position_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        if position_ids is not None:
            position_ids = torch.zeros_like(position_ids)
        return self.decoder(position_ids=position_ids, **inputs)


def test_a_model_of_unknown_code_is_probed_and_refused_with_what_differs():
    """The family is known, but the class is not transformers'."""
    llama_class = type(tiny_family("llama"))
    model: Any = tiny_family("llama", attention=VARLEN)
    model.model = _WithoutPositions(model.model)
    check_learner(model, max_length=64)  # the class of transformers is not probed
    model.__class__ = type("MyModel", (llama_class,), {"__module__": "my_code"})
    with pytest.raises(ModelError, match=r"cannot compute MyModel .* two sequences in one pack"):
        check_learner(model, max_length=64)


class _LocalDecoder(nn.Module):
    """Applies a window by a mask, which it builds only for eager attention."""

    def __init__(self, decoder: nn.Module, config: Any) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = config
        self.local_window_size = 16

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        if self.config._attn_implementation == "eager":
            length = input_ids.shape[1]
            allowed = torch.ones(length, length).tril().triu(1 - self.local_window_size)
            inputs["attention_mask"] = allowed.log()[None, None]
        return self.decoder(input_ids=input_ids, **inputs)


def test_a_window_by_another_name_that_our_attention_does_not_get_is_found():
    """The window is longer than the probe's sequences, and shorter than the run's."""
    model: Any = tiny_family("llama", attention=VARLEN)
    model.model = _LocalDecoder(model.model, model.config)
    model.__class__ = type("MyModel", (type(model),), {"__module__": "my_code"})
    with pytest.raises(ModelError, match="two sequences in one pack differ"):
        check_learner(model, max_length=64)
    assert model.model.local_window_size == 16


@pytest.mark.parametrize("key", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_scale_of_the_logits_that_the_family_does_not_read_is_refused(family: str, key: str):
    model: Any = tiny_family(family, attention=VARLEN)
    check_learner(model, max_length=64)
    setattr(model.config, key, 4.0)
    with pytest.raises(ModelError, match="its logits are not those of its output head"):
        check_learner(model, max_length=64)


def test_windows_that_only_the_own_mask_of_a_family_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Layers of Qwen2-MoE do not pass their window to the attention function."""
    windowed = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    options = {"qwen2_moe": {**FAMILIES["qwen2_moe"], **windowed}}
    monkeypatch.setattr("tiny_families.FAMILIES", options)
    folder = save_family("qwen2_moe", tmp_path)
    reference = tiny_family("qwen2_moe")
    for verdict in (
        judge_engine(folder, reference, device="cpu"),
        judge_paged(folder, reference),
        judge_learner(folder, reference),
    ):
        assert verdict.result == "refused"
        assert "differ from the model's own forward" in verdict.detail


def test_an_error_of_the_models_own_code_is_reported_with_its_inputs():
    """MPT's forward needs the mask that other families build only for their own attention."""
    model = tiny_family("mpt", attention=VARLEN)
    with pytest.raises(ModelError) as raised:
        check_learner(model, max_length=64)
    assert raised.value.message == (
        "the learner cannot compute MptForCausalLM (model_type 'mpt') exactly: its own code fails "
        "with our attention on two sequences in one pack "
        "(AttributeError: 'NoneType' object has no attribute 'to')"
    )


def test_a_window_longer_than_every_sequence_is_no_reason_to_refuse():
    """PhiMoE's attention does not get its window as an argument; only its mask has it."""
    model: Any = tiny_family("phimoe", attention=VARLEN)
    model.config.sliding_window = 64
    with pytest.raises(ModelError, match="two sequences in one pack differ"):
        check_learner(model, max_length=65)
    check_learner(model, max_length=64)


def test_the_probe_leaves_the_model_as_it_was():
    model: Any = tiny_family("gemma3", attention=VARLEN)
    check_learner(model, max_length=64)
    text = model.config.text_config
    assert (text._attn_implementation, text.sliding_window) == (VARLEN, 6)
    windows = [vars(part).get("sliding_window") for part in model.modules()]
    assert 4 not in windows
    assert 6 in windows


def test_the_page_of_families_is_current(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import make_families  # pyright: ignore[reportMissingImports]

    page: str = make_families.page()
    assert (DOCS / "models.md").read_text("utf-8") == page, "run python docs/make_families.py"
