"""Adapter for Gymnasium environments with discrete or text actions.

    reply --format--> name or number of an action, or text --> env.step --> observation as text

The policy reads the environment's text rendering (`render_mode="ansi"`) if it has one, else its
observation as JSON. `describe` replaces both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollick.envs.base import Reset, Step, TextEnv, to_json_value
from rollick.envs.formats import Format, describe_format, read_reply, write_reply
from rollick.errors import EnvError, MissingExtra
from rollick.types import stable_hash

if TYPE_CHECKING:
    import gymnasium

Describe = Callable[[Any, Any], str]
"""Maps the unwrapped environment and its observation to text."""
ANSI_COLOURED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m")
"""Coloured text, which marks the player."""
SEEDS = 2**31
"""Some environments accept 32-bit seeds only."""


@dataclass(kw_only=True, eq=False)
class GymEnv(TextEnv):
    """One episode of `gymnasium.make(id, **make)`."""

    id: str
    make: Mapping[str, Any] | None = None
    actions: Sequence[str] = ()
    """Names of its discrete actions."""
    style: Format = "answer"
    max_steps: int = 200
    describe: Describe | None = None

    def __post_init__(self) -> None:
        self.env = _make(self.id, dict(self.make or {}))
        self.names = _action_names(self.env, tuple(self.actions), self.id)
        self.steps = 0

    def reset(self, seed: int) -> Reset:
        observation, info = self.env.reset(seed=stable_hash("gymnasium", seed) % SEEDS)
        text = self._describe(observation)
        return f"{text}\n{self._instructions()}", {**info, "state": text}

    def step(self, action: str) -> Step:
        self.steps += 1
        out_of_steps = self.steps >= self.max_steps
        chosen = self._parse_action(action)
        if chosen is None:
            text = f"That is no action. {self._instructions()}"
            return text, 0.0, False, out_of_steps, {"valid": False, "effective": False}
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        text = self._describe(observation)
        ends = bool(terminated), bool(truncated) or (out_of_steps and not terminated)
        return text, float(reward), *ends, {**info, "valid": True, "state": text}

    def legal_actions(self) -> Sequence[str]:
        return [write_reply(name, self.style) for name in self.names]

    def close(self) -> None:
        self.env.close()

    def _instructions(self) -> str:
        return describe_format(self.style, " or ".join(self.names) or "your action")

    def _parse_action(self, action: str) -> Any:
        answer = read_reply(action, self.style)
        if answer is None:
            return None
        if not self.names:
            return answer if self.env.action_space.contains(answer) else None
        word = answer.strip(" .").lower()
        lowered = [name.lower() for name in self.names]
        first = getattr(self.env.action_space, "start", 0)
        if word in lowered:
            return first + lowered.index(word)
        is_number = word.isdecimal() and 0 <= int(word) - first < len(self.names)
        return int(word) if is_number else None

    def _describe(self, observation: Any) -> str:
        if self.describe is not None:
            return self.describe(self.env.unwrapped, observation)
        if isinstance(observation, str):
            return observation
        if self.env.render_mode == "ansi":
            rendered: Any = self.env.render()
            return ANSI_COLOURED.sub(r"[\1]", str(rendered)).strip("\n")
        return json.dumps(to_json_value(observation))


def _make(id: str, options: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        import gymnasium
    except ImportError:
        raise MissingExtra.of("gymnasium", "envs") from None
    try:
        # The part before a colon is a module that registers environments.
        if "render_mode" not in options and "ansi" in _render_modes(gymnasium, id):
            options["render_mode"] = "ansi"
        return gymnasium.make(id, **options)
    except gymnasium.error.Error as error:
        raise EnvError(f"gymnasium cannot make {id!r}: {error}") from error


def _render_modes(gymnasium: Any, id: str) -> Sequence[str]:
    from gymnasium.envs.registration import load_env_creator

    entry = gymnasium.spec(id).entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(creator, "metadata", {}).get("render_modes", ())


def _action_names(env: Any, names: tuple[str, ...], id: str) -> tuple[str, ...]:
    from gymnasium.spaces import Discrete, Text

    space = env.action_space
    if isinstance(space, Text):
        return ()
    if not isinstance(space, Discrete):
        fix = "use an environment with a Discrete or Text action space"
        raise EnvError(f"the action space {type(space).__name__} of {id} is not supported", fix=fix)
    if names and len(names) != int(space.n):
        raise EnvError(f"{id} has {space.n} actions, but {len(names)} names: {', '.join(names)}")
    return names or tuple(str(int(space.start) + number) for number in range(int(space.n)))
