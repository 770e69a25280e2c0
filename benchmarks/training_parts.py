"""Shared parts of the training benchmarks: random weights of known shapes, and batches."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from qwen_shapes import QWEN_SHAPES
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from rollick.algorithms.objective import build_objective
from rollick.config.load import recipe_from_dict
from rollick.config.schema import Recipe
from rollick.data.batch import Batch
from rollick.models.attention.varlen import VARLEN
from rollick.trainer import local
from rollick.trainer.strategy import LossFn
from rollick.types import SampleId

SHAPES: dict[str, PretrainedConfig] = {
    "tiny": LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "135M": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    **QWEN_SHAPES,
}


def random_model(shape: str, *, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            SHAPES[shape], dtype=dtype, attn_implementation=VARLEN
        ).eval()


def recipe_of(**train: Any) -> Recipe:
    """A GRPO recipe; its paths are not used."""
    names = frozenset({"rows", "reward"})
    given = {
        "model": {"path": "random"},
        "data": {"domains": {"all": {"source": "object:rows", "rewards": ["object:reward"]}}},
        "algorithm": {"preset": "grpo"},
        "train": train,
    }
    return recipe_from_dict(given, objects=names).recipe


def random_strategy(
    shape: str,
    *,
    device: str,
    dtype: torch.dtype,
    **train: Any,
) -> local.LocalStrategy:
    """The local strategy with random weights."""

    def load(*_: Any, **__: Any) -> Any:
        return random_model(shape, device=device, dtype=dtype)

    with patch.object(local, "load_packed_model", load):
        return local.LocalStrategy(recipe_of(**train), device=device)


def objective() -> LossFn:
    return build_objective(recipe_of().algorithms, base=None)


def random_batch(
    groups: int, group_size: int, *, prompt: int, new: int, vocabulary: int, seed: int = 0
) -> Batch:
    """Groups of samples that share a prompt; the new tokens are trained on."""
    draw = np.random.default_rng(seed)
    length, samples = prompt + new, groups * group_size
    prompts = draw.integers(1, vocabulary, (groups, prompt)).repeat(group_size, axis=0)
    ids = np.concatenate([prompts, draw.integers(1, vocabulary, (samples, new))], axis=1)
    trained = np.tile(np.arange(length) >= prompt, samples)
    by_sample = np.repeat(draw.normal(size=samples), length)
    return Batch(
        token_ids_N=ids.reshape(-1).astype(np.int32),
        lengths_B=np.full(samples, length, np.int32),
        uids=tuple(
            SampleId(number // group_size, number % group_size) for number in range(samples)
        ),
        group_B=np.arange(samples, dtype=np.int32) // group_size,
        temperature_B=np.ones(samples),
        loss_mask_N=trained,
        logprobs_N=np.full(samples * length, -5.0, np.float32),
        versions_N=np.zeros(samples * length, np.int32),
        advantages_N=np.where(trained, by_sample, 0.0),
        weights_N=np.where(trained, 1 / trained.sum(), 0.0),
    )


def synchronize(device: str) -> None:
    """Wait until the device has computed everything."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
