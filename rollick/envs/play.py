"""Plays episodes in this process, one after another: what `rollick env test` and the checks use.

    seeds -> play_episode(fresh env, seed, policy) -> Episode -> summarise -> PlayReport

A failure of an environment is a part of the report, not of this program. Training does not play
here but in processes that can be killed (pool.py); here a deadline interrupts Python code only.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from types import FrameType
from typing import Any

from rollick.children.process import describe_failure
from rollick.envs.base import (
    Frame,
    MakeEnv,
    Moment,
    NotAnAnswer,
    TextEnv,
    make_env,
    random_of,
    read_reset,
    read_step,
)
from rollick.errors import EnvError

Policy = Callable[[TextEnv, Random], str | None]
"""The next reply in an environment; None: it gives up."""
MAX_TURNS = 2_000
"""An episode that is longer never ends, as far as we can tell."""


@dataclass(slots=True)
class Episode:
    """What happened in one episode."""

    seed: int
    moments: list[Moment] = field(default_factory=list[Moment])
    """The reset's, then one for each step."""
    actions: list[str] = field(default_factory=list[str])
    frames: list[Frame | None] = field(default_factory=list[Frame | None])
    error: str = ""
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return max(len(self.moments) - 1, 0)

    @property
    def reward(self) -> float:
        return sum(moment.reward for moment in self.moments)

    @property
    def success(self) -> bool:
        """What the environment says, or else: the task ended with a reward above 0."""
        if self.error or not self.moments:
            return False
        last = self.moments[-1]
        return bool(last.info.get("success", last.terminated and self.reward > 0))

    def share(self, key: str) -> float | None:
        """Of the steps that say so in their info; None: none does."""
        said = [bool(m.info[key]) for m in self.moments[1:] if key in m.info]
        return sum(said) / len(said) if said else None


@dataclass(frozen=True, slots=True)
class PlayReport:
    """Figures over episodes."""

    episodes: int
    success: float
    reward: float
    steps: float
    """Of an episode, on average."""
    steps_per_s: float
    valid: float | None
    effective: float | None
    errors: int
    first_errors: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def play_random(env: TextEnv, random: Random) -> str | None:
    """Any of the legal actions; without a list of them, a word."""
    return random.choice(list(env.legal_actions()) or ["yes", "no", "0", "1"])


def play_solver(env: TextEnv, random: Random) -> str | None:
    return env.solve()


POLICIES: Mapping[str, Policy] = {"random": play_random, "solver": play_solver}


def find_policy(name: str) -> Policy:
    if name in POLICIES:
        return POLICIES[name]
    raise EnvError(
        f"the policy {name!r} is not one of {', '.join(POLICIES)}, and there is no such model",
        fix="play with --policy random, --policy solver, or the path of a model or of a run",
    )


def play_episode(
    env: TextEnv, seed: int, policy: Policy, *, pictures: bool = False, timeout_s: float = 60.0
) -> Episode:
    """From reset to the end. What it raises, or an answer that is none, is the episode's error."""
    episode, random = Episode(seed), random_of("play", seed)
    begun = perf_counter()
    try:
        with time_limit(timeout_s):
            _play(env, episode, policy, random, pictures=pictures)
    except NotAnAnswer as error:
        episode.error = str(error)
    except Exception as error:
        episode.error = describe_failure(error)
    episode.seconds = perf_counter() - begun
    close = getattr(env, "close", None)
    if close is not None:
        close()
    return episode


def play_many(
    make: MakeEnv,
    seeds: Sequence[int],
    *,
    options: Mapping[str, Any],
    policy: Policy,
    name: str = "the environment",
    timeout_s: float = 60.0,
) -> PlayReport:
    """An episode for each seed, each with an environment of its own."""
    begun = perf_counter()
    played = [
        play_episode(make_env(make, options, name=name), seed, policy, timeout_s=timeout_s)
        for seed in seeds
    ]
    return summarise(played, perf_counter() - begun)


def summarise(episodes: Sequence[Episode], seconds: float) -> PlayReport:
    count, steps = max(len(episodes), 1), sum(episode.steps for episode in episodes)
    errors = [f"seed {episode.seed}: {episode.error}" for episode in episodes if episode.error]
    return PlayReport(
        episodes=len(episodes),
        success=sum(episode.success for episode in episodes) / count,
        reward=sum(episode.reward for episode in episodes) / count,
        steps=steps / count,
        steps_per_s=steps / max(seconds, 1e-9),
        valid=_mean([episode.share("valid") for episode in episodes]),
        effective=_mean([episode.share("effective") for episode in episodes]),
        errors=len(errors),
        first_errors=tuple(errors[:3]),
    )


def _play(
    env: TextEnv, episode: Episode, policy: Policy, random: Random, *, pictures: bool
) -> None:
    episode.moments.append(read_reset(env.reset(episode.seed)))
    if pictures:
        episode.frames.append(env.draw())
    while not episode.moments[-1].over:
        if episode.steps >= MAX_TURNS:
            raise EnvError(f"it did not end within {MAX_TURNS} steps", fix="truncate it")
        action = policy(env, random)
        if action is None:
            return
        episode.actions.append(action)
        episode.moments.append(read_step(env.step(action)))
        if pictures:
            episode.frames.append(env.draw())


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """TimeoutError in the middle of Python code that takes longer. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
