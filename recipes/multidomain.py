"""Three domains for a model of a hundred thousand parameters, and the model itself.

    python recipes/multidomain.py                    # makes the model and warms it up
    rollick train recipes/rlvr_multidomain.yaml      # reinforcement learning, in minutes

math: the answer to `523+4=` is `527`. code: the answer to `x times 3>` is `f=lambda x:x*3`, which
runs in the sandbox. general: the answer to `cgab<` is its letters in order, `abcg`. The prompts of
warm-up, training and validation are disjoint.
"""

from __future__ import annotations

import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Rows = list[Row]

HERE = Path(__file__).parent
ALPHABET = string.digits + string.ascii_lowercase + " +-*=:<>"
SIZES = {"hidden": 96, "layers": 2, "heads": 4, "kv_heads": 4, "max_length": 64}
HELD_OUT = 100
WARM_UP = {"math": 60, "code": 16, "general": 16}
"""Solved examples per domain: enough to show the format, too few to learn the task."""
WORDS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "plus": ("+", lambda x, k: x + k),
    "minus": ("-", lambda x, k: x - k),
    "times": ("*", lambda x, k: x * k),
}


def _math() -> Rows:
    """Add a digit to a number of three digits, without a carry."""
    rows = [
        {"prompt": f"{number}+{digit}=", "answer": str(number + digit)}
        for number in range(100, 1000)
        for digit in range(1, 10)
        if number % 10 + digit <= 9
    ]
    return _shuffled(rows, seed=1)


def _code() -> Rows:
    rows: Rows = []
    for word, (sign, fn) in WORDS.items():
        for k in range(2, 200):
            calls = [{"entry": "f", "args": [x], "expected": fn(x, k)} for x in (0, 1, 7)]
            answer = f"f=lambda x:x{sign}{k}"
            rows.append({"prompt": f"x {word} {k}>", "answer": answer, "calls": calls})
    return _shuffled(rows, seed=2)


def _general() -> Rows:
    draw = random.Random(3)
    words = dict.fromkeys("".join(draw.sample("abcdefghij", 4)) for _ in range(1500))
    return [{"prompt": f"{word}<", "answer": "".join(sorted(word))} for word in words]


def _shuffled(rows: Rows, *, seed: int) -> Rows:
    random.Random(seed).shuffle(rows)
    return rows


def in_place(completion: str, answer: str) -> float:
    """1 for the answer; up to 0.5 for characters at the right position."""
    if completion == answer:
        return 1.0
    if len(completion) != len(answer):
        return 0.0
    return 0.5 * sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)


def math() -> Rows:
    return _math()[HELD_OUT + WARM_UP["math"] :]


def code() -> Rows:
    return _code()[HELD_OUT + WARM_UP["code"] :]


def general() -> Rows:
    return _general()[HELD_OUT + WARM_UP["general"] :]


def held_out_math() -> Rows:
    return _math()[:HELD_OUT]


def held_out_code() -> Rows:
    return _code()[:HELD_OUT]


def held_out_general() -> Rows:
    return _general()[:HELD_OUT]


def warm_up() -> Rows:
    """Solved examples of all three domains, for SFT."""
    rows = {"math": _math(), "code": _code(), "general": _general()}
    return [row for name, count in WARM_UP.items() for row in rows[name][HELD_OUT:][:count]]


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Initialise a model at random, fine-tune it on the solved examples and save it."""
    from rollick.commands.export import export_run
    from rollick.config.load import load_recipe
    from rollick.pipelines.run import run_recipe
    from rollick.testing.tiny import save_tiny

    tiny = save_tiny(folder / "tiny", seed=seed, alphabet=ALPHABET, **SIZES)
    options = [f"model.path={tiny}", f"run.folder={folder}", f"run.seed={seed}"]
    warm = run_recipe(load_recipe(HERE / "rlvr_multidomain_warm_up.yaml", options))
    return export_run(warm.folder, folder / "model")


if __name__ == "__main__":
    where = make_model(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/multidomain"))
    sys.stdout.write(f"{where}\n")
