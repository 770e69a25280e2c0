"""Any Gymnasium environment with discrete or text actions, played by text.

    reply --format--> name or number of an action, or text --> env.step --> text of what came of it

What the policy reads is the environment's own text (`render_mode="ansi"`) where it has one, else
its observation as JSON; `describe` says it in words of its own. Nothing is drawn or shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollick.envs.base import Info, Reset, Step, TextEnv, plain
from rollick.envs.formats import Format, ask, read_reply, write_reply
from rollick.errors import EnvError, MissingExtra
from rollick.types import stable_hash

if TYPE_CHECKING:
    import gymnasium

Describe = Callable[[Any, Any], str]
"""The unwrapped environment and its observation, as text."""
MARKED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m")
"""What a terminal would colour: where the player is."""
SEEDS = 2**31
"""Some environments take seeds of 32 bits only."""


class GymEnv(TextEnv):
    """One episode of `gymnasium.make(id, **make)`. `actions` names its discrete actions."""

    def __init__(
        self,
        *,
        id: str,
        make: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        style: Format = "answer",
        max_steps: int = 200,
        describe: Describe | None = None,
    ) -> None:
        self.env = _make(id, dict(make or {}))
        self.style: Format = style
        self.max_steps = max_steps
        self.describe = describe
        self.names = _action_names(self.env, tuple(actions), id)
        self.steps = 0

    def reset(self, seed: int) -> Reset:
        observation, info = self.env.reset(seed=stable_hash("gymnasium", seed) % SEEDS)
        text = self._text(observation)
        what = " or ".join(self.names) if self.names else "your action"
        return f"{text}\n{ask(self.style, what)}", {**_plain(info), "state": text}

    def step(self, action: str) -> Step:
        self.steps += 1
        late = self.steps >= self.max_steps
        chosen = self._read(action)
        if chosen is None:
            what = " or ".join(self.names) if self.names else "your action"
            text = f"That is no action. {ask(self.style, what)}"
            return text, 0.0, False, late, {"valid": False, "effective": False}
        observation, reward, terminated, truncated, info = self.env.step(chosen)
        text = self._text(observation)
        over = bool(terminated), bool(truncated) or (late and not terminated)
        return text, float(reward), *over, {**_plain(info), "valid": True, "state": text}

    def legal_actions(self) -> Sequence[str]:
        return [write_reply(name, self.style) for name in self.names]

    def close(self) -> None:
        self.env.close()

    def _read(self, action: str) -> Any:
        answer = read_reply(action, self.style).answer
        if answer is None:
            return None
        if not self.names:
            return answer if self.env.action_space.contains(answer) else None
        word = answer.strip(" .").lower()
        lowered = [name.lower() for name in self.names]
        first = getattr(self.env.action_space, "start", 0)
        if word in lowered:
            return first + lowered.index(word)
        known = word.isdecimal() and 0 <= int(word) - first < len(self.names)
        return int(word) if known else None

    def _text(self, observation: Any) -> str:
        if self.describe is not None:
            return self.describe(self.env.unwrapped, observation)
        if isinstance(observation, str):
            return observation
        if self.env.render_mode == "ansi":
            drawn: Any = self.env.render()
            return MARKED.sub(r"[\1]", str(drawn)).strip("\n")
        return json.dumps(plain(observation))


def _make(id: str, options: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        import gymnasium
    except ImportError:
        raise MissingExtra.of("gymnasium", "envs") from None
    try:
        # The part before a colon is a module that registers environments.
        if "render_mode" not in options and "ansi" in _modes(gymnasium, id):
            options["render_mode"] = "ansi"
        return gymnasium.make(id, **options)
    except gymnasium.error.Error as error:
        raise EnvError(f"gymnasium cannot make {id!r}: {error}") from error


def _modes(gymnasium: Any, id: str) -> Sequence[str]:
    """How the environment can be rendered, by its class."""
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
        raise EnvError(
            f"{id} has actions of the kind {type(space).__name__}",
            fix="only Discrete and Text actions can be written as text",
        )
    if names and len(names) != int(space.n):
        raise EnvError(f"{id} has {space.n} actions and {len(names)} names: {', '.join(names)}")
    return names or tuple(str(int(space.start) + number) for number in range(int(space.n)))


def _plain(info: Info) -> dict[str, Any]:
    return {str(key): plain(value) for key, value in info.items()}
