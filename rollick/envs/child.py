"""The program of an environment process: holds many episodes, answers their calls over a pipe.

    pool (parent)                                child
      LOAD   environments by name    ------->      imports them
                                     <-------    READY, or BROKEN with the error
      CALLS  [(episode, call)]       ------->      for each, in order (or on threads):
                                     <-------        STARTED (episode), before the call
                                     <-------      DONE (episode, answer or failure)

Bodies are pickled on the way down and JSON on the way up, so the parent never unpickles what a
process that runs user code has written. An episode whose environment raised, answered rubbish or
came to its end is dropped here at once; the others in the process do not notice.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple

import cloudpickle

from rollick.children.process import (
    describe_failure,
    encode_frame,
    read_frames,
    take_standard_streams,
)
from rollick.envs.base import (
    MakeEnv,
    Moment,
    NotAnAnswer,
    TextEnv,
    find_env,
    make_env,
    read_reset,
    read_step,
)
from rollick.envs.play import play_episode, play_solver
from rollick.errors import EnvError, RollickError
from rollick.types import Turn

NUMBER = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame carries."""

    LOAD = 1
    CALLS = 2
    READY = 3
    BROKEN = 4
    STARTED = 5
    DONE = 6


class EnvStatus(StrEnum):
    """How a call to an environment went. All but OK end the episode; none of them is a score."""

    OK = "ok"
    FAILED = "failed"
    """It raised."""
    GARBAGE = "garbage"
    """It answered what is no answer."""
    TIMEOUT = "timeout"
    """Past the deadline of the step or of the episode."""
    CRASHED = "crashed"
    """Its process died while it ran."""
    LOST = "lost"
    """Another episode of its process hung or died there."""


class Start(NamedTuple):
    """Make an environment and reset it."""

    name: str
    options: Mapping[str, Any]
    seed: int


class Show(NamedTuple):
    """Let the environment's own solver play a whole episode."""

    name: str
    options: Mapping[str, Any]
    seed: int


class Act(NamedTuple):
    """One step."""

    action: str


class End(NamedTuple):
    """Nobody plays it any more."""


