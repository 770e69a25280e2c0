"""A simulated engine: sleeps on the event loop's clock instead of running a model.

Owns the futures, timers and failures. batching.py decides which job runs when.

    generate() -> EngineBatch.submit -> settle -> one timer, for the next change -> reach -> futures

Runs on the virtual clock (virtual_clock.py), where timers are exact.
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
"""Number of response tokens of a request, including those that it continues from."""

_SHARED_LENGTH = 1 << 17
"""Length of the arrays that completions are slices of."""


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingRequest(EngineJob):
    """A job of the batch with its request and the future of its completion."""

    request: Request
    done: asyncio.Future[Completion]
    stop: StopReason
    """Its stop reason unless it is aborted."""
    started_s: float


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
        self._opened_s = self._loop.time()
        self._pending: dict[SampleId, _PendingRequest] = {}
        self._step_end_waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failure_timers: list[asyncio.TimerHandle] = []
        self._is_settle_scheduled = False
        self._is_paused = False
        self._failure: EngineError | None = None
        self._stopped_s: float | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.KEEP_CACHE})

    async def generate(self, request: Request) -> Completion:
        self._check_request(request)
        pending = self._make_pending(request)
        if pending.generated >= pending.target:
            return self._make_completion(pending, pending.stop)
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
            pending.done.set_result(self._make_completion(pending, StopReason.ABORTED))

    async def pause(self) -> None:
        self._check_alive()
        self._is_paused = True
        await self._wait_for_step_end()
        self._settle()

    async def resume(self) -> None:
        self._check_alive()
        self._is_paused = False
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
        until = now if self._stopped_s is None else self._stopped_s
        return self._batch.usage(now, elapsed_s=until - self._opened_s)

    def slow_down(self, times: float) -> None:
        """After the current step, steps take `times` as long as at first; 1 restores the speed."""
        self._batch.speed = self._speed / times
        if self._batch.in_step(self._loop.time()):
            self._step_end_waiters.append(self._loop.create_future())
        self._settle()

    def fail_at(self, time_s: float) -> None:
        """From this time of the loop's clock on, pending and later requests raise EngineLost."""
        fix = "send its requests to another engine"
        error = EngineLost(f"the simulated engine failed at {time_s:g} s", fix=fix)
        self._failure_timers.append(self._loop.call_at(time_s, self._fail, error))

    async def close(self) -> None:
        """Pending requests fail. Closing twice does nothing."""
        for timer in self._failure_timers:
            timer.cancel()
        self._fail(EngineError("the engine was closed", fix="create a new engine"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.copy()

    def _check_request(self, request: Request) -> None:
        self._check_alive()
        if request.uid in self._pending:
            fix = "abort it first, or await it"
            raise EngineError(f"{request.uid} is already being generated", fix=fix)
        length, capacity = len(request.token_ids), self._batch.kv_capacity
        if length == 0 or 0 < capacity <= length:
            message = f"a prompt of {length} tokens does not fit a cache of {capacity} tokens"
            fix = "use prompts of at least one token that leave room for a response"
            raise EngineError(f"{request.uid}: {message}", fix=fix)

    def _make_pending(self, request: Request) -> _PendingRequest:
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
            started_s=self._loop.time(),
        )

    def _settle_soon(self) -> None:
        """Schedule one `_settle`, after the callbacks that are ready now."""
        if not self._is_settle_scheduled:
            self._is_settle_scheduled = True
            self._loop.call_soon(self._run_scheduled_settle)

    def _run_scheduled_settle(self) -> None:
        self._is_settle_scheduled = False
        self._settle()

    def _settle(self) -> None:
        if self._failure is not None:
            return
        boundary = bool(self._step_end_waiters)
        when = self._batch.settle(self._loop.time(), hold=self._is_paused, boundary=boundary)
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self._reach_boundary)

    def _reach_boundary(self) -> None:
        self._timer = None
        for job in self._batch.reach():
            pending = self._pending.get(job.uid)
            if pending and pending is job and not pending.done.done():
                pending.done.set_result(self._make_completion(pending, pending.stop))
        for waiter in self._step_end_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._step_end_waiters.clear()
        self._settle_soon()

    async def _wait_for_step_end(self) -> None:
        if self._batch.in_step(self._loop.time()):
            waiter = self._loop.create_future()
            self._step_end_waiters.append(waiter)
            self._settle()
            await waiter

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._stopped_s = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._batch.stop(self._stopped_s)
        completions = [pending.done for pending in self._pending.values()]
        for future in (*completions, *self._step_end_waiters):
            if not future.done():
                future.set_exception(error.copy())
        self._step_end_waiters.clear()

    def _make_completion(self, pending: _PendingRequest, stop: StopReason) -> Completion:
        now = self._loop.time()
        entered_s = pending.entered_s if pending.entered_s >= 0 else now
        first_token_s = min(max(pending.first_token_s, entered_s), now)
        return Completion(
            uid=pending.uid,
            token_ids=constant_array(0, pending.generated, np.int32),
            logprobs=constant_array(0, pending.generated, np.float32),
            versions=_join_versions(pending.request.continue_from, pending.spans),
            stop=stop,
            seconds=now - pending.started_s,
            queued_s=entered_s - pending.started_s,
            prefill_s=first_token_s - entered_s,
            kept_cache=_join_kept_cache(pending.request.continue_from, pending.spans),
        )


def _join_kept_cache(earlier: Completion | None, spans: Sequence[VersionSpan]) -> BoolArray | None:
    earlier_flags = None if earlier is None else earlier.kept_cache
    if earlier_flags is None and not any(kept for _, _, kept in spans):
        return None
    if earlier_flags is None:
        earlier_flags = np.zeros(0 if earlier is None else len(earlier.token_ids), np.bool_)
    flags = [earlier_flags, *(np.full(tokens, kept) for _, tokens, kept in spans)]
    return frozen_array(np.concatenate(flags), np.bool_)


def _join_versions(earlier: Completion | None, spans: Sequence[VersionSpan]) -> IntArray:
    parts = [constant_array(version, tokens, np.int32) for version, tokens, _ in spans]
    parts = parts if earlier is None else [earlier.versions, *parts]
    if len(parts) == 1:
        return parts[0]
    return frozen_array(np.concatenate(parts) if parts else (), np.int32)


def constant_array(value: int, length: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A read-only array of one value; usually a slice of a shared array, to save memory."""
    if length > _SHARED_LENGTH:
        return frozen_array(np.full(length, value), dtype)
    return _make_shared_array(value, dtype)[:length]


@lru_cache(256)
def _make_shared_array(value: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return frozen_array(np.full(_SHARED_LENGTH, value), dtype)
