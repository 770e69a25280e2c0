"""Training on a GPU without the decoder's modules, and one attention kernel for all segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from rollick.models.attention import varlen as attention
from rollick.models.attention.varlen import ROOT, VARLEN, PackedLayout, ragged_kernel
from rollick.models.decoder.training import hidden_states, prepare_decoder

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
DECODERS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}
LENGTHS, PARENTS = [40, 30, 7, 30, 65], [ROOT, 0, 0, 0, ROOT]


def make_decoder(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DECODERS[name], attn_implementation=VARLEN)
    return model.to("cuda", dtype).eval().base_model


def compute_both(
    name: str, dtype: torch.dtype, layout: PackedLayout
) -> list[dict[str, torch.Tensor]]:
    """Hidden states and gradients, without and with the decoder's modules."""
    torch.manual_seed(1)
    ids_N = torch.randint(100, (sum(layout.lengths),), device="cuda")
    actual: list[dict[str, torch.Tensor]] = []
    for direct in (True, False):
        decoder = make_decoder(name, dtype)
        if direct:
            prepare_decoder(decoder)
            hidden = hidden_states(decoder, ids_N, layout)
        else:
            hidden = decoder(
                input_ids=ids_N[None],
                position_ids=layout.position_ids_N[None],
                use_cache=False,
                layout=layout,
            ).last_hidden_state[0]
        assert hidden is not None
        torch.manual_seed(2)
        (hidden.float() * torch.randn_like(hidden, dtype=torch.float32)).sum().backward()
        gradients = {name: value.grad for name, value in decoder.named_parameters()}
        actual.append({"hidden": hidden.detach(), **gradients})
    return actual


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_and_gradients_are_those_of_the_modules(name: str) -> None:
    layout = PackedLayout.of(LENGTHS, parents=PARENTS, device="cuda")
    direct, modules = compute_both(name, torch.float32, layout)
    for part, expected in modules.items():
        assert relative_difference(direct[part], expected) < 1e-4, part


@pytest.mark.parametrize("name", DECODERS)
def test_in_bfloat16_they_are_equal_up_to_its_rounding(name: str) -> None:
    layout = PackedLayout.of(LENGTHS, parents=PARENTS, device="cuda")
    direct, modules = compute_both(name, torch.bfloat16, layout)
    for part, expected in modules.items():
        assert relative_difference(direct[part], expected) < 0.03, part


@pytest.mark.parametrize("window", [None, 16])
def test_one_kernel_for_all_segments_gives_what_one_for_each_run_gives(window: int | None) -> None:
    assert ragged_kernel() is not None, "this torch has no kernel for many lengths"
    layout = PackedLayout.of(LENGTHS, parents=PARENTS, device="cuda")
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, sum(layout.lengths), 64, device="cuda") for heads in (4, 2, 2)]
    half = [one.to(torch.bfloat16).requires_grad_() for one in tensors]
    wide = [one.detach().float().requires_grad_() for one in half]
    at_once, _ = attention.varlen_attention(
        torch.nn.Identity(), *half, None, layout=layout, scaling=0.125, sliding_window=window
    )
    by_run, _ = attention.varlen_attention(
        torch.nn.Identity(), *wide, None, layout=layout, scaling=0.125, sliding_window=window
    )
    assert relative_difference(at_once, by_run) < 0.01
    weights = torch.randn_like(by_run)
    gradients = torch.autograd.grad((at_once.float() * weights).sum(), half)
    expected = torch.autograd.grad((by_run * weights).sum(), wide)
    for one, other in zip(gradients, expected, strict=True):
        assert relative_difference(one, other) < 0.01
