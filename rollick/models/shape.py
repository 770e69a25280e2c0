"""The sizes of a decoder, and how many numbers follow from them. Pure: needs no torch, and no file
but the model's own config.json.

Legend: a weight is counted as rows x columns; norms and biases are left out (below one percent).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What model families call the number of experts in a layer."""

PLAIN_KINDS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Decoders whose forward is known here (paged_decoder.py, plain_training.py), as a configuration
names them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that memory follows from."""

    layers: int
    hidden: int
    inner: int
    """Rows of a feed-forward network's first matrices; of one expert in a mixture."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_used: int = 0
    """Experts that a token goes to."""
    kind: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """From a model's configuration; None if it does not say what a decoder's does."""
        facts: Mapping[str, Any] = config.get("text_config") or config
        try:
            hidden, heads = int(facts["hidden_size"]), int(facts["num_attention_heads"])
            experts = next((int(facts[name]) for name in EXPERTS if facts.get(name)), 0)
            inner = facts.get("moe_intermediate_size") if experts else None
            return cls(
                layers=int(facts["num_hidden_layers"]),
                hidden=hidden,
                inner=int(inner or facts["intermediate_size"]),
                heads=heads,
                kv_heads=int(facts.get("num_key_value_heads") or heads),
                head_dim=int(facts.get("head_dim") or hidden // heads),
                vocabulary=int(facts["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", facts.get("tie_word_embeddings"))),
                experts=experts,
                experts_used=int(facts.get("num_experts_per_tok") or 0) if experts else 0,
                kind=str(facts.get("model_type") or ""),
            )
        except (KeyError, TypeError, ValueError):
            return None

    @classmethod
    def read(cls, path: str) -> ModelShape | None:
        """Of a folder on this machine; None where it is something else."""
        try:
            found: Any = json.loads((Path(path).expanduser() / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return cls.of(found) if isinstance(found, dict) else None  # pyright: ignore[reportUnknownArgumentType]

    @property
    def matrices(self) -> dict[str, tuple[int, int, int]]:
        """(how many, rows, columns) of each kind of linear layer, without the head. Experts are no
        linear layers of their own: see `expert_numbers`."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = {
            "q_proj": (self.layers, wide, self.hidden),
            "k_proj": (self.layers, narrow, self.hidden),
            "v_proj": (self.layers, narrow, self.hidden),
            "o_proj": (self.layers, self.hidden, wide),
        }
        if not self.experts:
            found |= {
                "gate_proj": (self.layers, self.inner, self.hidden),
                "up_proj": (self.layers, self.inner, self.hidden),
                "down_proj": (self.layers, self.hidden, self.inner),
            }
        return found

    @property
    def expert_numbers(self) -> int:
        """Numbers in all experts and their routers."""
        return self.layers * self.experts * self.hidden * (3 * self.inner + 1)

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        linears = sum(count * rows * columns for count, rows, columns in self.matrices.values())
        return embeddings + linears + self.expert_numbers

    def adapter_parameters(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Numbers in adapters of this rank on these layers; none named: all linear ones."""
        return sum(
            count * rank * (rows + columns)
            for name, (count, rows, columns) in self.matrices.items()
            if not targets or name in targets
        )

    def adapted(self, targets: Sequence[str] = ()) -> int:
        """Numbers in the weights that those adapters are added to."""
        return sum(
            count * rows * columns
            for name, (count, rows, columns) in self.matrices.items()
            if not targets or name in targets
        )

    @property
    def cache_per_token(self) -> int:
        """Numbers that a cache keeps of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim
