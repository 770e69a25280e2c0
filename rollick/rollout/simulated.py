"""The parts of a simulated run: engine, reward, trainer. They take time on the loop's clock only.

Owns the asyncio side: futures, timers, faults. How long things take and how long samples are comes
from workload.py, who runs when inside an engine from batching.py; both are pure, and their names
are here too, so that a simulation imports one module.

    generate() -> Batching.submit -> settle -> one timer, for the next change -> reach -> futures

Made for the virtual clock (virtual.py), where timers are exact. Everything must be made while the
loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.errors import ConfigError, EngineError, EngineLost
from rollick.infer.engine import Capability, WeightStream
from rollick.rollout.batching import Batching, Job
from rollick.rollout.usage import Usage, total_usage
from rollick.rollout.workload import (
    Fit,
    Latencies,
    Lengths,
    StepRecord,
    StepTime,
    fit_step_time,
    uniform,
)
from rollick.types import (
    BoolArray,
    Completion,
    EngineLoad,
    Fingerprint,
    Group,
    IntArray,
    PolicyVersion,
    Request,
    Sample,
    SampleId,
    Score,
    StopReason,
)

__all__ = [
    "Fit",
    "Latencies",
    "Lengths",
    "SimulatedEngine",
    "SimulatedReward",
    "SimulatedTrainer",
    "StepRecord",
    "StepTime",
    "Usage",
    "fit_step_time",
    "total_usage",
]

LengthOf = Callable[[Request], int]
"""How many tokens the response to a request has in all, those it continues from among them."""

TRAINING_PARTS = 20
"""Parts of a training step, before each of which its slowdown is asked for."""

_SHARED = 1 << 16
"""Tokens of the arrays that completions are slices of."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending(Job):
    """A request under way: the batch's job, and who waits for it."""

    request: Request
    done: asyncio.Future[Completion]
    stop: StopReason
    """How it ends if nobody interferes."""
    started: float


