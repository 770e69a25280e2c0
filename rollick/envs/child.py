"""Main loop of an environment process: holds many episodes and serves their calls over a pipe.

    pool (parent)                                child
      LOAD   environments by name    ------->      imports them
                                     <-------    READY, or LOAD_FAILED with the error
      WORK   [(episode, call)]       ------->      for each, in order (or on threads):
                                     <-------        STARTED (episode), before the call
                                     <-------      DONE (episode, response or failure)

The child sends JSON, so the parent never unpickles data from a process that runs user code. An
episode is dropped when its environment raises, returns an invalid response or ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import cloudpickle

from rollick.children.child_loop import ChildSetup, FrameWriter, run_program
from rollick.children.process import FrameKind, describe_failure
from rollick.envs.base import (
    MAX_TURNS,
    EnvResponse,
    InvalidEnvResponse,
    MakeEnv,
    TextEnv,
    close_env,
    find_env,
    make_env,
    read_reset,
    read_step,
)
from rollick.errors import EnvError, ServiceUnavailable
from rollick.types import Turn


class EnvStatus(StrEnum):
    """The status of a call. Every status but OK ends the episode."""

    OK = "ok"
    FAILED = "failed"
    """The environment raised."""
    GARBAGE = "garbage"
    """The environment returned an invalid response."""
    TIMEOUT = "timeout"
    """The call passed the deadline of the step or of the episode."""
    CRASHED = "crashed"
    """The process died during the call."""
    LOST = "lost"
    """The process was killed or stopped, or another episode in it hung or crashed."""
    UNAVAILABLE = "unavailable"
    """The server of the environment does not answer."""


class StartEpisode(NamedTuple):
    """Create an environment and reset it, or run a full episode with its solver."""

    name: str
    options: Mapping[str, Any]
    seed: int
    with_solver: bool = False
    step_timeout_s: float = inf


class StepEpisode(NamedTuple):
    """One step."""

    action: str


class DropEpisode(NamedTuple):
    """Drop an episode before its end."""


Call = StartEpisode | StepEpisode | DropEpisode


@dataclass(frozen=True, slots=True)
class EnvCallResult:
    """The result of a call: a response, or the reason for its absence."""

    status: EnvStatus
    response: EnvResponse | None = None
    detail: str = ""
    seconds: float = 0.0
    """Duration of the call in its process; for a timeout, the deadline."""

    @property
    def ok(self) -> bool:
        return self.status is EnvStatus.OK


def encode_result(episode: int, result: EnvCallResult) -> str:
    fields: list[Any] = [episode, result.status, result.detail, result.seconds]
    if (response := result.response) is not None:
        observation = response.observation
        if not isinstance(observation, str):
            observation = [[turn.role, turn.content] for turn in observation]
        fields += [observation, response.reward, response.terminated, response.truncated]
        fields.append(dict(response.info))
    return json.dumps(fields)


def decode_result(body: bytes) -> tuple[int, EnvCallResult]:
    episode, status, detail, seconds, *fields = json.loads(body)
    response = None
    if fields:
        observation, *rest = fields
        if not isinstance(observation, str):
            observation = tuple(Turn(role, content) for role, content in observation)
        response = EnvResponse(observation, *rest)
    return episode, EnvCallResult(EnvStatus(status), response, detail, seconds)


def solve_episode(env: TextEnv, seed: int) -> EnvResponse:
    """Run an episode with the environment's solver. The response holds the sum of rewards and all
    messages except the last observation; the solver's have the role `assistant`."""
    messages: list[Turn] = []
    reward = 0.0
    try:
        response = read_reset(env.reset(seed))
        for _ in range(MAX_TURNS):
            action = None if response.done else env.solve()
            if action is None:
                break
            messages += [*response.turns, Turn("assistant", action)]
            response = read_step(env.step(action))
            reward += response.reward
        else:
            raise EnvError(f"it did not end within {MAX_TURNS} steps", fix="truncate it")
    finally:
        close_env(env)
    if not messages:
        raise EnvError("its solver returns no reply", fix="write solve(), or use another source")
    return EnvResponse(tuple(messages), reward, terminated=True)


@dataclass(slots=True)
class EnvLoop:
    """The environments and episodes of a child; `run_program` passes it the frames of the pool."""

    writer: FrameWriter
    makers: dict[str, MakeEnv] = field(default_factory=dict[str, MakeEnv])
    episodes: dict[int, TextEnv] = field(default_factory=dict[int, TextEnv])
    threads: ThreadPoolExecutor | None = None

    def load(self, setup: ChildSetup) -> str:
        for name, definition in setup.definitions.items():
            if isinstance(definition, bytes):
                self.makers[name] = cloudpickle.loads(definition)
            else:
                self.makers[name] = find_env(definition, base=setup.base)
        if setup.threads > 1:
            self.threads = ThreadPoolExecutor(setup.threads)
        return ""

    def work(self, content: Sequence[tuple[int, bytes]]) -> None:
        for episode, payload in content:
            if self.threads is None:
                self._serve(episode, payload)
            else:
                self.threads.submit(self._serve, episode, payload)

    def _serve(self, episode: int, payload: bytes) -> None:
        # Sent before the call, together with the previous result, so that the parent knows the
        # episode if the call hangs or kills the process.
        self.writer.add(FrameKind.STARTED, str(episode))
        self.writer.flush()
        start_time = perf_counter()
        try:
            response = self._run_call(episode, cloudpickle.loads(payload))
            result = EnvCallResult(EnvStatus.OK, response, "", perf_counter() - start_time)
            body = encode_result(episode, result)
        except (Exception, SystemExit) as error:
            self._drop(episode)
            status, detail = EnvStatus.FAILED, describe_failure(error)
            if isinstance(error, InvalidEnvResponse):
                status, detail = EnvStatus.GARBAGE, str(error)
            elif isinstance(error, ServiceUnavailable):
                status, detail = EnvStatus.UNAVAILABLE, error.message
            result = EnvCallResult(status, None, detail, perf_counter() - start_time)
            body = encode_result(episode, result)
        self.writer.add(FrameKind.DONE, body)
        if self.threads is not None:
            self.writer.flush()

    def _run_call(self, episode: int, call: Call) -> EnvResponse | None:
        if isinstance(call, StartEpisode):
            env = make_env(self.makers[call.name], call.options, name=call.name)
            with suppress(AttributeError):  # A class that is no TextEnv may have slots.
                env.step_timeout_s = call.step_timeout_s
            if call.with_solver:
                return solve_episode(env, call.seed)
            self.episodes[episode] = env
            return read_reset(env.reset(call.seed))
        if isinstance(call, DropEpisode):
            self._drop(episode)
            return None
        response = read_step(self.episodes[episode].step(call.action))
        if response.done:
            self._drop(episode)
        return response

    def _drop(self, episode: int) -> None:
        env = self.episodes.pop(episode, None)
        with suppress(Exception):  # The episode is over: ignore errors of close().
            if env is not None:
                close_env(env)


def main() -> None:
    run_program(EnvLoop)
