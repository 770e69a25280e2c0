"""Fakes at the seams and builders of the nouns, for tests: no model, no torch, no processes.

FakeEngine draws what a function of the request says and takes as long as it is told; FakeCodec
has one token for each character.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollick.errors import EngineError, EngineLost
from rollick.infer.engine import Capability, WeightStream
from rollick.rollout.fleet import Want
from rollick.types import (
    NOT_SAMPLED,
    Annotations,
    BoolArray,
    Completion,
    EngineLoad,
    Fingerprint,
    Group,
    IntArray,
    PolicyVersion,
    Prompt,
    Request,
    Sample,
    SampleId,
    Score,
    ScoredSample,
    StopReason,
    Turn,
    frozen_array,
)

Reply = Callable[[Request], str | Sequence[int]]
Seconds = Callable[[Request], float]


def letters_by_stream(request: Request) -> str:
    """One to four letters that follow from the request's random stream."""
    stream = request.stream
    return "".join(chr(ord("a") + (stream >> 5 * n) % 26) for n in range(1 + stream % 4))


class FakeCodec:
    """A token for each character: its code point."""

    def encode_prompt(self, turns: Sequence[Turn]) -> IntArray:
        return _ids("".join(turn.content for turn in turns))

    def decode(self, token_ids: Iterable[int]) -> str:
        return "".join(chr(number) for number in token_ids)

    def append_turns(self, token_ids: IntArray, turns: Sequence[Turn]) -> IntArray:
        return self.append_text(token_ids, "".join(turn.content for turn in turns))

    def append_text(self, token_ids: IntArray, text: str) -> IntArray:
        return frozen_array([*token_ids, *_ids(text)], np.int32)

    def encode_answer(self, text: str) -> IntArray:
        return _ids(text)


@dataclass(slots=True)
class _Draw:
    """A request under way."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """An Engine with scripted replies and times.

    `reply` gives the whole response (text, or token ids), cut at max_tokens; `seconds` the time
    that drawing it takes, spread evenly over its tokens (`math.inf` hangs). Each token carries the
    version at which it was drawn and the log-prob `logprob`. `fail_with` is raised by every later
    generate once it is set; `lose` ends what runs too. What was asked is in `requests` and
    `aborted`.
    """

    def __init__(
        self,
        *,
        reply: Reply = letters_by_stream,
        seconds: Seconds | float = 0.0,
        slots: int = 8,
        version: int = 0,
        logprob: float = -1.0,
    ) -> None:
        self.requests: list[Request] = []
        self.aborted: list[SampleId] = []
        self.fail_with: Exception | None = None
        self.peak = 0
        self.generated_tokens = 0
        self.closed = False
        self._reply = reply
        self._seconds = seconds
        self._slots = slots
        self._version = PolicyVersion(version)
        self._logprob = logprob
        self._pending: dict[SampleId, _Draw] = {}
        self._free = asyncio.Semaphore(slots)
        self._going = asyncio.Event()
        self._going.set()

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.SLEEP, Capability.SHARED_WEIGHTS, Capability.DETERMINISTIC})

    @property
    def lost(self) -> bool:
        return isinstance(self.fail_with, EngineLost)

    async def generate(self, request: Request) -> Completion:
        if self.fail_with is not None:
            raise self.fail_with
        if request.uid in self._pending:
            raise EngineError(f"sample {request.uid} is already being generated")
        self.requests.append(request)
        draw = self._pending[request.uid] = _Draw()
        self.peak = max(self.peak, len(self._pending))
        try:
            if self._free.locked():
                await _first_of(self._free_slot(), draw.aborted.wait())
            if draw.aborted.is_set():
                return self._abort(request, draw)
            async with self._free:
                return await self._draw(request, draw)
        finally:
            del self._pending[request.uid]

    async def abort(self, uid: SampleId) -> None:
        if uid in self._pending:
            self.aborted.append(uid)
            self._pending[uid].aborted.set()

    def lose(self) -> None:
        """From now on it is gone, with all that it was generating."""
        self.fail_with = EngineLost("the fake engine is gone")
        for draw in self._pending.values():
            draw.aborted.set()

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        for _ in weights:
            pass
        self._version = version
        return expected or Fingerprint("")

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        self._version = version

    async def sleep(self) -> None:
        if self._pending:
            raise EngineError(f"{len(self._pending)} requests run, so the engine cannot sleep")

    async def wake(self) -> None:
        pass

    def load(self) -> EngineLoad:
        running = min(len(self._pending), self._slots)
        return EngineLoad(
            running=running,
            waiting=len(self._pending) - running,
            slots=self._slots,
            generated_tokens=self.generated_tokens,
            version=self._version,
        )

    async def close(self) -> None:
        self.closed = True

    async def _free_slot(self) -> None:
        async with self._free:
            pass

    async def _draw(self, request: Request, draw: _Draw) -> Completion:
        reply = self._reply(request)
        whole: list[int] = [ord(c) for c in reply] if isinstance(reply, str) else list(reply)
        wanted = whole[: request.sampling.max_tokens]
        if request.continue_from is not None:
            draw.token_ids.extend(request.continue_from.token_ids.tolist())
            draw.logprobs.extend(request.continue_from.logprobs.tolist())
            draw.versions.extend(request.continue_from.versions.tolist())
        seconds = self._seconds(request) if callable(self._seconds) else self._seconds
        for token in wanted[len(draw.token_ids) :]:
            await self._tick(draw, seconds / len(wanted))
            if draw.aborted.is_set():
                return self._abort(request, draw)
            draw.token_ids.append(token)
            draw.logprobs.append(self._logprob)
            draw.versions.append(self._version)
            self.generated_tokens += 1
        stop = StopReason.LENGTH if len(whole) > len(wanted) else StopReason.STOP
        return _completion(request, draw, stop)

    def _abort(self, request: Request, draw: _Draw) -> Completion:
        if self.fail_with is not None:
            raise self.fail_with
        return _completion(request, draw, StopReason.ABORTED)

    async def _tick(self, draw: _Draw, seconds: float) -> None:
        """The time of one token; ends early when the request is aborted."""
        if not self._going.is_set():
            await _first_of(self._going.wait(), draw.aborted.wait())
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await draw.aborted.wait()
            except TimeoutError:
                pass


class FakeFollower:
    """Who follows a sample (access.Follower): keeps what it was told in `told` and `tokens`."""

    def __init__(self) -> None:
        self.goes_on = True
        self.told: list[str] = []
        self.tokens: list[int] = []

    def want(self, request: Request) -> Want:
        return Want(deadline=0, tokens=1)

    def note(self, what: str) -> None:
        self.told.append(what)

    def placed(self, engine: int) -> None:
        self.told.append(f"on {engine}")

    def drawn(self, request: Request, completion: Completion) -> None:
        self.tokens.append(len(completion.token_ids))

    def lost(self) -> None:
        self.told.append("lost")


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def prompt(text: str = "1+1=", *, uid: str = "toy/0", domain: str = "toy", **row: Any) -> Prompt:
    """A prompt of one plain turn; further keywords are the row's columns."""
    return Prompt(uid=uid, domain=domain, turns=(Turn("text", text),), row=row)


