"""The shapes of Qwen2.5 that benchmarks give random weights."""

from __future__ import annotations

from typing import Any

from transformers import Qwen2Config

QWEN: dict[str, Any] = {"max_position_embeddings": 4096, "rope_theta": 1e6}
QWEN_SHAPES: dict[str, Qwen2Config] = {
    "0.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **QWEN,
    ),
    "1.5B": Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **QWEN,
    ),
    "7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        **QWEN,
    ),
}
