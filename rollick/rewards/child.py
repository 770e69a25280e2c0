"""The program of a reward process: takes jobs from a pipe, calls rewards, writes scores.

    pool (parent)                                child
      LOAD  names and functions      ------->      imports them
                                     <-------    READY, or BROKEN with the error
      JOBS  samples, each pickled    ------->      for each sample, for each of its rewards:
                                     <-------        STARTED (job, reward), before the call
                                     <-------      DONE (job, score)

A frame is a kind, a length and a body. Bodies are pickled on the way down and JSON on the way up,
so the parent never unpickles what a process that runs user code has written. The true pipes are
moved away from the standard streams before any user code is loaded: what a reward prints goes to
the error stream, and reading standard input gives its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cloudpickle

from rollick.config.names import resolve
from rollick.errors import RewardError, RollickError
from rollick.rewards.base import call_reward, combine, describe_failure, part_names
from rollick.types import RewardFn, Sample, Score, ScoreStatus

HEADER = struct.Struct("<BI")


class Kind(IntEnum):
    """What a frame carries."""

    LOAD = 1
    JOBS = 2
    READY = 3
    BROKEN = 4
    STARTED = 5
    DONE = 6


class Call(NamedTuple):
    """One reward of a sample, as it is asked for."""

    reward: str
    weight: float
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Definitions:
    """The rewards of a pool by name: a reference to import, or a function by value (pickled)."""

    rewards: Mapping[str, str | bytes]
    base: Path | None


def encode_frame(kind: Kind, body: bytes) -> bytes:
    return HEADER.pack(kind, len(body)) + body


def encode_score(job: int, score: Score) -> bytes:
    said = [score.value, dict(score.parts), score.status, score.detail, score.seconds]
    return encode_frame(Kind.DONE, json.dumps([job, *said, list(score.turns)]).encode())


def decode_score(body: bytes) -> tuple[int, Score]:
    job, value, parts, status, detail, seconds, turns = json.loads(body)
    return job, Score(value, parts, ScoreStatus(status), detail, seconds, tuple(turns))


@dataclass(slots=True)
class RewardLoop:
    """Holds the functions; answers frames until the input ends. One call at a time."""

    inbox: BinaryIO
    outbox: int
    runner: asyncio.Runner
    functions: dict[str, RewardFn] = field(default_factory=dict[str, RewardFn])
    unsent: bytearray = field(default_factory=bytearray)

    def run(self) -> None:
        while header := self.inbox.read(HEADER.size):
            kind, length = HEADER.unpack(header)
            content = cloudpickle.loads(self.inbox.read(length))
            if kind == Kind.LOAD:
                self._load(content)
            else:
                for job, payload in content:
                    score = self._score(job, payload)
                    self.unsent += encode_score(job, score)
            self._flush()

    def _load(self, definitions: Definitions) -> None:
        try:
            for name, definition in definitions.rewards.items():
                self.functions[name] = _load_reward(definition, definitions.base)
        except (Exception, SystemExit) as error:
            known = isinstance(error, RollickError)
            message = error.message if known else describe_failure(error)
            problem = {"message": message, "fix": error.fix if known else ""}
            self.unsent += encode_frame(Kind.BROKEN, json.dumps(problem).encode())
        else:
            self.unsent += encode_frame(Kind.READY, b"")

    def _score(self, job: int, payload: bytes) -> Score:
        try:
            sample, calls = cloudpickle.loads(payload)
        except Exception as error:
            return Score.failed(f"the sample cannot be unpickled: {describe_failure(error)}")
        labels = part_names(call.reward for call in calls)
        scores: dict[str, Score] = {}
        for place, (label, call) in enumerate(zip(labels, calls, strict=True)):
            # Sent before the call, together with the last answer: if this call hangs or kills the
            # process, the parent knows which one it was.
            self.unsent += encode_frame(Kind.STARTED, json.dumps([job, place]).encode())
            self._flush()
            scores[label] = self._call(sample, call)
        return combine(scores, dict(zip(labels, (call.weight for call in calls), strict=True)))

    def _call(self, sample: Sample, call: Call) -> Score:
        function = self.functions[call.reward]
        try:
            return call_reward(function, sample, call.options, run=self.runner.run)
        except RewardError as error:  # a row without a column is a bad sample, not a bad run
            return Score.failed(str(error))

    def _flush(self) -> None:
        view = memoryview(bytes(self.unsent))
        self.unsent.clear()
        while view:
            view = view[os.write(self.outbox, view) :]


def _load_reward(definition: str | bytes, base: Path | None) -> RewardFn:
    if isinstance(definition, bytes):
        return cloudpickle.loads(definition)
    function = resolve("rewards", definition, base=base)
    if not callable(function):
        raise RewardError(
            f"the reward {definition} is a {type(function).__name__}", fix="name a function"
        )
    return function


def main() -> None:
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    with os.fdopen(inbox, "rb") as pipe, asyncio.Runner() as runner:
        RewardLoop(pipe, outbox, runner).run()
