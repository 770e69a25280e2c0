"""The task of chaos.py: name the later of two letters, turn by turn; the environment waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from rollick import TextEnv
from rollick.types import stable_hash

LETTERS = "abcdefghijkl"
TURNS = 3
REWARD_S = 0.01


class Letters(TextEnv):
    """Three turns; each waits for about as long as a turn of a real environment takes."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s, self._turn, self._seed, self._right = wait_s, 0, 0, 0
        self._pair = ""

    def reset(self, seed: int) -> tuple[str, dict[str, object]]:
        self._seed = seed
        return self._show(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        chance = stable_hash("wait", self._seed, self._turn, action) % 1000 / 1000
        time.sleep(self._wait_s * (0.5 + chance))
        is_right = action[:1] == max(self._pair)
        self._right += is_right
        self._turn += 1
        over = self._turn == TURNS
        info: dict[str, object] = {"success": self._right == TURNS}
        return self._show(), is_right / TURNS, over, False, info

    def _show(self) -> str:
        self._pair = pair(Random(stable_hash("letters", self._seed, self._turn)))
        return self._pair


def pair(random: Random) -> str:
    return "".join(random.sample(LETTERS, 2))


def rows() -> Iterator[dict[str, str]]:
    """Questions that are answered once, and scored by `right` in a reward process."""
    random = Random(7)
    for _ in range(1000):
        letters = pair(random)
        yield {"prompt": letters, "answer": max(letters)}


def right(completion: str, answer: str) -> float:
    time.sleep(REWARD_S)
    return float(completion[:1] == answer)
