"""A toy task that a tiny model learns in seconds: say the letter that the prompt names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"


def letter_rows() -> list[dict[str, str]]:
    """One row for each letter."""
    return [{"prompt": f"say {letter}", "answer": letter} for letter in LETTERS]


def says_letter(completion: str, answer: str) -> float:
    """Share of the first two characters that are the letter."""
    return sum(character == answer for character in completion[:2]) / 2


def toy_recipe(model: Path, runs: Path, *, name: str = "toy", steps: int = 4) -> dict[str, Any]:
    """A recipe, as a dict, over a tiny model's folder: quick, inline, quiet."""
    rewards = ["rollick.testing.toys:says_letter"]
    domain = {"source": "rollick.testing.toys:letter_rows", "rewards": rewards}
    return {
        "run": {"name": name, "folder": str(runs), "steps": steps, "threads": 1},
        "model": {"path": str(model)},
        "data": {"domains": {"letters": domain}, "validation": {"letters": domain}},
        "sampling": {"max_tokens": 3},
        "rollout": {"groups_per_step": 4, "group_size": 4},
        "train": {"optimizer": {"lr": 3e-3}},
        "infer": {"slots": 16, "max_length": 64},
        "cluster": {"backend": "inline"},
        "evaluate": {"at_end": False},
        "observe": {"sinks": [], "live": "off"},
    }
