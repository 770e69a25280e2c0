"""Sums of two numbers: prompts to train on, prompts held out, and the reward."""

import random
import re
from collections.abc import Iterator

LARGEST = 49
HELD_OUT = 128


def _pairs() -> list[tuple[int, int]]:
    """All pairs in a fixed order; the first HELD_OUT are never trained on."""
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(20).shuffle(pairs)
    return pairs


def _rows(pairs: list[tuple[int, int]]) -> Iterator[dict[str, object]]:
    for a, b in pairs:
        yield {"prompt": f"What is {a} + {b}? Answer with the number only.", "answer": a + b}


def training() -> Iterator[dict[str, object]]:
    return _rows(_pairs()[HELD_OUT:])


def preferences() -> Iterator[dict[str, object]]:
    """Pairs of the right sum and a wrong number near it."""
    wrong = random.Random(21)
    for row, (a, b) in zip(training(), _pairs()[HELD_OUT:], strict=True):
        near = a + b + wrong.choice([-10, -2, -1, 1, 2, 10])
        yield {**row, "chosen": str(a + b), "rejected": str(near)}


def held_out() -> Iterator[dict[str, object]]:
    return _rows(_pairs()[:HELD_OUT])


def correct(completion: str, answer: int) -> float:
    """1 if the last number of the completion is the sum."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == answer)
