"""Reads the sizes of a local model that parallel ranks must divide, from its config.json.

Other models are checked by the training strategy when it starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json for the number of experts in a layer."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that parallel ranks must divide; 0 where it has none."""

    heads: int
    kv_heads: int
    intermediate: int
    experts: int

    @classmethod
    def read(cls, path: str) -> ModelSizes | None:
        """None if the model is not a folder with a config.json that has them."""
        file = Path(path).expanduser() / "config.json"
        try:
            config = json.loads(file.read_text("utf-8")) if file.is_file() else None
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(config, dict):
            return None
        text_config: Any = config.get("text_config")  # pyright: ignore
        values: dict[str, Any] = text_config if isinstance(text_config, dict) else config  # pyright: ignore
        keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        heads, kv_heads, intermediate = (_read_int(values, key) for key in keys)
        experts = max(_read_int(values, key) for key in EXPERT_KEYS)
        return cls(heads, kv_heads or heads, intermediate, experts) if heads else None

    @property
    def tensor_divisible(self) -> int:
        """The number that `tensor` must divide."""
        return gcd(self.heads, self.kv_heads, self.intermediate)

    def describe(self) -> str:
        """The allowed numbers of ranks in each dimension, and the sizes that limit them."""
        sizes = f"{self.heads} heads, {self.kv_heads} key-value heads, "
        sizes += f"intermediate size {self.intermediate}"
        tensor = list_divisors(self.tensor_divisible)
        text = f"tensor may be {tensor} ({sizes}); data and context any number"
        if self.experts:
            text += f"; expert {list_divisors(self.experts)} ({self.experts} experts)"
        return text


def _read_int(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0


def list_divisors(size: int) -> str:
    """The divisors of a size up to 64, as text: `1, 2 or 4`."""
    numbers = [str(number) for number in range(1, min(size, 64) + 1) if size % number == 0]
    return numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} or {numbers[-1]}"