Call = Start | Show | Act | End


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a call: a moment of the episode, or why there is none."""

    status: EnvStatus
    moment: Moment | None = None
    detail: str = ""
    seconds: float = 0.0
    """That the call took in its process; for a time-out, the deadline."""

    @property
    def ok(self) -> bool:
        return self.status is EnvStatus.OK


@dataclass(frozen=True, slots=True)
class Definitions:
    """The environments of a pool by name: a reference to import, or a class by value (pickled)."""

    environments: Mapping[str, str | bytes]
    base: Path | None
    threads: int


def encode_reply(episode: int, reply: Reply) -> bytes:
    said: list[Any] = [episode, reply.status, reply.detail, reply.seconds]
    if reply.moment is not None:
        moment = reply.moment
        seen = moment.observation
        if not isinstance(seen, str):
            seen = [[turn.role, turn.content] for turn in seen]
        said += [seen, moment.reward, moment.terminated, moment.truncated, dict(moment.info)]
    return encode_frame(Kind.DONE, json.dumps(said).encode())


def decode_reply(body: bytes) -> tuple[int, Reply]:
    episode, status, detail, seconds, *seen = json.loads(body)
    if not seen:
        return episode, Reply(EnvStatus(status), None, detail, seconds)
    observation, *rest = seen
    if not isinstance(observation, str):
        observation = tuple(Turn(role, content) for role, content in observation)
    return episode, Reply(EnvStatus(status), Moment(observation, *rest), detail, seconds)


def show_solution(env: TextEnv, seed: int) -> Moment:
    """The whole episode of its solver as one moment: all messages, and what they earned. The
    solver's own are those of the role `assistant`; the last observation, which nobody answers, is
    left out."""
    played = play_episode(env, seed, play_solver)
    if played.error:
        raise EnvError(played.error)
    messages: list[Turn] = []
    for moment, action in zip(played.moments, played.actions, strict=False):
        seen = moment.observation
        messages += [Turn("user", seen)] if isinstance(seen, str) else seen
        messages.append(Turn("assistant", action))
    if not messages:
        raise EnvError("its solver knows no reply", fix="write solve(), or name another source")
    info = {"success": played.success}
    return Moment(tuple(messages), played.reward, terminated=True, info=info)


@dataclass(slots=True)
class EnvLoop:
    """Holds the episodes; answers frames until the input ends."""

    inbox: BinaryIO
    outbox: int
    makers: dict[str, MakeEnv] = field(default_factory=dict[str, MakeEnv])
    episodes: dict[int, TextEnv] = field(default_factory=dict[int, TextEnv])
    threads: ThreadPoolExecutor | None = None
    unsent: bytearray = field(default_factory=bytearray)
    writing: Lock = field(default_factory=Lock)

    def run(self) -> None:
        for kind, body in read_frames(self.inbox):
            content = cloudpickle.loads(body)
            if kind == Kind.LOAD:
                self._load(content)
                continue
            for episode, payload in content:
                if self.threads is None:
                    self._answer(episode, payload)
                else:
                    self.threads.submit(self._answer, episode, payload)
            self._send(b"")

    def _load(self, definitions: Definitions) -> None:
        try:
            for name, definition in definitions.environments.items():
                if isinstance(definition, bytes):
                    self.makers[name] = cloudpickle.loads(definition)
                else:
                    self.makers[name] = find_env(definition, base=definitions.base)
        except (Exception, SystemExit) as error:
            known = isinstance(error, RollickError)
            message = error.message if known else describe_failure(error)
            problem = {"message": message, "fix": error.fix if known else ""}
            self._send(encode_frame(Kind.BROKEN, json.dumps(problem).encode()))
            return
        if definitions.threads > 1:
            self.threads = ThreadPoolExecutor(definitions.threads)
        self._send(encode_frame(Kind.READY, b""))

    def _answer(self, episode: int, payload: bytes) -> None:
        # Sent before the call, together with the last answer: if this call hangs or kills the
        # process, the parent knows whose it was.
        self._send(encode_frame(Kind.STARTED, NUMBER.pack(episode)))
        begun = perf_counter()
        try:
            moment = self._do(episode, cloudpickle.loads(payload))
            reply = Reply(EnvStatus.OK, moment, "", perf_counter() - begun)
            frame = encode_reply(episode, reply)
        except NotAnAnswer as error:
            frame = self._failed(episode, EnvStatus.GARBAGE, str(error), begun)
        except (Exception, SystemExit) as error:
            frame = self._failed(episode, EnvStatus.FAILED, describe_failure(error), begun)
        self._send(frame, flush=self.threads is not None)

    def _do(self, episode: int, call: Call) -> Moment | None:
        if isinstance(call, Start):
            env = make_env(self.makers[call.name], call.options, name=call.name)
            self.episodes[episode] = env
            return read_reset(env.reset(call.seed))
        if isinstance(call, Show):
            env = make_env(self.makers[call.name], call.options, name=call.name)
            return show_solution(env, call.seed)
        if isinstance(call, End):
            self._drop(episode)
            return None
        moment = read_step(self.episodes[episode].step(call.action))
        if moment.over:
            self._drop(episode)
        return moment

    def _failed(self, episode: int, status: EnvStatus, detail: str, begun: float) -> bytes:
        self._drop(episode)
        return encode_reply(episode, Reply(status, None, detail, perf_counter() - begun))

    def _drop(self, episode: int) -> None:
        env = self.episodes.pop(episode, None)
        close = getattr(env, "close", None)
        with suppress(Exception):  # It is over; what it thinks of that changes nothing.
            if close is not None:
                close()

    def _send(self, frame: bytes, *, flush: bool = True) -> None:
        with self.writing if self.threads is not None else nullcontext():
            self.unsent += frame
            if not flush:
                return
            view = memoryview(bytes(self.unsent))
            self.unsent.clear()
            while view:
                view = view[os.write(self.outbox, view) :]


def main() -> None:
    inbox, outbox = take_standard_streams()
    with os.fdopen(inbox, "rb") as pipe:
        EnvLoop(pipe, outbox).run()
