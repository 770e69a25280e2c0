"""Fakes of the engine, the codec and the sample tracker, and groups with loss masks.

FakeEngine generates scripted replies in scripted times; FakeCodec has one token per character.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollick.errors import EngineError, EngineLost
from rollick.infer.engine import Capability, WeightStream
from rollick.observe.sample_stage import SampleActivity
from rollick.rollout.request_queue import RequestNeeds
from rollick.simulator.step_time import StepTime
from rollick.testing.fakes import group
from rollick.types import (
    BoolArray,
    Completion,
    EngineLoad,
    Fingerprint,
    Group,
    IntArray,
    PolicyVersion,
    Request,
    SampleId,
    StopReason,
    Turn,
    frozen_array,
)

Reply = Callable[[Request], str | Sequence[int]]
Seconds = Callable[[Request], float]


def letters_by_stream(request: Request) -> str:
    """One to four letters, determined by the request's random stream."""
    stream = request.stream
    return "".join(chr(ord("a") + (stream >> 5 * n) % 26) for n in range(1 + stream % 4))


class FakeCodec:
    """One token per character: its code point."""

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
class _PendingRequest:
    """A request in flight."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """An Engine with scripted replies and times.

    `reply` returns the response (text or token ids), which is truncated at max_tokens; `seconds`
    is its generation time, spread evenly over its tokens (`math.inf` hangs). Each token has the
    engine's version at that time and the log-prob `logprob`. If `fail_with` is set, generate
    raises it; `lose` also ends running requests. `requests` and `aborted` record the calls.
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
        self._pending: dict[SampleId, _PendingRequest] = {}
        self._free = asyncio.Semaphore(slots)
        self._running = asyncio.Event()
        self._running.set()

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
        pending = self._pending[request.uid] = _PendingRequest()
        self.peak = max(self.peak, len(self._pending))
        try:
            if self._free.locked():
                await _wait_for_first(self._free_slot(), pending.aborted.wait())
            if pending.aborted.is_set():
                return self._abort(request, pending)
            async with self._free:
                return await self._generate_tokens(request, pending)
        finally:
            del self._pending[request.uid]

    async def abort(self, uid: SampleId) -> None:
        if uid in self._pending:
            self.aborted.append(uid)
            self._pending[uid].aborted.set()

    def lose(self) -> None:
        """Simulate the loss of the engine and its running requests."""
        self.fail_with = EngineLost("the fake engine is gone")
        for pending in self._pending.values():
            pending.aborted.set()

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

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

    async def _generate_tokens(self, request: Request, pending: _PendingRequest) -> Completion:
        reply = self._reply(request)
        full: list[int] = [ord(c) for c in reply] if isinstance(reply, str) else list(reply)
        tokens = full[: request.sampling.max_tokens]
        if request.continue_from is not None:
            pending.token_ids.extend(request.continue_from.token_ids.tolist())
            pending.logprobs.extend(request.continue_from.logprobs.tolist())
            pending.versions.extend(request.continue_from.versions.tolist())
        seconds = self._seconds(request) if callable(self._seconds) else self._seconds
        for token in tokens[len(pending.token_ids) :]:
            await self._tick(pending, seconds / len(tokens))
            if pending.aborted.is_set():
                return self._abort(request, pending)
            pending.token_ids.append(token)
            pending.logprobs.append(self._logprob)
            pending.versions.append(self._version)
            self.generated_tokens += 1
        stop = StopReason.LENGTH if len(full) > len(tokens) else StopReason.STOP
        return _completion(request, pending, stop)

    def _abort(self, request: Request, pending: _PendingRequest) -> Completion:
        if self.fail_with is not None:
            raise self.fail_with
        return _completion(request, pending, StopReason.ABORTED)

    async def _tick(self, pending: _PendingRequest, seconds: float) -> None:
        """Wait for the duration of one token, or until the request is aborted."""
        if not self._running.is_set():
            await _wait_for_first(self._running.wait(), pending.aborted.wait())
        if seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await pending.aborted.wait()
            except TimeoutError:
                pass


class FakeTracker:
    """An InFlightSample that records its calls in `calls` and `tokens`."""

    def __init__(self) -> None:
        self.should_continue = True
        self.calls: list[str] = []
        self.tokens: list[int] = []

    def needs_of(self, request: Request) -> RequestNeeds:
        return RequestNeeds(deadline=0, tokens=1)

    def set_activity(self, activity: SampleActivity, ends_by: float = 0.0) -> None:
        self.calls.append(activity.text)

    def assigned(self, engine: int) -> None:
        self.calls.append(f"on {engine}")

    def completed(self, request: Request, completion: Completion) -> None:
        self.tokens.append(len(completion.token_ids))

    def engine_lost(self) -> None:
        self.calls.append("lost")


async def _wait_for_first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Return when the first coroutine ends, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def mask_of(text: str) -> BoolArray:
    """A loss mask: `x` is a sampled token, `.` any other."""
    return frozen_array([letter == "x" for letter in text], np.bool_)


def masked_group(scores: Sequence[float | None], *masks: str, uid: int = 0) -> Group:
    """A group whose samples have these loss masks. The prompt has four tokens."""
    plain = group(scores, uid=uid, texts=["a" * (len(mask) - 4) for mask in masks])
    members = tuple(
        replace(member, sample=replace(member.sample, loss_mask=mask_of(mask)))
        for member, mask in zip(plain.members, masks, strict=True)
    )
    return replace(plain, members=members)


def _completion(request: Request, pending: _PendingRequest, stop: StopReason) -> Completion:
    return Completion(
        uid=request.uid,
        token_ids=np.array(pending.token_ids, np.int32),
        logprobs=np.array(pending.logprobs, np.float32),
        versions=np.array(pending.versions, np.int32),
        stop=stop,
    )


def _ids(text: str) -> IntArray:
    return frozen_array([ord(character) for character in text], np.int32)


def step_time(
    base_s: float,
    per_sequence_s: float = 0.0,
    per_kv_token_s: float = 0.0,
    per_prefill_token_s: float = 0.0,
    **others: Any,
) -> StepTime:
    """The step time of a simulated engine; parts without a value take no time."""
    return StepTime(
        base_s=base_s,
        per_sequence_s=per_sequence_s,
        per_kv_token_s=per_kv_token_s,
        per_prefill_token_s=per_prefill_token_s,
        **others,
    )
