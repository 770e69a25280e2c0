"""A tiny mixture of experts, and norms that compute in float64, for tests of gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollick.models.loading.load import silence_transformers
from rollick.testing.tiny import tiny_tokenizer


def tiny_mixture(
    vocabulary: int,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 4,
    chosen: int = 2,
) -> Qwen3MoeForCausalLM:
    """A Qwen3 mixture of experts, initialised from the seed."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,  # pyright: ignore[reportCallIssue]
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
        initializer_range=0.1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).float()


def widen_norms(model: nn.Module) -> None:
    """Make the norms of a float64 model compute in float64, in place.

    The norms of transformers compute in float32, so gradients of shared and separate rows would
    differ in rounding.
    """

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(forward, module)


def save_tiny_mixture(path: Path, *, seed: int = 0, **sizes: int) -> Path:
    """Write a mixture of experts and its tokenizer as a Hugging Face folder; returns the folder."""
    tokenizer = tiny_tokenizer()
    with silence_transformers():
        tiny_mixture(len(tokenizer), seed=seed, **sizes).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path
