"""The sizes of a model that ranks divide, as its own config.json says them.

It is read where the model is a folder on this machine; of any other model the strategy itself finds
out when it starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What model families call the number of experts in a layer."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model's config.json says of the sizes that ranks divide. 0: it does not say."""

    heads: int
    kv_heads: int
    inner: int
    experts: int

    @classmethod
    def read(cls, path: str) -> ModelSizes | None:
        """None if the model is not a folder with a config.json that says them."""
        try:
            said = json.loads((Path(path).expanduser() / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(said, dict):
            return None
        facts: dict[str, Any] = said  # pyright: ignore
        facts = facts.get("text_config") or facts
        heads = _number(facts, "num_attention_heads")
        if not heads:
            return None
        return cls(
            heads=heads,
            kv_heads=_number(facts, "num_key_value_heads") or heads,
            inner=_number(facts, "intermediate_size"),
            experts=max(_number(facts, key) for key in EXPERT_KEYS),
        )

    @property
    def cuttable(self) -> int:
        """What `tensor` has to divide."""
        return gcd(self.heads, self.kv_heads, self.inner)

    def describe(self) -> str:
        """The sizes that ranks may divide by, and why."""
        why = f"{self.heads} heads, {self.kv_heads} key-value heads, inner size {self.inner}"
        said = f"tensor may be {divisors(self.cuttable)} ({why}); data and context any number"
        if self.experts:
            said += f"; expert {divisors(self.experts)} ({self.experts} experts)"
        return said


def _number(facts: dict[str, Any], key: str) -> int:
    value = facts.get(key)
    return value if isinstance(value, int) else 0


def divisors(size: int) -> str:
    """Those of a size, as many as fit into a sentence."""
    found = [str(number) for number in range(1, min(size, 64) + 1) if size % number == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
