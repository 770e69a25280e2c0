"""Toy tasks that a tiny model learns in seconds: say the letter that the prompt names.

Imports nothing heavy: every process that runs a reward of a toy loads this module.
"""

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


def nears_letter(completion: str, answer: str) -> float:
    """1 if the first two characters are the letter; the farther they are from it, the less.

    Of a model that knows nothing most groups have no signal under `says_letter`, and a step takes
    ten times the samples that it trains on. Here hardly a group is dropped.
    """
    return sum(1 / (1 + abs(ord(character) - ord(answer))) for character in completion[:2]) / 2


def echo_rows() -> list[dict[str, str]]:
    """One row for each of the first four letters, which is both the prompt and the answer."""
    return [{"prompt": letter, "answer": letter} for letter in LETTERS[:4]]


def echo_pairs() -> list[dict[str, str]]:
    """The same with each wrong answer: every letter is right for one prompt, wrong for others."""
    rows = echo_rows()
    letters = [row["prompt"] for row in rows]
    return [{**row, "wrong": other} for row in rows for other in letters if other != row["answer"]]


def echoes(completion: str, answer: str) -> float:
    """1 if the first character is the letter."""
    return float(completion[:1] == answer)


def toy_recipe(model: Path, runs: Path, *, name: str = "toy", steps: int = 4) -> dict[str, Any]:
    """A recipe, as a dict, over a tiny model's folder: quick, inline, quiet."""
    rewards = ["rollick.testing.toys:nears_letter"]
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