class SimulatedEngine:
    """An Engine that draws nothing but takes its time: continuous batching by a StepTime.

    It has `slots` sequences at once and a cache of `kv_capacity` tokens (0: no limit), in which
    every sequence has its prompt for itself. A group's prompt is prefilled once while it is cached.
    At a publish running sequences compute their cache anew, or keep it, as they are told. `speed`
    0.5 makes every step take twice as long; an answer comes `call_s` after its last step. All
    tokens are 0, and so are their log-probs.
    """

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
        if slots < 1 or speed <= 0 or kv_capacity < 0:
            raise ConfigError(
                f"no engine has slots={slots}, speed={speed}, kv_capacity={kv_capacity}",
                fix="use a slot or more, a speed above 0, a capacity of 0 (no limit) or more",
            )
        self._batching = Batching(
            step_time,
            slots,
            kv_capacity=kv_capacity,
            speed=speed,
            version=version,
        )
        self._length_of = length_of
        self._call_s = call_s
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.time()
        self._pending: dict[SampleId, _Pending] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._faults: list[asyncio.TimerHandle] = []
        self._settling = False
        self._paused = False
        self._asleep = False
        self._hung = False
        self._failure: EngineError | None = None
        self._stopped_at: float | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(Capability)

    async def generate(self, request: Request) -> Completion:
        self._check(request)
        pending = self._begin(request)
        if pending.drawn >= pending.wanted:
            return self._completion(pending, pending.stop)
        self._pending[request.uid] = pending
        if self._batching.submit(pending):
            self._touch()
        try:
            completion = await pending.done
        except asyncio.CancelledError:
            self._batching.drop(pending)
            self._touch()
            raise
        finally:
            if self._pending.get(request.uid) is pending:
                del self._pending[request.uid]
        if self._call_s:
            await asyncio.sleep(self._call_s)
        return completion

    async def abort(self, uid: SampleId) -> None:
        """A waiting request ends at once, a running one with the step under way."""
        pending = self._pending.get(uid)
        if pending is None:
            return
        if self._hung or pending in self._batching.running:
            await self._between_steps()
        if not pending.done.done():
            self._batching.take(pending)
            self._touch()
            pending.done.set_result(self._completion(pending, StopReason.ABORTED))

    async def pause(self) -> None:
        self._check_alive()
        self._paused = True
        await self._between_steps()
        self._settle()

    async def resume(self) -> None:
        self._check_alive()
        self._paused = False
        self._touch()

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        """Takes no time: a transfer's cost is the caller's to simulate. Any fingerprint fits."""
        for _ in weights:
            pass
        await self.commit_shared(version, keep_cache=keep_cache)
        return expected or Fingerprint("")

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        self._check_alive()
        await self._between_steps()
        self._batching.commit(version, keep_cache=keep_cache)
        self._touch()

    async def sleep(self) -> None:
        """Running requests survive: they wait, and compute their cache anew after `wake`."""
        self._check_alive()
        self._asleep = True
        await self._between_steps()
        self._batching.free()
        self._settle()

    async def wake(self) -> None:
        self._check_alive()
        self._asleep = False
        self._touch()

    def load(self) -> EngineLoad:
        batching, now = self._batching, self._loop.time()
        return EngineLoad(
            running=len(batching.running),
            waiting=len(batching.waiting),
            slots=batching.slots,
            generated_tokens=batching.generated_tokens(now),
            busy_seconds=batching.busy_s(now),
            version=batching.version,
            kv_tokens=batching.kv_tokens(now),
            kv_capacity=batching.kv_capacity,
            preempted=batching.preempted,
        )

    def usage(self) -> Usage:
        """What the engine did with its time until now, or until it failed or was closed."""
        now = self._loop.time()
        until = now if self._stopped_at is None else self._stopped_at
        return self._batching.usage(now, elapsed_s=until - self._opened)

    def slow_down(self, times: float) -> None:
        """From the end of the step under way on steps take so many times as long; 1 undoes it."""
        self._batching.speed = self._speed / times
        if self._batching.in_step(self._loop.time()):
            self._waiters.append(self._loop.create_future())
        self._settle()

    def fail_at(self, time_s: float) -> None:
        """At that time of the loop's clock all pending and later requests raise EngineLost."""
        error = EngineLost(
            f"the simulated engine failed at {time_s:g} s", fix="send its requests elsewhere"
        )
        self._faults.append(self._loop.call_at(time_s, self._fail, error))

    def hang_at(self, time_s: float) -> None:
        """From that time on the engine answers nothing: its requests, aborts and pauses wait."""
        self._faults.append(self._loop.call_at(time_s, self._hang))

    async def close(self) -> None:
        """Pending requests fail. Closing twice does nothing."""
        for fault in self._faults:
            fault.cancel()
        self._fail(EngineError("the engine was closed", fix="make a new one"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise _copy(self._failure)

    def _check(self, request: Request) -> None:
        self._check_alive()
        if request.uid in self._pending:
            raise EngineError(
                f"{request.uid} is already being generated", fix="abort it first, or await it"
            )
        length, capacity = len(request.token_ids), self._batching.kv_capacity
        if length == 0 or 0 < capacity <= length:
            raise EngineError(
                f"{request.uid}: a prompt of {length} tokens does not fit a cache of {capacity}",
                fix="use prompts of at least one token that leave room for a response",
            )

    def _begin(self, request: Request) -> _Pending:
        prompt, earlier = len(request.token_ids), request.continue_from
        length, limit = self._length_of(request), request.sampling.max_tokens
        if self._batching.kv_capacity:
            limit = min(limit, self._batching.kv_capacity - prompt)
        drawn = 0 if earlier is None else len(earlier.token_ids)
        return _Pending(
            request.uid,
            request.group,
            prompt,
            min(length, limit),
            drawn,
            request=request,
            done=self._loop.create_future(),
            stop=StopReason.STOP if length < limit else StopReason.LENGTH,
            started=self._loop.time(),
        )

    def _touch(self) -> None:
        """Something changed: decide once, after everything that happens at this moment."""
        if not self._settling:
            self._settling = True
            self._loop.call_soon(self._settle_soon)

    def _settle_soon(self) -> None:
        self._settling = False
        self._settle()

    def _settle(self) -> None:
        """Let the batch take its next form, and set the timer to the next change."""
        if self._hung or self._failure is not None:
            return
        when = self._batching.settle(
            self._loop.time(),
            hold=self._paused or self._asleep,
            boundary=bool(self._waiters),
        )
        timer = self._timer
        if timer is not None:
            if timer.when() == when:
                return
            timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self._reach)

    def _reach(self) -> None:
        self._timer = None
        for job in self._batching.reach():
            pending = self._pending.get(job.uid)
            if pending is not None and pending is job and not pending.done.done():
                pending.done.set_result(self._completion(pending, pending.stop))
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        self._touch()

    async def _between_steps(self) -> None:
        """Waits for the end of the step under way; for ever, if the engine hangs."""
        if self._hung or self._batching.in_step(self._loop.time()):
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            self._settle()
            await waiter

    def _hang(self) -> None:
        self._hung = True
        self._stop()

    def _fail(self, error: EngineError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._stopped_at = self._loop.time()
        self._stop()
        waits = [pending.done for pending in self._pending.values()]
        for wait in (*waits, *self._waiters):
            if not wait.done():
                wait.set_exception(_copy(error))
        self._waiters.clear()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._batching.stop(self._loop.time())

    def _completion(self, pending: _Pending, stop: StopReason) -> Completion:
        now = self._loop.time()
        entered = pending.entered_s if pending.entered_s >= 0 else now
        first = min(max(pending.first_s, entered), now)
        return Completion(
            uid=pending.uid,
            token_ids=_constant(0, pending.drawn, "int32"),
            logprobs=_constant(0, pending.drawn, "float32"),
            versions=_versions(pending.request.continue_from, pending.spans),
            stop=stop,
            seconds=now - pending.started,
            queued_s=entered - pending.started,
            prefill_s=first - entered,
            kept_cache=_kept(pending.request.continue_from, pending.spans),
        )


class SimulatedReward:
    """Scores after a while: `await reward.score(sample)`. All of it follows from ids and the seed.

    In a share `flat` of the groups all samples score alike (0 or 1), so that they carry no signal;
    elsewhere a sample's score is any number between 0 and 1. A share `failed` of the samples
    cannot be scored. `latencies.seconds` is asked for turn 0.
    """

    def __init__(
        self, latencies: Latencies, *, seed: int = 0, flat: float = 0.0, failed: float = 0.0
    ) -> None:
        self._latencies = latencies
        self._seed = seed
        self._flat = flat
        self._failed = failed

    async def score(self, sample: Sample) -> Score:
        seconds = self._latencies.seconds(sample.uid)
        await asyncio.sleep(seconds)
        group, index = sample.uid
        if uniform(self._seed, "failed", group, index) < self._failed:
            return Score.failed("simulated failure")
        if uniform(self._seed, "flat", group) < self._flat:
            return Score(float(uniform(self._seed, "score", group) < 0.5), seconds=seconds)
        return Score(uniform(self._seed, "score", group, index), seconds=seconds)


class SimulatedTrainer:
    """Takes base_s and seconds_per_token for a batch: `await trainer.train(groups)`.

    `slowdown` says how many times longer it takes just then; it is asked now and again.
    """

    def __init__(
        self,
        seconds_per_token: float,
        base_s: float = 0.0,
        *,
        slowdown: Callable[[], float] | None = None,
    ) -> None:
        self.seconds_per_token = seconds_per_token
        self.base_s = base_s
        self.slowdown = slowdown
        self.steps = 0
        self.tokens = 0
        self.busy_s = 0.0

    async def train(self, groups: Sequence[Group]) -> float:
        """Returns the seconds that it took; counts the tokens of prompts and responses."""
        tokens = sum(sample.length for group in groups for sample in group.samples)
        seconds = self.base_s + self.seconds_per_token * tokens
        if self.slowdown is None:
            await asyncio.sleep(seconds)
        else:
            parts = [seconds / TRAINING_PARTS] * TRAINING_PARTS
            seconds = 0.0
            for part in parts:
                seconds += (slowed := part * self.slowdown())
                await asyncio.sleep(slowed)
        self.steps += 1
        self.tokens += tokens
        self.busy_s += seconds
        return seconds


def _copy(error: EngineError) -> EngineError:
    """One instance for each who waits: a raised error collects the traceback of its reader."""
    return type(error)(error.message, fix=error.fix)


def _kept(earlier: Completion | None, spans: Sequence[tuple[int, int, bool]]) -> BoolArray | None:
    before = None if earlier is None else earlier.kept_cache
    if before is None and not any(kept for _, _, kept in spans):
        return None
    if before is None:
        before = np.zeros(0 if earlier is None else len(earlier.token_ids), np.bool_)
    flags = np.concatenate([before, *(np.full(tokens, kept) for _, tokens, kept in spans)])
    flags.setflags(write=False)
    return flags


def _versions(earlier: Completion | None, spans: Sequence[tuple[int, int, bool]]) -> IntArray:
    parts = [_constant(version, tokens, "int32") for version, tokens, _ in spans]
    if earlier is not None:
        parts.insert(0, earlier.versions)
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, np.int32)
    joined.setflags(write=False)
    return joined


def _constant(value: int, length: int, dtype: str) -> npt.NDArray[Any]:
    """A read-only array of one value. Most are slices of one array, so that they cost no memory."""
    return _shared(value, dtype)[:length] if length <= _SHARED else _full(value, length, dtype)


@lru_cache(256)
def _shared(value: int, dtype: str) -> npt.NDArray[Any]:
    return _full(value, _SHARED, dtype)


def _full(value: int, length: int, dtype: str) -> npt.NDArray[Any]:
    array = np.full(length, value, dtype)
    array.setflags(write=False)
    return array
