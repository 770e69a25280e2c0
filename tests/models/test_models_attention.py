"""Packed attention is exact: the same numbers and gradients as one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollick.models.attention import VARLEN, PackedLayout, Run
from rollick.models.load import empty_model, share_parameters

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
DECODERS = {
    "llama": LlamaConfig(**SIZES),
    "llama_all_heads": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral_window": MistralConfig(**SIZES, sliding_window=3),
}
LENGTHS = [4, 7, 4, 1, 7]


def two_views(config: PretrainedConfig) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One set of float64 weights under packed attention and under transformers' own."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    packed = empty_model(plain.config, attention=VARLEN)
    share_parameters(packed, plain)
    return packed.requires_grad_(), plain


def packed_logits(model: torch.nn.Module, ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    return model(
        input_ids=ids[None],
        position_ids=layout.position_ids_N[None],
        use_cache=False,
        layout=layout,
    ).logits[0]


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_give_what_each_gives_alone(name: str, per_sequence: bool):
    packed, plain = two_views(DECODERS[name])
    ids = torch.arange(sum(LENGTHS)) * 7 % SIZES["vocab_size"]
    layout = PackedLayout.of(LENGTHS, per_sequence=per_sequence)
    weight = torch.linspace(-1, 1, sum(LENGTHS) * 23, dtype=torch.float64).view(-1, 23)

    together = packed_logits(packed, ids, layout)
    alone = torch.cat([plain(part[None]).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)

    (together * weight).sum().backward()
    (alone * weight).sum().backward()
    for ours, theirs in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_equal_lengths_make_one_kernel_call():
    layout = PackedLayout.of(LENGTHS)
    assert layout.runs == (Run(0, 1, 1), Run(1, 2, 4), Run(9, 2, 7))
    assert layout.order_N is not None
    assert layout.order_N.tolist()[:5] == [15, 0, 1, 2, 3]


def test_neighbours_of_equal_length_are_read_in_place():
    layout = PackedLayout.of([5, 5, 3])
    assert layout.runs == (Run(0, 2, 5), Run(10, 1, 3))
    assert layout.order_N is None


def test_per_sequence_layout_calls_the_kernel_for_each_sequence():
    layout = PackedLayout.of([2, 2], per_sequence=True)
    assert layout.runs == (Run(0, 1, 2), Run(2, 1, 2))


def test_positions_restart_with_each_sequence():
    assert PackedLayout.of([2, 3]).position_ids_N.tolist() == [0, 1, 0, 1, 2]


def test_an_empty_sequence_has_no_layout():
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout.of([2, 0])
