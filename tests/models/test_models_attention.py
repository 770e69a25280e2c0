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

from rollick.models.attention import causal
from rollick.models.attention.causal import attend_causal
from rollick.models.attention.options import AttentionOptions
from rollick.models.attention.varlen import VARLEN, AttentionCall, PackedLayout
from rollick.models.loading.load import empty_model, share_parameters

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


def make_packed_and_plain(config: PretrainedConfig) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two models with shared float64 weights: with packed attention and with transformers' own."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    packed = empty_model(plain.config, attention=VARLEN)
    share_parameters(packed, plain)
    return packed.requires_grad_(), plain


def compute_packed_logits(
    model: torch.nn.Module, ids: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    return model(
        input_ids=ids[None],
        position_ids=layout.position_ids_N[None],
        use_cache=False,
        layout=layout,
    ).logits[0]


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_give_what_each_gives_alone(name: str, per_sequence: bool):
    packed, plain = make_packed_and_plain(DECODERS[name])
    ids = torch.arange(sum(LENGTHS)) * 7 % SIZES["vocab_size"]
    layout = PackedLayout.of(LENGTHS, per_sequence=per_sequence)
    weight = torch.linspace(-1, 1, sum(LENGTHS) * 23, dtype=torch.float64).view(-1, 23)

    packed_logits = compute_packed_logits(packed, ids, layout)
    single_logits = torch.cat([plain(part[None]).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(packed_logits, single_logits, rtol=0, atol=1e-10)

    (packed_logits * weight).sum().backward()
    (single_logits * weight).sum().backward()
    for computed, reference in zip(packed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(computed.grad, reference.grad, rtol=1e-10, atol=1e-10)


def test_equal_lengths_make_one_kernel_call():
    layout = PackedLayout.of(LENGTHS)
    assert layout.calls == (AttentionCall(1, 1), AttentionCall(2, 4), AttentionCall(2, 7))
    assert layout.order_N is not None
    assert layout.order_N.tolist()[:5] == [15, 0, 1, 2, 3]


def test_adjacent_rows_of_equal_length_are_read_in_place():
    layout = PackedLayout.of([5, 5, 3])
    assert layout.calls == (AttentionCall(2, 5), AttentionCall(1, 3))
    assert layout.order_N is None


def test_per_sequence_layout_calls_the_kernel_for_each_sequence():
    layout = PackedLayout.of([2, 2], per_sequence=True)
    assert layout.calls == (AttentionCall(1, 2), AttentionCall(1, 2))


def test_positions_restart_with_each_sequence():
    assert PackedLayout.of([2, 3]).position_ids_N.tolist() == [0, 1, 0, 1, 2]


def test_an_empty_sequence_has_no_layout():
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout.of([2, 0])


def _attend_by_hand(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionOptions
) -> torch.Tensor:
    """Attention outputs [count * length, H, D], computed for one head and one query at a time."""
    count, heads, length, _ = query.shape
    earlier, group = key.shape[2] - length, heads // key.shape[1]
    rows: list[torch.Tensor] = []
    for n in range(count):
        for q in range(length):
            stop = earlier + q + 1
            start = 0 if settings.window is None else max(0, stop - settings.window)
            for h in range(heads):
                scores = key[n, h // group, start:stop] @ query[n, h, q] * settings.scale
                if settings.softcap is not None:
                    scores = settings.softcap * torch.tanh(scores / settings.softcap)
                weights = scores.exp()
                total = weights.sum()
                if settings.sinks_H is not None:
                    total = total + settings.sinks_H[h].exp()
                rows.append((weights / total) @ value[n, h // group, start:stop])
    return torch.stack(rows).view(count * length, heads, -1)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("earlier", [0, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_caps_and_sinks_attend_by_their_definition(
    window: int | None, earlier: int, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(causal, "EXPLICIT_QUERIES", 3)
    torch.manual_seed(0)
    sizes = {"query": (2, 4, 7), "key": (2, 2, earlier + 7), "value": (2, 2, earlier + 7)}
    qkv = [torch.randn(*size, 5, dtype=torch.float64).requires_grad_() for size in sizes.values()]
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if with_sinks else None
    settings = AttentionOptions(0.9, window, softcap=0.8, sinks_H=sinks)
    computed, expected = attend_causal(*qkv, settings), _attend_by_hand(*qkv, settings)
    torch.testing.assert_close(computed, expected)
    leaves = [*qkv, *([] if sinks is None else [sinks])]
    weight = torch.randn_like(expected)
    actual = torch.autograd.grad((computed * weight).sum(), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad((expected * weight).sum(), leaves))
