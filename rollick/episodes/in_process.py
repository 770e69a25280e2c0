"""Runs episodes in this process with a scripted policy, for `rollick env` and the checks.

    seeds -> run_episode(fresh env, seed, policy) -> EpisodeTrace -> summarise -> EpisodeReport

A failing environment becomes an error of its trace. Training runs environments in processes that
can be killed (envs/pool.py); here a deadline can only interrupt Python code.
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
    MAX_TURNS,
    EnvResponse,
    InvalidEnvResponse,
    MakeEnv,
    TextEnv,
    TileGrid,
    close_env,
    is_solved,
    make_env,
    read_reset,
    read_step,
    seeded_random,
)
from rollick.errors import EnvError

ScriptedPolicy = Callable[[TextEnv, Random], str | None]
"""The next reply in an environment; None ends the episode."""


@dataclass(slots=True)
class EpisodeTrace:
    """All responses and actions of one episode."""

    seed: int
    responses: list[EnvResponse] = field(default_factory=list[EnvResponse])
    """The reset's, then one for each step."""
    actions: list[str] = field(default_factory=list[str])
    grids: list[TileGrid | None] = field(default_factory=list[TileGrid | None])
    """For pictures: one for each response."""
    error: str = ""

    @property
    def steps(self) -> int:
        return max(len(self.responses) - 1, 0)

    @property
    def reward(self) -> float:
        return sum(response.reward for response in self.responses)

    @property
    def success(self) -> bool:
        return not self.error and is_solved(self.responses)

    def share(self, key: str) -> float | None:
        """The share of true values among the steps that report `key`; None: no step does."""
        flags = [bool(step.info[key]) for step in self.responses[1:] if key in step.info]
        return sum(flags) / len(flags) if flags else None


@dataclass(frozen=True, slots=True)
class EpisodeReport:
    """Averages over episodes."""

    episodes: int
    success: float
    reward: float
    steps: float
    """Steps of an episode."""
    steps_per_s: float
    valid: float | None
    effective: float | None
    errors: int
    first_errors: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def random_policy(env: TextEnv, random: Random) -> str | None:
    """A random legal action, or a random word if the environment lists none."""
    return random.choice(list(env.legal_actions()) or ["yes", "no", "0", "1"])


def solver_policy(env: TextEnv, random: Random) -> str | None:
    return env.solve()


POLICIES: Mapping[str, ScriptedPolicy] = {"random": random_policy, "solver": solver_policy}


def find_policy(name: str) -> ScriptedPolicy:
    if name in POLICIES:
        return POLICIES[name]
    text = f"the policy {name!r} is not one of {', '.join(POLICIES)}, and no such model exists"
    fix = "use --policy random, --policy solver, or the path of a model or of a run"
    raise EnvError(text, fix=fix)


def run_episode(
    env: TextEnv,
    seed: int,
    policy: ScriptedPolicy,
    *,
    pictures: bool = False,
    timeout_s: float = 60,
) -> EpisodeTrace:
    """Run one episode. An exception or an invalid response becomes the trace's error."""
    trace = EpisodeTrace(seed)
    try:
        with time_limit(timeout_s):
            _run_steps(env, trace, policy, pictures=pictures)
    except InvalidEnvResponse as error:
        trace.error = str(error)
    except Exception as error:
        trace.error = describe_failure(error)
    close_env(env)
    return trace


def run_episodes(
    make: MakeEnv,
    seeds: Sequence[int],
    *,
    options: Mapping[str, Any],
    policy: ScriptedPolicy,
    name: str = "the environment",
) -> EpisodeReport:
    """Run one episode for each seed, each in a new environment."""
    started = perf_counter()
    traces = [run_episode(make_env(make, options, name=name), seed, policy) for seed in seeds]
    count, steps = max(len(traces), 1), sum(trace.steps for trace in traces)
    errors = [f"seed {trace.seed}: {trace.error}" for trace in traces if trace.error]
    return EpisodeReport(
        episodes=len(traces),
        success=sum(trace.success for trace in traces) / count,
        reward=sum(trace.reward for trace in traces) / count,
        steps=steps / count,
        steps_per_s=steps / max(perf_counter() - started, 1e-9),
        valid=_mean([trace.share("valid") for trace in traces]),
        effective=_mean([trace.share("effective") for trace in traces]),
        errors=len(errors),
        first_errors=tuple(errors[:3]),
    )


def _run_steps(
    env: TextEnv, trace: EpisodeTrace, policy: ScriptedPolicy, *, pictures: bool
) -> None:
    random, response = seeded_random("play", trace.seed), read_reset(env.reset(trace.seed))
    while True:
        if pictures:
            trace.grids.append(env.draw())
        trace.responses.append(response)
        if trace.steps >= MAX_TURNS and not response.done:
            raise EnvError(f"it did not end within {MAX_TURNS} steps", fix="truncate it")
        action = None if response.done else policy(env, random)
        if action is None:
            return
        trace.actions.append(action)
        response = read_step(env.step(action))


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


@contextmanager
def time_limit(seconds: float) -> Generator[None]:
    """Raises TimeoutError in Python code that runs longer. Works in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_timeout(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
