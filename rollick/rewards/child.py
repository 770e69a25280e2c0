"""The program of a reward process: takes jobs from a pipe, calls rewards, writes scores.

    pool (parent)                                child
      LOAD  names and functions      ------->      imports them
                                     <-------    READY with what they declare, or BROKEN
      JOBS  samples, each pickled    ------->      rewards that take batches: over all samples
                                                   then for each sample, for each of the others:
                                     <-------        STARTED (jobs, rewards), before the call
                                     <-------      DONE (job, a score for each of its rewards)

A frame is a kind, a length and a body. Bodies are pickled on the way down and JSON on the way up,
so the parent never unpickles what a process that runs user code has written. The true pipes are
moved away from the standard streams before any user code is loaded: what a reward prints goes to
the error stream, and reading standard input gives its end.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cloudpickle

from rollick.children.process import encode_frame, read_frames, take_standard_streams
from rollick.config.names import resolve
from rollick.errors import RewardError, RollickError
from rollick.rewards.base import (
    Declaration,
    call_batch,
    call_reward,
    declaration_of,
    describe_failure,
)
from rollick.types import RewardFn, Sample, Score, ScoreStatus

ISOLATION = "process"
"""What a score rests on whose reward says nothing else: a process that is killed when it hangs."""
SCORE_FIELDS = tuple(each.name for each in fields(Score))


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
    options: Mapping[str, Any]


Place = tuple[int, int]
"""A job, and which of its calls."""


@dataclass(frozen=True, slots=True)
class Definitions:
    """The rewards of a pool by name: a reference to import, or a function by value (pickled)."""

    rewards: Mapping[str, str | bytes]
    base: Path | None


def encode_scores(job: int, scores: Sequence[Score]) -> bytes:
    said = [[getattr(score, name) for name in SCORE_FIELDS] for score in scores]
    return encode_frame(Kind.DONE, json.dumps([job, said], default=dict).encode())


def decode_scores(body: bytes) -> tuple[int, list[Score]]:
    job, said = json.loads(body)
    named: list[dict[str, Any]] = [dict(zip(SCORE_FIELDS, one, strict=True)) for one in said]
    for one in named:
        one |= {"status": ScoreStatus(one["status"]), "turns": tuple(one["turns"])}
    return job, [Score(**one) for one in named]


def decode_declarations(body: bytes) -> dict[str, Declaration]:
    return {name: Declaration(**said) for name, said in json.loads(body).items()}


@dataclass(slots=True)
class RewardLoop:
    """Holds the functions; answers frames until the input ends. One call at a time."""

    inbox: BinaryIO
    outbox: int
    runner: asyncio.Runner
    functions: dict[str, RewardFn] = field(default_factory=dict[str, RewardFn])
    declared: dict[str, Declaration] = field(default_factory=dict[str, Declaration])
    unsent: bytearray = field(default_factory=bytearray)

    def run(self) -> None:
        for kind, body in read_frames(self.inbox):
            content = cloudpickle.loads(body)
            if kind == Kind.LOAD:
                self._load(content)
            else:
                self._score(content)
            self._flush()

    def _load(self, definitions: Definitions) -> None:
        try:
            for name, definition in definitions.rewards.items():
                self.functions[name] = _load_reward(definition, definitions.base)
                self.declared[name] = declaration_of(self.functions[name])
        except (Exception, SystemExit) as error:
            known = isinstance(error, RollickError)
            message = error.message if known else describe_failure(error)
            problem = {"message": message, "fix": error.fix if known else ""}
            self.unsent += encode_frame(Kind.BROKEN, json.dumps(problem).encode())
        else:
            declared = {name: asdict(said) for name, said in self.declared.items()}
            self.unsent += encode_frame(Kind.READY, json.dumps(declared).encode())

    def _score(self, jobs: Sequence[tuple[int, bytes]]) -> None:
        """Answer each job; what takes batches is called first, over all of them."""
        samples: dict[int, Sample] = {}
        calls: dict[int, Sequence[Call]] = {}
        for job, payload in jobs:
            try:
                samples[job], calls[job] = cloudpickle.loads(payload)
            except Exception as error:
                why = f"the sample cannot be unpickled: {describe_failure(error)}"
                self.unsent += encode_scores(job, [Score.failed(why)])
        known = self._call_batches(samples, calls)
        for job, sample in samples.items():
            scores = [
                known.get((job, place)) or self._call(sample, call, (job, place))
                for place, call in enumerate(calls[job])
            ]
            self.unsent += encode_scores(job, scores)

    def _call_batches(
        self, samples: Mapping[int, Sample], calls: Mapping[int, Sequence[Call]]
    ) -> dict[Place, Score]:
        alike: dict[str, list[tuple[Place, Call]]] = {}
        for job, asked in calls.items():
            for place, call in enumerate(asked):
                if self.declared[call.reward].batch:
                    key = json.dumps([call.reward, dict(call.options)], default=repr)
                    alike.setdefault(key, []).append(((job, place), call))
        known: dict[Place, Score] = {}
        for together in alike.values():
            size = self.declared[together[0][1].reward].batch
            for begin in range(0, len(together), size):
                part = together[begin : begin + size]
                known |= self._call_batch([place for place, _ in part], part[0][1], samples)
        return known

    def _call_batch(
        self, places: Sequence[Place], call: Call, samples: Mapping[int, Sample]
    ) -> dict[Place, Score]:
        self._tell_start(places)
        function = self.functions[call.reward]
        of = [samples[job] for job, _ in places]
        try:
            scores = call_batch(function, of, call.options, run=self.runner.run)
        except RewardError as error:  # of one row, perhaps
            if len(places) > 1:
                alone = [self._call_batch([place], call, samples) for place in places]
                return {place: score for one in alone for place, score in one.items()}
            scores = [Score.failed(str(error))]
        return {
            place: self._stamped(score, call) for place, score in zip(places, scores, strict=True)
        }

    def _call(self, sample: Sample, call: Call, place: Place) -> Score:
        self._tell_start([place])
        function = self.functions[call.reward]
        try:
            score = call_reward(function, sample, call.options, run=self.runner.run)
        except RewardError as error:  # a row without a column is a bad sample, not a bad run
            score = Score.failed(str(error))
        return self._stamped(score, call)

    def _stamped(self, score: Score, call: Call) -> Score:
        version = score.version or self.declared[call.reward].version
        return replace(score, version=version, isolation=score.isolation or ISOLATION)

    def _tell_start(self, places: Sequence[Place]) -> None:
        """Sent before a call, together with the last answers: if it hangs or kills the process,
        the parent knows which one it was."""
        self.unsent += encode_frame(Kind.STARTED, json.dumps(places).encode())
        self._flush()

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
    inbox, outbox = take_standard_streams()
    with os.fdopen(inbox, "rb") as pipe, asyncio.Runner() as runner:
        RewardLoop(pipe, outbox, runner).run()
