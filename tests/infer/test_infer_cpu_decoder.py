"""The CPU decoder equals the modules' own forward, which unsupported decoders use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rollick.infer.native.cpu_decoder import cpu_decoder
from rollick.infer.native.forward import BatchedForward, PrefillChunk
from rollick.infer.native.packed_linear import can_pack, pack_linears
from rollick.infer.native.slot_cache import SlotCache
from rollick.models.attention.slot_cache import CACHED
from rollick.models.loading.load import empty_model, share_parameters

pytestmark = pytest.mark.skipif(
    not can_pack(nn.Linear(2, 2)), reason="torch is built without oneDNN"
)

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SUPPORTED = (
    LlamaConfig(**SIZES),
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    MistralConfig(**SIZES, sliding_window=3),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=16),
)


def _make_module(config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start as zeros and ones, which would hide that one is ignored.
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    module = empty_model(model.config, attention=CACHED)
    share_parameters(module, model)
    return module


def _compute_logits(config: Any, *, direct: bool) -> torch.Tensor:
    """The logits of two decode steps after a prefill of two prompts."""
    cache = SlotCache()
    cache.reserve(slots=2, length=16)
    forward = BatchedForward(_make_module(config), cache, device="cpu")
    assert forward._decoder is not None
    if not direct:
        forward._decoder = None
    forward.prefill([PrefillChunk(0, np.array([3, 4, 5, 6, 7])), PrefillChunk(1, np.array([8, 9]))])
    first = forward.decode(np.array([10, 11]), np.array([5, 2]))
    return torch.stack((first, forward.decode(np.array([12, 13]), np.array([6, 3]))))


@pytest.mark.parametrize("config", SUPPORTED, ids=lambda c: c.model_type)
@torch.inference_mode()
def test_the_cpu_decoder_computes_the_logits_of_the_modules_own_forward(config):
    torch.testing.assert_close(
        _compute_logits(config, direct=True), _compute_logits(config, direct=False)
    )


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(**SIZES, head_dim=16),
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
        LlamaConfig(**SIZES, hidden_act="gelu"),
    ],
    ids=["gemma3", "mixtral", "another activation"],
)
def test_unsupported_decoders_run_their_own_forward(config):
    module = _make_module(config)
    pack_linears(module)
    assert cpu_decoder(module) is None


def test_a_modified_decoder_runs_its_own_forward():
    hooked, replaced, unpacked = (_make_module(SUPPORTED[0]) for _ in range(3))
    for module in (hooked, replaced):
        pack_linears(module)
        assert cpu_decoder(module) is not None
    hooked_layers: Any = hooked.base_model
    hooked_layers.layers[1].register_forward_hook(lambda *_: None)
    replaced_layers: Any = replaced.base_model
    replaced_layers.layers[0].mlp.up_proj = nn.Linear(32, 64)
    assert [cpu_decoder(changed) for changed in (hooked, replaced, unpacked)] == [None] * 3
