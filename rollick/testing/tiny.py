"""A tiny decoder and a character tokenizer, made from nothing: for tests and the demo."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn.functional import rms_norm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollick.models.load import quietly

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = string.digits + string.ascii_lowercase + string.ascii_uppercase + " +-*/=?.,:;()<>|\n"


def tiny_tokenizer(alphabet: Sequence[str] = ALPHABET) -> PreTrainedTokenizerFast:
    """One token per character, and for each word among them; a plain chat template that opens and
    closes turns with `|`."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    words = [token for token in alphabet if len(token) > 1]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pieces = Regex("|".join([*map(re.escape, words), "[\\s\\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}"
        "{% else %}{{ m['content'] }}|{% endif %}{% endfor %}"
    )
    return fast


def tiny_model(
    vocabulary: int,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_length: int = 256,
) -> LlamaForCausalLM:
    """A Llama of some hundred thousand parameters with weights that follow from the seed."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()


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
    """The same with experts, and with norms of queries and keys."""
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
    """Let the norms of a float64 model compute in float64, in place.

    Those of transformers go through float32, which rounds each row's gradient to seven digits:
    a row that several samples share is then rounded once where theirs are rounded one by one.
    """

    def forward(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)

    for part in model.modules():
        if hasattr(part, "variance_epsilon"):
            part.forward = partial(forward, part)


def save_tiny_mixture(path: Path, *, seed: int = 0, **sizes: int) -> Path:
    """Write a mixture of experts and its tokenizer as a Hugging Face folder; returns the folder."""
    tokenizer = tiny_tokenizer()
    with quietly():
        tiny_mixture(len(tokenizer), seed=seed, **sizes).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def save_tiny(
    path: Path,
    *,
    seed: int = 0,
    alphabet: Sequence[str] = ALPHABET,
    **sizes: int,
) -> Path:
    """Write model and tokenizer as a Hugging Face folder; returns the folder."""
    tokenizer = tiny_tokenizer(alphabet)
    with quietly():
        tiny_model(len(tokenizer), seed=seed, **sizes).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path
