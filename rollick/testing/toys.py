"""Toy tasks that a tiny model learns in seconds: answer with the letter in the prompt.

Imports no heavy packages, because every reward process loads this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"


def letter_rows() -> list[dict[str, str]]:
    """One row per letter."""
    return [{"prompt": f"say {letter}", "answer": letter} for letter in LETTERS]


def says_letter(completion: str, answer: str) -> float:
    """Share of the first two characters that are the letter."""
    return sum(character == answer for character in completion[:2]) / 2


def nears_letter(completion: str, answer: str) -> float:
    """1 if the first two characters are the letter; less, the farther they are from it. Almost all
    groups of an untrained model have signal, unlike with `says_letter`."""
    return sum(1 / (1 + abs(ord(character) - ord(answer))) for character in completion[:2]) / 2


def echo_rows() -> list[dict[str, str]]:
    """One row for each of the first four letters, which are both prompt and answer."""
    return [{"prompt": letter, "answer": letter} for letter in LETTERS[:4]]


def echo_pairs() -> list[dict[str, str]]:
    """The rows of echo_rows with each wrong answer."""
    rows = echo_rows()
    letters = [row["prompt"] for row in rows]
    return [{**row, "wrong": other} for row in rows for other in letters if other != row["answer"]]


def echoes(completion: str, answer: str) -> float:
    """1 if the first character is the letter."""
    return float(completion[:1] == answer)


def without_rollout(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe for a supervised pipeline: its sampling becomes that of the evaluation."""
    kept = {key: recipe[key] for key in recipe if key not in ("sampling", "rollout")}
    evaluate = {**recipe.get("evaluate", {})}
    if "sampling" in recipe:
        evaluate["sampling"] = {**recipe["sampling"], **evaluate.get("sampling", {})}
    return {**kept, "evaluate": evaluate}


def toy_recipe(model: Path, runs: Path, *, name: str = "toy", steps: int = 4) -> dict[str, Any]:
    """A quick recipe as a dict, for the model in a folder."""
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
        "evaluate": {"at_start": False, "at_end": False},
        "observe": {"sinks": [], "live": "off", "report": False},
    }
