"""The sizes of a decoder, and numbers of parameters that follow from them. Imports no torch, and
reads no file except the model's config.json or the header of its GGUF file.

A weight counts rows x columns; norms and biases (below one percent) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollick.errors import ModelError
from rollick.models.loading.gguf_header import read_gguf_config
from rollick.models.loading.locate import locate_model

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts per layer in model configurations."""

LLAMA_STYLE_MODELS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` whose decoders models/decoder/spec.py can describe."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that determine a model's memory."""

    layers: int
    hidden: int
    inner: int
    """Rows of the MLP's first matrices; of one expert in a mixture."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_used: int = 0
    """Experts per token."""
    kind: str = ""
    """The `model_type` of the configuration."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """From a model's configuration; None if it lacks a decoder's keys."""
        text: Mapping[str, Any] = config.get("text_config") or config
        try:
            hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
            experts = next((int(text[name]) for name in EXPERTS if text.get(name)), 0)
            inner = text.get("moe_intermediate_size") if experts else None
            return cls(
                layers=int(text["num_hidden_layers"]),
                hidden=hidden,
                inner=int(inner or text["intermediate_size"]),
                heads=heads,
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                vocabulary=int(text["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings"))),
                experts=experts,
                experts_used=int(text.get("num_experts_per_tok") or 0) if experts else 0,
                kind=str(text.get("model_type") or ""),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None

    @classmethod
    def read(cls, path: str) -> ModelShape | None:
        """Of a model on this machine; None if it has no readable config.json or GGUF header."""
        try:
            location = locate_model(path)
            file = location.config_file
            config: Any = json.loads(file.read_text("utf-8")) if file else None
            if file is None and location.kind == "gguf":
                config = read_gguf_config(Path(location.path))
        except (ModelError, OSError, ValueError, RecursionError):
            return None
        return cls.of(config) if isinstance(config, dict) else None  # pyright: ignore[reportUnknownArgumentType]

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """(count, rows, columns) of each kind of linear layer, without the head and experts."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "q_proj": (self.layers, wide, self.hidden),
            "k_proj": (self.layers, narrow, self.hidden),
            "v_proj": (self.layers, narrow, self.hidden),
            "o_proj": (self.layers, self.hidden, wide),
        }
        if not self.experts:
            shapes |= {
                "gate_proj": (self.layers, self.inner, self.hidden),
                "up_proj": (self.layers, self.inner, self.hidden),
                "down_proj": (self.layers, self.hidden, self.inner),
            }
        return shapes

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * self.hidden * (3 * self.inner + 1)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and the head."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.matrix_parameters() + self.expert_parameters

    def adapter_parameters(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Parameters of adapters of this rank on these layers; by default all linear ones."""
        return sum(n * rank * (rows + columns) for n, rows, columns in self._shapes(targets))

    def matrix_parameters(self, targets: Sequence[str] = ()) -> int:
        """Parameters of the weights of these layers; by default of all linear ones."""
        return sum(n * rows * columns for n, rows, columns in self._shapes(targets))

    def _shapes(self, targets: Sequence[str]) -> list[tuple[int, int, int]]:
        """(count, rows, columns) of the named matrices; by default of all."""
        return [shape for name, shape in self.matrices.items() if not targets or name in targets]

    @property
    def cache_per_token(self) -> int:
        """Values per token in a KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim
