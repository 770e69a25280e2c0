"""Adapter for reasoning-gym: episodes of one step with a question, an answer and its score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, describe_format, read_reply, write_reply
from rollick.errors import EnvError, MissingExtra
from rollick.types import stable_hash


@dataclass(kw_only=True, eq=False)
class ReasoningGymEnv(TextEnv):
    """One question of the dataset `task`, which `config` configures."""

    task: str = "basic_arithmetic"
    config: Mapping[str, Any] | None = None
    style: Format = "answer"

    def __post_init__(self) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise MissingExtra.of(error.name or "reasoning_gym", "envs") from None
        self.create = reasoning_gym.create_dataset

    def reset(self, seed: int) -> Reset:
        try:
            number = stable_hash("reasoning_gym", seed) % 2**31
            self.dataset: Any = self.create(self.task, seed=number, size=1, **(self.config or {}))
        except (ValueError, TypeError) as error:
            raise EnvError(f"reasoning_gym cannot create {self.task!r}: {error}") from error
        self.entry: dict[str, Any] = self.dataset[0]
        question = self.entry["question"]
        return f"{question}\n{describe_format(self.style, 'your answer')}", {"success": False}

    def step(self, action: str) -> Step:
        answer = read_reply(action, self.style)
        score = float(self.dataset.score_answer(answer, self.entry)) if answer else 0.0
        info = {"valid": answer is not None, "success": score >= 1.0}
        return "That was the only question.", score, True, False, info

    def solve(self) -> str | None:
        answer = self.entry["answer"]
        return None if answer is None else write_reply(str(answer), self.style)
