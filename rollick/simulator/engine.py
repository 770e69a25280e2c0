"""A simulated engine: it takes time on the event loop's clock and generates nothing.

Owns the asyncio side: futures, timers, failures. batching.py decides which job runs when.

    generate() -> EngineBatch.submit -> settle -> one timer, for the next change -> reach -> futures

Made for the virtual clock (virtual_clock.py), where timers are exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.errors import EngineError, EngineLost
from rollick.infer.engine import Capability
from rollick.simulator.batching import EngineBatch, EngineUsage
from rollick.simulator.prefix_cache import EngineJob, VersionSpan
from rollick.simulator.step_time import StepTime
from rollick.types import (
    BoolArray,
    Completion,
    EngineLoad,
    IntArray,
    PolicyVersion,
    Request,
    SampleId,
    StopReason,
    frozen_array,
)

LengthOf = Callable[[Request], int]
"""How many tokens the response to a request has, including those that it continues from."""

_SHARED = 1 << 17
"""Length of the arrays that completions are slices of."""


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingRequest(EngineJob):
    """A request on the engine: the batch's job, and the future of its completion."""

    request: Request
    done: asyncio.Future[Completion]
    stop: StopReason
    """Its stop reason unless it is aborted."""
    started: float


class SimulatedEngine:
    """Decodes `slots` sequences at once, with a KV cache of `kv_capacity` tokens (0: no limit), in
    which every sequence has its own copy of its prompt. A group's prompt is prefilled once while it
    is cached. `speed` 0.5 makes every step take twice as long; a completion arrives `call_s` after
    its last step. All tokens and log-probs are 0."""

    def __init__(
        self,
        step_time: StepTime,
        length_of: LengthOf,
        *,
        slots: int,
        kv_capacity: int = 0,
        speed: float = 1.0,
        call_s: float = 0.0,
        version: int = 0,
    ) -> None:
        self._batch = EngineBatch(step_time, slots, kv_capacity, speed=speed, version=version)
        self._length_of = length_of
        self._call_s = call_s
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.time()
        self._pending: dict[SampleId, _PendingRequest] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failure_timers: list[asyncio.TimerHandle] = []
        self._is_settle_scheduled = False
        self._paused = False
        self._failure: EngineError | None = None
        self._stopped_at: float | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.KEEP_CACHE})

    async def generate(self, request: Request) -> Completion:
        self._check(request)
        pending = self._begin(request)
        if pending.generated >= pending.target:
            return self._completion(pending, pending.stop)
        self._pending[request.uid] = pending
        if self._batch.submit(pending):
            self._settle_soon()
        try:
            completion = await pending.done
        except asyncio.CancelledError:
            self._batch.drop(pending)
            self._settle_soon()
            raise
        finally:
            if self._pending.get(request.uid) is pending:
                del self._pending[request.uid]
        if self._call_s:
            await asyncio.sleep(self._call_s)
        return completion

    async def abort(self, uid: SampleId) -> None:
        """A waiting request ends immediately, a running one with the current step."""
        pending = self._pending.get(uid)
        if pending is None:
            return
        if pending in self._batch.running:
            await self._wait_for_step_end()
        if not pending.done.done():
            self._batch.take(pending)
            self._settle_soon()
            pending.done.set_result(self._completion(pending, StopReason.ABORTED))

    async def pause(self) -> None:
        self._check_alive()
        self._paused = True
        await self._wait_for_step_end()
        self._settle()

    async def resume(self) -> None:
        self._check_alive()
        self._paused = False
        self._settle_soon()

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        """Takes no time: the caller simulates the transfer of the weights."""
        self._check_alive()
        await self._wait_for_step_end()
        self._batch.commit(version, keep_cache=keep_cache)
        self._settle_soon()

    def load(self) -> EngineLoad:
        return self._batch.load(self._loop.time())

    def usage(self) -> EngineUsage:
        """The engine's usage until now, or until it failed or was closed."""
        now = self._loop.time()
        until = now if self._stopped_at is None else self._stopped_at
        return self._batch.usage(now, elapsed_s=until - self._opened)

    def slow_down(self, times: float) -> None:
        """After the current step, steps take `times` as long; 1 undoes it."""
        self._batch.speed = self._speed / times
        if self._batch.in_step(self._loop.time()):
            self._waiters.append(self._loop.create_future())
        self._settle()

    def fail_at(self, time_s: float) -> None:
        """From that time of the loop's clock on, pending and later requests raise EngineLost."""
        fix = "send its requests elsewhere"
        error = EngineLost(f"the simulated engine failed at {time_s:g} s", fix=fix)
        self._failure_timers.append(self._loop.call_at(time_s, self._fail, error))

    async def close(self) -> None:
        """Pending requests fail. Closing twice does nothing."""
        for timer in self._failure_timers:
            timer.cancel()
        self._fail(EngineError("the engine was closed", fix="make a new one"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.copy()

    def _check(self, request: Request) -> None:
        self._check_alive()
        if request.uid in self._pending:
            fix = "abort it first, or await it"
            raise EngineError(f"{request.uid} is already being generated", fix=fix)
        length, capacity = len(request.token_ids), self._batch.kv_capacity
        if length == 0 or 0 < capacity <= length:
            text = f"a prompt of {length} tokens does not fit a cache of {capacity}"
            fix = "use prompts of at least one token that leave room for a response"
            raise EngineError(f"{request.uid}: {text}", fix=fix)

    def _begin(self, request: Request) -> _PendingRequest:
        prompt, earlier = len(request.token_ids), request.continue_from
        length, limit = self._length_of(request), request.sampling.max_tokens
        if self._batch.kv_capacity:
            limit = min(limit, self._batch.kv_capacity - prompt)
        generated = 0 if earlier is None else len(earlier.token_ids)
        return _PendingRequest(
            request.uid,
            request.group,
            prompt,
            min(length, limit),
            generated,
            request=request,
            done=self._loop.create_future(),
            stop=StopReason.STOP if length < limit else StopReason.LENGTH,
            started=self._loop.time(),
        )

    def _settle_soon(self) -> None:
        """Schedule one `_settle`, after everything else that happens at this time."""
        if not self._is_settle_scheduled:
            self._is_settle_scheduled = True
            self._loop.call_soon(self._settle_scheduled)

    def _settle_scheduled(self) -> None:
        self._is_settle_scheduled = False
        self._settle()

    def _settle(self) -> None:
        if self._failure is not None:
            return
        boundary = bool(self._waiters)
        when = self._batch.settle(self._loop.time(), hold=self._paused, boundary=boundary)
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self._reach)

    def _reach(self) -> None:
        self._timer = None
        for job in self._batch.reach():
            pending = self._pending.get(job.uid)
            if pending and pending is job and not pending.done.done():
                pending.done.set_result(self._completion(pending, pending.stop))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._settle_soon()

    async def _wait_for_step_end(self) -> None:
        if self._batch.in_step(self._loop.time()):
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            self._settle()
            await waiter

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._stopped_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._batch.stop(self._stopped_at)
        waits = [pending.done for pending in self._pending.values()]
        for wait in (*waits, *self._waiters):
            if not wait.done():
                wait.set_exception(error.copy())
        self._waiters.clear()

    def _completion(self, pending: _PendingRequest, stop: StopReason) -> Completion:
        now = self._loop.time()
        entered = pending.entered_s if pending.entered_s >= 0 else now
        first = min(max(pending.first_token_s, entered), now)
        return Completion(
            uid=pending.uid,
            token_ids=constant_array(0, pending.generated, np.int32),
            logprobs=constant_array(0, pending.generated, np.float32),
            versions=_versions(pending.request.continue_from, pending.spans),
            stop=stop,
            seconds=now - pending.started,
            queued_s=entered - pending.started,
            prefill_s=first - entered,
            kept_cache=_kept_cache(pending.request.continue_from, pending.spans),
        )


def _kept_cache(earlier: Completion | None, spans: Sequence[VersionSpan]) -> BoolArray | None:
    before = None if earlier is None else earlier.kept_cache
    if before is None and not any(kept for _, _, kept in spans):
        return None
    if before is None:
        before = np.zeros(0 if earlier is None else len(earlier.token_ids), np.bool_)
    flags = [before, *(np.full(tokens, kept) for _, tokens, kept in spans)]
    return frozen_array(np.concatenate(flags), np.bool_)


def _versions(earlier: Completion | None, spans: Sequence[VersionSpan]) -> IntArray:
    parts = [constant_array(version, tokens, np.int32) for version, tokens, _ in spans]
    parts = parts if earlier is None else [earlier.versions, *parts]
    if len(parts) == 1:
        return parts[0]
    return frozen_array(np.concatenate(parts) if parts else (), np.int32)


def constant_array(value: int, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A read-only array of one value; usually a slice of a shared array, to save memory."""
    if length > _SHARED:
        return frozen_array(np.full(length, value), dtype)
    return _shared(value, dtype)[:length]


@lru_cache(256)
def _shared(value: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return frozen_array(np.full(_SHARED, value), dtype)
