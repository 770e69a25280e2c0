"""The native engine: the asyncio side of generation on Hugging Face modules.

Owns the requests' futures, the engine's one thread, and who may touch the runner when. Does not
own how tokens are made (runner.py, forward.py, sampler.py).

    generate() --submit--> Runner <--step, in the engine's thread-- driver task --> futures

A lock is held during each step and by everything that changes weights, version or cache: so
these happen between two steps, and each forward uses exactly one committed version.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar

import torch
from torch import nn

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError, RollickError
from rollick.infer.engine import Capability, Delta, VerifiedWeights, WeightStream
from rollick.infer.native.endings import Decode, Stops
from rollick.infer.native.intake import take_weights
from rollick.infer.native.merging import Merging
from rollick.infer.native.rows import Job
from rollick.infer.native.runner import Finished
from rollick.infer.native.runners import AnyRunner, runner_for
from rollick.infer.numbers import check_request, vocabulary_of
from rollick.infer.stream import Feeds
from rollick.models.adapter import adapted_weights, base_parameters
from rollick.models.cached_attention import CACHED
from rollick.models.fingerprint import fingerprint
from rollick.models.fused import fuse_storage
from rollick.models.load import empty_model, load_model, share_parameters
from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
    StepRecord,
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    job: Job
    done: asyncio.Future[Completion]
    started: float


class NativeEngine:
    """Implements Engine with nothing but torch and transformers. Close it when done."""

    def __init__(
        self,
        module: nn.Module,
        infer: InferConfig,
        *,
        runner: AnyRunner,
        device: str,
        shared: bool,
    ) -> None:
        self.module = module
        self.runner = runner
        self._infer = infer
        self._device = device
        self._shared = shared
        self.merging = Merging(module)
        """The weights that adapters are added to; a sharing engine's are the learner's."""
        self._vocabulary = vocabulary_of(module)
        self._paused = False
        self._asleep = False
        self._closed = False
        self._pending: dict[SampleId, _Pending] = {}
        self._feeds = Feeds()
        self._lock = asyncio.Lock()
        self._work = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._steps: deque[StepRecord] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollick-engine")

    @classmethod
    def create(
        cls,
        infer: InferConfig,
        model: ModelConfig,
        *,
        device: str = "cpu",
        deterministic: bool = False,
        shared: nn.Module | None = None,
        stop_ids: Sequence[int],
        decode: Decode | None = None,
        version: int = 0,
    ) -> NativeEngine:
        """Load the model, or borrow the parameters of `shared`, a learner's module.

        A sharing engine has a module tree of its own (with its own attention) over the learner's
        storage; of weights that have adapters there, it has sums of its own. `decode` turns drawn
        ids into text; only stop strings need it.
        """
        if shared is None:
            module = _apart(lambda: load_model(model, device=device, attention=CACHED))
        else:
            config: Any = shared.config
            if device.startswith("cuda"):
                fuse_storage(shared)
            module = empty_model(config, attention=CACHED)
            share_parameters(module, shared)
            if adapted_weights(shared) and device.startswith("cuda"):
                fuse_storage(module)
        engine = cls.around(
            module,
            infer,
            device=device,
            deterministic=deterministic,
            shared=shared is not None,
            stops=Stops(tuple(stop_ids), decode),
            version=version,
        )
        if shared is not None and (adapted := adapted_weights(shared)):
            lent = [(n, value.detach()) for n, value in base_parameters(shared) if n in adapted]
            engine.merging = Merging(module, lent)
        return engine

    @classmethod
    def around(
        cls,
        module: nn.Module,
        infer: InferConfig,
        *,
        device: str = "cpu",
        deterministic: bool = False,
        shared: bool = False,
        stops: Stops,
        version: int = 0,
    ) -> NativeEngine:
        """An engine around a module that was built with the attention CACHED."""
        runner = runner_for(
            module,
            infer,
            device=device,
            deterministic=deterministic,
            shared=shared,
            stops=stops,
            version=version,
        )
        return cls(module, infer, runner=runner, device=device, shared=shared)

    @property
    def capabilities(self) -> frozenset[Capability]:
        # The addresses of parameters on a GPU are part of captured graphs, so there they stay.
        adopts = {Capability.ADOPTS_WEIGHTS} if self._owns_cpu_weights else set[Capability]()
        # Over a learner with adapters: what it publishes has to be added first.
        shares = set[Capability]() if self.merging.lent else {Capability.SHARED_WEIGHTS}
        return frozenset(
            {
                Capability.SLEEP,
                Capability.DETERMINISTIC,
                Capability.CUT_SUPPORT,
                Capability.KEEP_CACHE,
                Capability.MERGES_ADAPTERS,
                *adopts,
                *shares,
            }
        )

    @property
    def _owns_cpu_weights(self) -> bool:
        return not self._shared and self._device.startswith("cpu")

    async def generate(self, request: Request) -> Completion:
        """Waits until the request stops or is aborted; cancelling the call aborts it too."""
        self._check(request)
        loop = asyncio.get_running_loop()
        pending = _Pending(Job(request), loop.create_future(), perf_counter())
        self._pending[request.uid] = pending
        self.runner.submit(pending.job)
        self._wake_driver()
        try:
            return await pending.done
        except asyncio.CancelledError:
            self.runner.drop(pending.job)
            self._wake_driver()
            raise
        finally:
            if self._pending.get(request.uid) is pending:
                del self._pending[request.uid]

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """The same, with the tokens of each step as soon as it is over."""
        return self._feeds.stream(request, self.generate)

    async def abort(self, uid: SampleId) -> None:
        if uid not in self._pending:
            return
        async with self._lock:
            ended = self.runner.abort(uid)
            if ended is not None:
                self._resolve(*ended)

    async def pause(self) -> None:
        self._paused = True
        async with self._lock:
            await self._settle()

    async def resume(self) -> None:
        self._paused = False
        self._wake_driver()

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        self._check_open()
        if self._shared and not (self.merging.lent and _adapters(weights)):
            raise EngineError(
                "this engine shares the learner's parameters and cannot take weights of its own",
                fix="write the shared parameters in place, then call commit_shared",
            )
        async with self._lock:
            if self._asleep:
                raise EngineError(
                    "the engine sleeps and has no weights to update", fix="call wake first"
                )
            await self._settle()
            take = partial(self._take, weights, version, expected, keep_cache=keep_cache)
            return await self._in_thread(take)

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        async with self._lock:
            await self._settle()
            self.runner.commit(version, keep_cache=keep_cache)

    async def sleep(self) -> None:
        """Running requests survive: they wait, and compute their cache anew after `wake`.

        Weights that are not shared move from a GPU to the host. On the CPU they already are in
        the cheapest place there is, so only the cache is freed. With infer.free_cache=false an
        engine that shares them keeps its cache too.
        """
        async with self._lock:
            self._asleep = True
            await self._settle()
            # Captured graphs hold the addresses of weights: those that move take them along.
            if self._infer.free_cache or not self._shared:
                self.runner.free()
            if not self._shared:
                await self._in_thread(lambda: self._move("cpu"))

    async def wake(self) -> None:
        async with self._lock:
            if not self._shared:
                await self._in_thread(lambda: self._move(self._device))
            self._asleep = False
        self._wake_driver()

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self.runner.rows.running,
            waiting=self.runner.waiting_count,
            slots=self._infer.slots,
            generated_tokens=self.runner.generated_tokens,
            busy_seconds=self.runner.busy_seconds,
            version=self.runner.version,
            kv_tokens=self.runner.kv_tokens,
            kv_capacity=self.runner.kv_capacity,
            preempted=self.runner.preempted,
        )

    def record_steps(self, most: int) -> None:
        """Keep a record of each step from now on, the newest `most`, for `take_steps`."""
        self._steps = deque(maxlen=most)

    def take_steps(self) -> list[StepRecord]:
        """The steps since the last call, oldest first."""
        taken = list(self._steps or ())
        if self._steps is not None:
            self._steps.clear()
        return taken

    async def close(self) -> None:
        """Pending requests fail; the thread ends. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        async with self._lock:
            self._fail_all(EngineError("the engine was closed while the request was pending"))
        if self._driver is not None:
            self._driver.cancel()
            with suppress(asyncio.CancelledError):
                await self._driver
        # No step runs any more, so this returns at once.
        self._thread.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed", fix="make a new one")

    def _check(self, request: Request) -> None:
        self._check_open()
        check_request(
            request,
            max_length=self._infer.max_length,
            vocabulary=self._vocabulary,
            reads_text=self.runner.reads_text,
            pending=self._pending,
        )

    def _wake_driver(self) -> None:
        if self._driver is None and not self._closed:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._work.set()

    async def _drive(self) -> None:
        """Consumes submitted requests, produces completions; waits for work and for the lock."""
        while True:
            await self._work.wait()
            async with self._lock:
                if self._paused or self._asleep or not self.runner.has_work:
                    self._work.clear()
                    continue
                await self._step()

    async def _settle(self) -> None:
        """No forward runs any more: neither a step nor what steps have left to the device."""
        await self._finish(self.runner.settle)

    async def _step(self) -> None:
        begun, at = perf_counter(), time()
        await self._finish(self.runner.step)
        if self._steps is not None and self.runner.work.batch:
            # With the way to the thread and back: the next step begins when this one is here.
            decodes = self.runner.decodes
            seconds = (perf_counter() - begun) / decodes
            for number in range(decodes):
                begins = at + number * seconds
                self._steps.append(replace(self.runner.work, seconds=seconds, at=begins))

    async def _finish(self, work: Callable[[], Finished]) -> None:
        try:
            finished = await self._in_thread(work)
        except Exception as error:  # the engine thread is a boundary: its errors are the callers'
            self._fail_all(error)
            return
        for job, completion in finished:
            self._resolve(job, completion)
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        for uid, told in self._feeds.listening():
            pending = self._pending.get(uid)
            if pending is not None:
                self._feeds.tell(uid, *self.runner.rows.drawn(pending.job, told))

    def _resolve(self, job: Job, completion: Completion) -> None:
        pending = self._pending.get(job.request.uid)
        if pending is not None and pending.job is job and not pending.done.done():
            pending.done.set_result(_timed(completion, job, pending.started))

    def _fail_all(self, error: Exception) -> None:
        self.runner.clear()
        for pending in list(self._pending.values()):
            if not pending.done.done():
                failure = _as_engine_error(error)
                failure.__cause__ = error if failure is not error else None
                pending.done.set_exception(failure)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run in the engine's thread. A cancelled caller still waits for the end of the work,
        because it holds the lock that keeps others out."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def fingerprint(self) -> Fingerprint:
        """Of the weights without adapters."""
        return fingerprint(list(self.merging.base()))

    def _take(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None,
        *,
        keep_cache: bool,
    ) -> Fingerprint:
        adapters = _adapters(weights)
        if adapters is not None:
            self.merging.take(adapters)
            found = adapters.fingerprint
        else:
            found = take_weights(
                self.module,
                weights,
                version=version,
                expected=expected,
                adopt=Capability.ADOPTS_WEIGHTS in self.capabilities,
            )
            self.merging.forget()
        self.runner.commit(version, keep_cache=keep_cache)
        return found

    def _move(self, device: str) -> None:
        self.module.to(device)
        self.merging.move(device)
        if device.startswith("cuda"):
            fuse_storage(self.module)
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()


def _adapters(weights: WeightStream) -> VerifiedWeights | None:
    """The weights if they are adapters, which always come verified."""
    return weights if isinstance(weights, VerifiedWeights) and weights.scale is not None else None


def _timed(completion: Completion, job: Job, started: float) -> Completion:
    """With the seconds since `started`, and where they went."""
    now = perf_counter()
    placed = now if job.placed_at is None else job.placed_at
    first = now if job.first_at is None else job.first_at
    return replace(
        completion, seconds=now - started, queued_s=placed - started, prefill_s=first - placed
    )


def _apart(work: Callable[[], Result]) -> Result:
    """Run in a thread that ends with the work.

    A thread that computed in parallel keeps its helpers for as long as it lives. Once there are
    more of them than cores, none waits for work awake any more: each kernel of the engine would
    first wake a sleeping one (counted: 660 times a step of SmolLM2-135M instead of 8).
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return EngineError(error.message, fix=error.fix)
    fix = error.fix if isinstance(error, RollickError) else "see the cause above"
    return EngineError(f"the engine failed: {type(error).__name__}: {error}", fix=fix)
