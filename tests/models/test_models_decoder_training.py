"""Training without calls of the decoder's modules: the same hidden states and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_mixture import widen_norms
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollick.models.attention.varlen import ROOT, VARLEN, PackedLayout
from rollick.models.decoder.fused_linear import adjacent_view
from rollick.models.decoder.spec import describe_decoder
from rollick.models.decoder.training import hidden_states, prepare_decoder

SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
DECODERS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama_biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral_window": MistralConfig(**SIZES, sliding_window=3),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}
LENGTHS, PARENTS = [4, 3, 2, 3, 5], [ROOT, 0, 0, 0, ROOT]


def make_decoder(config: PretrainedConfig, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=VARLEN).to(dtype).eval()
    for parameter in model.parameters():
        # Norms of ones and biases of zeros would hide a mistake.
        torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
    return model.base_model


def run_modules(decoder: Any, ids_N: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    return decoder(
        input_ids=ids_N[None],
        position_ids=layout.position_ids_N[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state[0]


def compute_gradients(decoder: nn.Module, hidden_ND: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    (hidden_ND * torch.randn_like(hidden_ND)).sum().backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


def make_inputs() -> tuple[torch.Tensor, PackedLayout]:
    torch.manual_seed(2)
    return torch.randint(23, (sum(LENGTHS),)), PackedLayout.of(LENGTHS, parents=PARENTS)


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_and_all_gradients_are_those_of_the_modules(name: str):
    plain = make_decoder(DECODERS[name])
    modules = copy.deepcopy(plain)
    widen_norms(modules)
    prepare_decoder(plain)
    ids_N, layout = make_inputs()
    hidden = hidden_states(plain, ids_N, layout)
    assert hidden is not None
    expected = run_modules(modules, ids_N, layout)
    torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-10)
    actual, expected_grads = compute_gradients(plain, hidden), compute_gradients(modules, expected)
    assert actual.keys() == expected_grads.keys()
    for parameter, value in expected_grads.items():
        torch.testing.assert_close(actual[parameter], value, rtol=1e-9, atol=1e-10, msg=parameter)


def test_in_half_precision_both_forwards_have_similar_errors():
    ids_N, layout = make_inputs()
    exact = run_modules(make_decoder(DECODERS["llama"]), ids_N, layout)
    half = make_decoder(DECODERS["llama"], torch.bfloat16)
    hidden = hidden_states(half, ids_N, layout)
    assert hidden is not None
    assert hidden.dtype is torch.bfloat16
    mean_error = (hidden.double() - exact).abs().mean()
    mean_error_of_modules = (run_modules(half, ids_N, layout).double() - exact).abs().mean()
    assert 0 < mean_error < 1.5 * mean_error_of_modules


def test_fused_weights_are_adjacent_and_keep_names_and_values():
    decoder = make_decoder(DECODERS["llama"])
    before = {name: value.clone() for name, value in decoder.named_parameters()}
    mlp = decoder.layers[0].mlp
    assert adjacent_view([mlp.gate_proj.weight, mlp.up_proj.weight]) is None
    prepare_decoder(decoder)
    assert adjacent_view([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None
    for name, value in decoder.named_parameters():
        assert torch.equal(value, before[name]), name


def test_weights_that_were_separated_give_the_same():
    fused, separate = make_decoder(DECODERS["qwen2"]), make_decoder(DECODERS["qwen2"])
    prepare_decoder(fused)
    ids_N, layout = make_inputs()
    hiddens = [hidden_states(decoder, ids_N, layout) for decoder in (fused, separate)]
    assert hiddens[0] is not None
    assert hiddens[1] is not None
    torch.testing.assert_close(hiddens[0], hiddens[1], rtol=1e-12, atol=1e-12)


def test_frozen_layers_get_no_gradient_and_let_it_through():
    decoder = make_decoder(DECODERS["qwen2"])
    decoder.layers.requires_grad_(False)
    hidden = hidden_states(decoder, *make_inputs())
    assert hidden is not None
    assert compute_gradients(decoder, hidden).keys() == {"embed_tokens.weight", "norm.weight"}


def add_hook(decoder: Any) -> None:
    decoder.layers[1].mlp.register_forward_hook(lambda *_: None)


def replace_layer(decoder: Any) -> None:
    class Other(nn.Linear):
        pass

    decoder.layers[0].self_attn.o_proj = Other(16, 16, bias=False).double()


def replace_forward(decoder: Any) -> None:
    decoder.norm.forward = lambda hidden: hidden


@pytest.mark.parametrize("change", [add_hook, replace_layer, replace_forward])
def test_a_modified_decoder_runs_its_own_forward_in_training(change: Any):
    decoder = make_decoder(DECODERS["llama"])
    assert describe_decoder(decoder) is not None
    change(decoder)
    assert hidden_states(decoder, *make_inputs()) is None


def test_a_decoder_of_another_kind_runs_itself():
    config = GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    model = AutoModelForCausalLM.from_config(config)
    assert describe_decoder(model.base_model) is None
