"""reasoning-gym's tasks as episodes of one step: a question, an answer, its score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, ask, read_reply, write_reply
from rollick.errors import EnvError, MissingExtra
from rollick.types import stable_hash


class ReasoningGymEnv(TextEnv):
    """One question of the dataset `task`; `config` are that dataset's settings."""

    def __init__(
        self,
        *,
        task: str = "basic_arithmetic",
        config: Mapping[str, Any] | None = None,
        style: Format = "answer",
    ) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise MissingExtra.of(error.name or "reasoning_gym", "envs") from None
        self.create = reasoning_gym.create_dataset
        self.task = task
        self.config = dict(config or {})
        self.style: Format = style

    def reset(self, seed: int) -> Reset:
        try:
            number = stable_hash("reasoning_gym", seed) % 2**31
            self.dataset: Any = self.create(self.task, seed=number, size=1, **self.config)
        except (ValueError, TypeError) as error:
            raise EnvError(f"reasoning_gym cannot make {self.task!r}: {error}") from error
        self.entry: dict[str, Any] = self.dataset[0]
        question = self.entry["question"]
        return f"{question}\n{ask(self.style, 'your answer')}", {"success": False}

    def step(self, action: str) -> Step:
        answer = read_reply(action, self.style).answer
        score = float(self.dataset.score_answer(answer, self.entry)) if answer else 0.0
        info = {"valid": answer is not None, "success": score >= 1.0}
        return "That was the only question.", score, True, False, info

    def solve(self) -> str | None:
        answer = self.entry["answer"]
        return None if answer is None else write_reply(str(answer), self.style)
