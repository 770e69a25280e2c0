"""Tiny, randomly initialised models and a character tokenizer, for tests and the demo."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rollick.models.loading.load import silence_transformers

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ALPHABET = string.digits + string.ascii_lowercase + string.ascii_uppercase + " +-*/=?.,:;()<>|\n"


def tiny_tokenizer(alphabet: Sequence[str] = ALPHABET) -> PreTrainedTokenizerFast:
    """One token per character or word of the alphabet. The chat template ends turns with `|`."""
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
    """A Llama model of about 100,000 parameters, initialised from the seed."""
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


def save_tiny(
    path: Path, *, seed: int = 0, alphabet: Sequence[str] = ALPHABET, **sizes: int
) -> Path:
    """Write model and tokenizer as a Hugging Face folder; returns the folder."""
    tokenizer = tiny_tokenizer(alphabet)
    with silence_transformers():
        tiny_model(len(tokenizer), seed=seed, **sizes).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path
