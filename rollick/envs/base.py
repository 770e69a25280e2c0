"""TextEnv: an environment that is played by text. Gymnasium's signature over text or messages.

    env = FrozenLake(size=4)                      one object, one episode
    observation, info = env.reset(seed)           the same seed: the same puzzle, in every process
    observation, reward, terminated, truncated, info = env.step("<answer>Right</answer>")

Owns the seam, what an answer of an environment may be (`read_reset`, `read_step`), and how seeds
are made. Starts no process (pool.py does) and plays no episode (play.py does).

What `info` may say, each of it optional:

    valid       the action could be read            effective   it changed something
    success     the task is solved                  state       a key: equal keys, equal states
    metrics     {name: number}, averaged over a run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import numpy as np

from rollick.config.names import resolve
from rollick.errors import EnvError
from rollick.types import Turn, stable_hash

Observation = str | Sequence[Turn]
"""What the policy reads next: text, or messages."""
Info = Mapping[str, Any]
Reset = tuple[Observation, Info]
Step = tuple[Observation, float, bool, bool, Info]
MakeEnv = Callable[..., "TextEnv"]
"""A TextEnv class, or a function that makes one; options come by name."""


class Frame(NamedTuple):
    """What a picture of the moment shows: rows of tiles by name, and a line under them."""

    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


class TextEnv(ABC):
    """An environment for language models: subclass it, write `reset` and `step`.

    An object is played once, from one reset to its end. All that is random follows from the seed.
    The other methods are optional: they let `rollick env test` play it, prove it and draw it.
    """

    @abstractmethod
    def reset(self, seed: int) -> Reset:
        """Begin the episode that `seed` names: the first observation, and info."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Take what the policy wrote, whatever it is: observation, reward, terminated, truncated,
        info. What cannot be read as an action is an observation that says so, not an exception."""

    def legal_actions(self) -> Sequence[str]:
        """Answers that make sense now, as a policy would write them; none: nobody can list them."""
        return ()

    def solve(self) -> str | None:
        """The answer of a scripted solver in this state; None: it knows no way."""
        return None

    def draw(self) -> Frame | None:
        """The moment as tiles (envs/pictures.py); None: it is drawn as its observation."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what the episode holds. Called once, also after a failure."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An answer of an environment that was read and found right. `info` is plain JSON."""

    observation: str | tuple[Turn, ...]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Info = field(default_factory=dict[str, Any])

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def text(self) -> str:
        if isinstance(self.observation, str):
            return self.observation
        return "\n".join(turn.content for turn in self.observation)


class NotAnAnswer(Exception):
    """What an environment returned breaks the signature; the message says how."""


def random_of(purpose: str, seed: int, *more: str | int) -> Random:
    """An environment's random numbers. Hashed, so that neighbouring seeds have nothing alike."""
    return Random(stable_hash(purpose, seed, *more))


def find_env(name: str, *, base: Path | None = None) -> MakeEnv:
    """The environment of a name, file.py:Class or package.module:Class."""
    found: Any = resolve("environments", name, base=base)
    if not callable(found):
        raise EnvError(
            f"the environment {name} is a {type(found).__name__}",
            fix="name a TextEnv class, or a function that makes one",
        )
    return cast("MakeEnv", found)


def make_env(make: MakeEnv, options: Mapping[str, Any], *, name: str) -> TextEnv:
    """A fresh episode. EnvError where the options do not fit or it is no environment."""
    try:
        env = make(**options)
    except TypeError as error:
        raise EnvError(f"{name} cannot be made with {dict(options)}: {error}") from error
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise EnvError(
                f"{name} made a {type(env).__name__}, which has no {method}()",
                fix="subclass rollick.TextEnv",
            )
    return env


def read_reset(answer: Any) -> Moment:
    """What reset() returned. NotAnAnswer if it is not (observation, info)."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise NotAnAnswer(f"reset() must return (observation, info), not {_shape(answer)}")
    observation, info = answer
    return Moment(_read_observation(observation), info=_read_info(info))


def read_step(answer: Any) -> Moment:
    """What step() returned. NotAnAnswer if it is not Gymnasium's five."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise NotAnAnswer(
            "step() must return (observation, reward, terminated, truncated, info), "
            f"not {_shape(answer)}"
        )
    observation, reward, terminated, truncated, info = answer
    if isinstance(reward, bool | np.bool_) or not isinstance(reward, Real) or not isfinite(reward):
        raise NotAnAnswer(f"the reward must be a finite number, not {_brief(reward)}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise NotAnAnswer(f"{name} must be True or False, not {_brief(flag)}")
    return Moment(
        _read_observation(observation),
        float(reward),
        bool(terminated),
        bool(truncated),
        _read_info(info),
    )


def _read_observation(observation: Any) -> str | tuple[Turn, ...]:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Sequence) and observation:
        return tuple(_read_turn(turn) for turn in observation)
    raise NotAnAnswer(f"the observation must be text or messages, not {_brief(observation)}")


def _read_turn(turn: Any) -> Turn:
    if isinstance(turn, Turn):
        turn = {"role": turn.role, "content": turn.content}
    role, content = (turn.get(key) if isinstance(turn, Mapping) else None for key in _MESSAGE)
    if not (isinstance(role, str) and isinstance(content, str)):
        raise NotAnAnswer(f"a message must have a role and a content of text, not {_brief(turn)}")
    return Turn(role, content)


_MESSAGE = ("role", "content")


def _read_info(info: Any) -> Info:
    if not isinstance(info, Mapping):
        raise NotAnAnswer(f"info must be a mapping, not {_brief(info)}")
    # Most are flat and plain already, and this is on the way of every step.
    if all(type(value) in _PLAIN and type(key) is str for key, value in info.items()):
        return info
    return {str(key): plain(value) for key, value in info.items()}


_PLAIN = frozenset({str, int, bool, type(None)})


def plain(value: Any) -> Any:
    """As JSON has it; arrays become lists, and what is none of these becomes its text."""
    if isinstance(value, str | bool | int | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)[:200]


def _shape(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"{len(answer)} values"
    return _brief(answer)


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
