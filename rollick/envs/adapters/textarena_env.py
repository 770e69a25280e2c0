"""Adapter for TextArena's single-player games.

TextArena uses the global random generator. Each episode keeps its own generator state and installs
it during a call, so that episodes do not affect each other. For the same reason, calls must not run
on several threads (EnvPool: threads=1).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollick.envs.base import Reset, Step, TextEnv
from rollick.envs.formats import Format, read_reply
from rollick.errors import EnvError, MissingExtra
from rollick.types import stable_hash


@dataclass(kw_only=True, eq=False)
class TextArenaEnv(TextEnv):
    """A game by its id. The reply is an action in the format of the game, such as [5]."""

    id: str = "GuessTheNumber-v0"
    make: Mapping[str, Any] | None = None
    style: Format = "plain"
    max_steps: int = 200

    def __post_init__(self) -> None:
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise MissingExtra.of(error.name or "textarena", "envs") from None
        self.player_action = textarena.ObservationType.PLAYER_ACTION
        # Without wrappers an observation holds the new messages only, not the full history.
        name = f"{self.id}-raw" if f"{self.id}-raw" in ENV_REGISTRY else self.id
        try:
            self.env: Any = textarena.make(name, **dict(self.make or {}))
        except ValueError as error:
            raise EnvError(f"textarena cannot create {self.id!r}: {error}") from error
        self.steps = 0
        self.random_state: tuple[Any, ...] = ()

    def reset(self, seed: int) -> Reset:
        number = stable_hash("textarena", seed) % 2**31
        self.random_state = random.Random(number).getstate()
        with self._own_random_state():
            self.env.reset(num_players=1, seed=number)
            return self._new_messages() or "The game begins.", {}

    def step(self, action: str) -> Step:
        self.steps += 1
        answer = read_reply(action, self.style) or ""
        with self._own_random_state():
            done, info = self.env.step(answer)
            if not done:
                text = self._new_messages() or "Go on."
                return text, 0.0, False, self.steps >= self.max_steps, dict(info or {})
            rewards, player_info = self.env.close()
        reward = float((rewards or {}).get(0, 0.0))
        invalid = bool((player_info or {}).get(0, {}).get("invalid_move"))
        results = {"valid": not invalid, "success": reward >= 1.0}
        return "The game is over.", reward, True, False, results

    def _new_messages(self) -> str:
        _, observation = self.env.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(
            message for _, message, kind in observation if kind is not self.player_action
        )

    @contextmanager
    def _own_random_state(self) -> Generator[None]:
        previous = random.getstate()
        random.setstate(self.random_state)
        try:
            yield
        finally:
            self.random_state = random.getstate()
            random.setstate(previous)
