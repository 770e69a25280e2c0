"""TextArena's games for one player.

Its games draw from the global random numbers. Each episode here has a state of them of its own,
which is put in place for the length of a call only: otherwise two episodes would disturb each
other. For the same reason its episodes must not share a process's threads (EnvPool: threads=1).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, read_reply
from rollick.errors import EnvError, MissingExtra
from rollick.types import stable_hash


class TextArenaEnv(TextEnv):
    """A game by its id. The reply is the action as the game asks for it, such as [5]."""

    def __init__(
        self,
        *,
        id: str = "GuessTheNumber-v0",
        make: Mapping[str, Any] | None = None,
        style: Format = "plain",
        max_steps: int = 200,
    ) -> None:
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise MissingExtra.of(error.name or "textarena", "envs") from None
        self.own_words = textarena.ObservationType.PLAYER_ACTION
        # Without its wrappers a game tells what is new, and not everything again each turn.
        name = f"{id}-raw" if f"{id}-raw" in ENV_REGISTRY else id
        try:
            self.env: Any = textarena.make(name, **dict(make or {}))
        except ValueError as error:
            raise EnvError(f"textarena cannot make {id!r}: {error}") from error
        self.style: Format = style
        self.max_steps = max_steps
        self.steps = 0
        self.numbers: tuple[Any, ...] = ()

    def reset(self, seed: int) -> Reset:
        number = stable_hash("textarena", seed) % 2**31
        self.numbers = random.Random(number).getstate()
        with self._own_numbers():
            self.env.reset(num_players=1, seed=number)
            return self._news() or "The game begins.", {}

    def step(self, action: str) -> Step:
        self.steps += 1
        answer = read_reply(action, self.style).answer or ""
        with self._own_numbers():
            done, info = self.env.step(answer)
            if not done:
                text = self._news() or "Go on."
                return text, 0.0, False, self.steps >= self.max_steps, dict(info or {})
            rewards, facts = self.env.close()
        reward = float((rewards or {}).get(0, 0.0))
        invalid = bool((facts or {}).get(0, {}).get("invalid_move"))
        return (
            "The game is over.",
            reward,
            True,
            False,
            {"valid": not invalid, "success": reward >= 1.0},
        )

    def _news(self) -> str:
        _, said = self.env.get_observation()
        if isinstance(said, str):
            return said
        return "\n".join(message for _, message, kind in said if kind is not self.own_words)

    @contextmanager
    def _own_numbers(self) -> Generator[None]:
        others = random.getstate()
        random.setstate(self.numbers)
        try:
            yield
        finally:
            self.numbers = random.getstate()
            random.setstate(others)