def sample(
    text: str = "2",
    *,
    uid: tuple[int, int] = (0, 0),
    of: Prompt | None = None,
    version: int = 0,
    logprob: float = -1.0,
    stop: StopReason = StopReason.STOP,
) -> Sample:
    """A sample whose response is `text`, every character a token that `version` drew."""
    asked = of or prompt()
    before = len(asked.text)
    ids = _ids(asked.text + text)
    drawn = np.arange(len(ids)) >= before
    return Sample(
        uid=SampleId(*uid),
        prompt=asked,
        token_ids=ids,
        logprobs=frozen_array(np.where(drawn, logprob, 0.0), np.float32),
        versions=frozen_array(np.where(drawn, version, NOT_SAMPLED), np.int32),
        loss_mask=frozen_array(drawn, np.bool_),
        temperature=1.0,
        stop=stop,
        text=text,
    )


def group(
    scores: Sequence[float | None],
    *,
    uid: int = 0,
    of: Prompt | None = None,
    started: int = 0,
    texts: Sequence[str] | None = None,
) -> Group:
    """A group with these scores, None being one that failed. Samples have the version `started`."""
    asked = of or prompt()
    responses = texts or ["2"] * len(scores)
    members = tuple(
        ScoredSample(
            sample(text, uid=(uid, index), of=asked, version=started),
            Score.failed("scripted") if value is None else Score(float(value)),
        )
        for index, (text, value) in enumerate(zip(responses, scores, strict=True))
    )
    return Group(uid, asked, members, PolicyVersion(started))


def mask_of(text: str) -> BoolArray:
    """A loss mask: `x` is a token that the policy drew, `.` any other."""
    return frozen_array([letter == "x" for letter in text], np.bool_)


def masked_group(scores: Sequence[float | None], *masks: str, uid: int = 0) -> Group:
    """A group whose samples have these loss masks; the prompt has the first four tokens."""
    plain = group(scores, uid=uid, texts=["a" * (len(mask) - 4) for mask in masks])
    members = tuple(
        replace(member, sample=replace(member.sample, loss_mask=mask_of(mask)))
        for member, mask in zip(plain.members, masks, strict=True)
    )
    return replace(plain, members=members)


def annotated(whole: Group, *said: Annotations) -> Group:
    """The group with what models say of its members' tokens."""
    pairs = zip(whole.members, said, strict=True)
    return replace(whole, members=tuple(replace(m, annotations=a) for m, a in pairs))


def _completion(request: Request, draw: _Draw, stop: StopReason) -> Completion:
    return Completion(
        uid=request.uid,
        token_ids=np.array(draw.token_ids, np.int32),
        logprobs=np.array(draw.logprobs, np.float32),
        versions=np.array(draw.versions, np.int32),
        stop=stop,
    )


def _ids(text: str) -> IntArray:
    return frozen_array([ord(character) for character in text], np.int32)
