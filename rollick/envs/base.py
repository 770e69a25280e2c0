"""TextEnv: an environment with text actions. Gymnasium's signature over text or messages.

    env = FrozenLake(size=4)                      one object for one episode
    observation, info = env.reset(seed)           the same seed gives the same puzzle everywhere
    observation, reward, terminated, truncated, info = env.step("<answer>Right</answer>")

Optional keys of `info`:

    valid       the action could be parsed          effective   it changed the state
    success     the task is solved                  state       a key: equal keys, equal states
    metrics     {name: number}, averaged over a run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np

from rollick.config.names import resolve
from rollick.config.problems import describe_value
from rollick.errors import EnvError
from rollick.types import Turn, stable_hash

Observation = str | Sequence[Turn]
"""The policy's next input: text, or messages."""
Info = Mapping[str, Any]
Reset = tuple[Observation, Info]
Step = tuple[Observation, float, bool, bool, Info]
MakeEnv = Callable[..., "TextEnv"]
"""A TextEnv class, or a function that creates one; options are keyword arguments."""
TileGrid = Sequence[Sequence[str]]
"""The state as a picture: rows of tile names."""
MAX_TURNS = 2_000
"""An episode that does not end within this many turns is an error."""


class TextEnv(ABC):
    """An environment for language models: subclass it, write `reset` and `step`.

    An object is used for one episode. All randomness must depend on the seed only. The other
    methods are optional: `rollick env test` uses them to run, check and draw the environment.
    """

    step_timeout_s: float = inf
    """Time limit of a call. A longer one ends its process, with all of its episodes, so that an
    environment that waits for something else should give up before."""

    @abstractmethod
    def reset(self, seed: int) -> Reset:
        """Start the episode of this seed; returns the first observation and info."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Apply the policy's text; returns observation, reward, terminated, truncated, info.
        For an invalid action, return an observation that explains this; do not raise."""

    def legal_actions(self) -> Sequence[str]:
        """Possible actions in this state, as a policy would write them; empty: not listed."""
        return ()

    def solve(self) -> str | None:
        """The action of a scripted solver in this state; None: no solution."""
        return None

    def draw(self) -> TileGrid | None:
        """The state as tiles for episodes/pictures.py; None: draw the observation's text."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold no resources
        """Release resources. Called once, also after a failure."""


@dataclass(frozen=True, slots=True)
class EnvResponse:
    """A validated result of reset() or step(). `info` holds JSON values only."""

    observation: str | tuple[Turn, ...]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Info = field(default_factory=dict[str, Any])

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def turns(self) -> tuple[Turn, ...]:
        observation = self.observation
        return (Turn("user", observation),) if isinstance(observation, str) else observation

    @property
    def text(self) -> str:
        return "\n".join(turn.content for turn in self.turns)


class InvalidEnvResponse(Exception):
    """An environment returned a value of the wrong form; the message describes it."""


def is_solved(responses: Sequence[EnvResponse]) -> bool:
    """As the last info reports it; by default: terminated with a total reward above 0."""
    if not responses:
        return False
    has_reward = responses[-1].terminated and sum(step.reward for step in responses) > 0
    return bool(responses[-1].info.get("success", has_reward))


def seeded_random(purpose: str, seed: int, *more: str | int) -> Random:
    """A random generator for an environment; hashing makes consecutive seeds independent."""
    return Random(stable_hash(purpose, seed, *more))


def find_env(name: str, *, base: Path | None = None) -> MakeEnv:
    """The environment of a built-in name, file.py:Class or package.module:Class."""
    factory: Any = resolve("environments", name, base_dir=base)
    if not callable(factory):
        fix = "name a TextEnv class, or a function that creates one"
        raise EnvError(f"the environment {name} is a {type(factory).__name__}", fix=fix)
    return cast("MakeEnv", factory)


def make_env(make: MakeEnv, options: Mapping[str, Any], *, name: str) -> TextEnv:
    """Create an environment. Raises EnvError for wrong options or if it is not an environment."""
    try:
        env = make(**options)
    except TypeError as error:
        raise EnvError(f"{name} cannot be created with {dict(options)}: {error}") from error
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            text = f"{name} created a {type(env).__name__}, which has no {method}()"
            raise EnvError(text, fix="subclass rollick.TextEnv")
    return env


def close_env(env: TextEnv) -> None:
    """Call close(), which environments that do not subclass TextEnv may lack."""
    getattr(env, "close", lambda: None)()


def read_reset(value: Any) -> EnvResponse:
    observation, info = _unpack(value, "reset", "observation, info")
    return EnvResponse(_read_observation(observation), info=_read_info(info))


def read_step(value: Any) -> EnvResponse:
    names = "observation, reward, terminated, truncated, info"
    observation, reward, terminated, truncated, info = _unpack(value, "step", names)
    if isinstance(reward, bool | np.bool_) or not isinstance(reward, Real) or not isfinite(reward):
        raise InvalidEnvResponse(
            f"the reward must be a finite number, not {describe_value(reward)}"
        )
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise InvalidEnvResponse(f"{name} must be True or False, not {describe_value(flag)}")
    text, flags = _read_observation(observation), (bool(terminated), bool(truncated))
    return EnvResponse(text, float(reward), *flags, _read_info(info))


def _unpack(value: Any, method: str, names: str) -> tuple[Any, ...]:
    if isinstance(value, tuple) and len(value) == len(names.split(", ")):
        return value
    returned = f"{len(value)} values" if isinstance(value, tuple) else describe_value(value)
    raise InvalidEnvResponse(f"{method}() must return ({names}), not {returned}")


def _read_observation(observation: Any) -> str | tuple[Turn, ...]:
    if isinstance(observation, str):
        return _replace_surrogates(observation)
    if isinstance(observation, Sequence) and observation:
        return tuple(_read_turn(turn) for turn in observation)
    raise InvalidEnvResponse(
        f"the observation must be text or messages, not {describe_value(observation)}"
    )


def _read_turn(turn: Any) -> Turn:
    if isinstance(turn, Turn):
        turn = {"role": turn.role, "content": turn.content}
    match turn:
        case {"role": str(role), "content": str(content)}:
            return Turn(role, _replace_surrogates(content))
        case _:
            problem = "a message must have role and content, both text, not"
            raise InvalidEnvResponse(f"{problem} {describe_value(turn)}")


def _replace_surrogates(text: str) -> str:
    """Replace unpaired surrogates, which a policy can write as JSON escapes in a tool call and an
    environment may repeat. No tokenizer accepts them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _read_info(info: Any) -> Info:
    if not isinstance(info, Mapping):
        raise InvalidEnvResponse(f"info must be a mapping, not {describe_value(info)}")
    # Fast path for every step: most infos are already flat JSON.
    if all(type(value) in _JSON_SCALARS and type(key) is str for key, value in info.items()):
        return info
    return {str(key): to_json_value(value) for key, value in info.items()}


_JSON_SCALARS = frozenset({str, int, bool, type(None)})


def to_json_value(value: Any) -> Any:
    """Convert to JSON values; arrays become lists, other objects their repr."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return to_json_value(value.tolist())
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return repr(value)[:200]
