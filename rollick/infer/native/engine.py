"""The native engine: generates with Hugging Face modules. This file is its asyncio side.

    generate() --submit--> Runner <--step, in the engine's thread-- driver task --> futures

A lock is held during each step and each change of weights, version or cache. So changes happen
between two steps, and each forward uses exactly one committed version.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar

from torch import Tensor, nn

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError, EngineLost, RollickError, is_out_of_memory
from rollick.infer.cancellation import run_to_completion
from rollick.infer.engine import Capability, Delta, StopRules, WeightStream
from rollick.infer.native.gpu.forward import ForwardOptions
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.runner import FinishedRequest
from rollick.infer.native.sequence_table import EngineRequest
from rollick.infer.native.slot_runner import SlotRunner
from rollick.infer.native.weight_update import EngineWeights
from rollick.infer.request_validation import RequestLimits, vocabulary_size
from rollick.infer.stream import StreamSubscribers
from rollick.models.attention.slot_cache import CACHED
from rollick.models.attention.varlen import unsupported_layer_types
from rollick.models.decoder.fused_linear import fuse_storage
from rollick.models.loading.load import load_model
from rollick.models.loading.probe import PREFILLED, check_engine
from rollick.models.loading.rope import fix_rope
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
Runner = SlotRunner | PagedRunner
"""`step` runs in the engine's thread. All other calls happen between steps; only `queue.submit` and
`queue.drop` may run during one."""


class NativeEngine:
    """Implements Engine with torch and transformers only."""

    def __init__(
        self,
        weights: EngineWeights,
        infer: InferConfig,
        *,
        stops: StopRules,
        deterministic: bool = False,
    ) -> None:
        _check_module(weights.module)
        fix_rope(weights.module, infer.max_length)
        self.weights, self._infer = weights, infer
        self.runner = _create_runner(weights, infer, stops, deterministic=deterministic)
        _run_in_new_thread(self._probe)
        _run_in_new_thread(self.weights.record_fingerprint)
        self._limits = RequestLimits(infer.max_length, vocabulary_size(weights.module), stops)
        self._paused = False
        self._asleep = False
        self._updating = False
        """Whether others write the parameters, which may be of two versions."""
        self._closed = False
        self._pending: dict[SampleId, tuple[EngineRequest, asyncio.Future[Completion]]] = {}
        self._subscribers = StreamSubscribers()
        self._lock = asyncio.Lock()
        self._has_work = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._step_records: deque[StepRecord] = deque(maxlen=0)
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
        stops: StopRules,
    ) -> NativeEngine:
        """Load the model, or share the parameters of `shared`, a learner's module. A sharing engine
        has its own modules, with its own attention, over the learner's storage. Weights that have
        adapters in the learner are copied, not shared."""
        if shared is None:
            module = _run_in_new_thread(lambda: load_model(model, device=device, attention=CACHED))
            weights = EngineWeights(module, device=device)
        else:
            weights = EngineWeights.share(shared, device=device)
        return cls(weights, infer, stops=stops, deterministic=deterministic)

    @property
    def module(self) -> nn.Module:
        return self.weights.module

    @property
    def capabilities(self) -> frozenset[Capability]:
        unsupported: set[Capability] = set()
        if not self.weights.can_adopt:
            unsupported.add(Capability.ADOPT_WEIGHTS)
        if self.weights.learner_base:
            # The learner's adapters must be merged into a copy, so its storage cannot be shared.
            unsupported.add(Capability.SHARED_WEIGHTS)
        return frozenset(Capability) - unsupported

    async def generate(self, request: Request) -> Completion:
        self._check_open()
        self._limits.check(request, pending=self._pending)
        queued = EngineRequest(request)
        stop = self._limits.stop_before_start(request)
        if stop is not None:
            return _add_times(queued.completion_without_tokens(stop), queued)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        pending = self._pending[request.uid] = (queued, future)
        self.runner.queue.submit(queued)
        self._wake_driver()
        try:
            return await future
        except asyncio.CancelledError:
            self.runner.queue.drop(queued)
            self._wake_driver()
            raise
        finally:
            if self._pending.get(request.uid) is pending:
                del self._pending[request.uid]

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        return self._subscribers.stream(request, self.generate)

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
            await self._synchronize()

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
        if not self.weights.accepts(weights):
            message = "cannot update weights: the engine shares the learner's parameters"
            raise EngineError(message, fix="write the parameters in place, then call commit_shared")

        def update_and_commit() -> Fingerprint:
            fingerprint = self.weights.update(weights, version, expected)
            self.runner.commit(version, keep_cache=keep_cache)
            return fingerprint

        async with self._lock:
            self._check_awake()
            await self._synchronize()
            return await self._run_in_thread(update_and_commit)

    async def begin_update(self, names: Sequence[str]) -> list[Tensor] | None:
        self._check_open()
        if self.weights.shared:
            return None
        async with self._lock:
            self._check_awake()
            self._updating = True
            await self._synchronize()
            return await self._run_in_thread(lambda: self.weights.open_parameters(names))

    async def finish_update(
        self, version: PolicyVersion, fingerprint: Fingerprint, *, keep_cache: bool = False
    ) -> None:
        def commit() -> None:
            self.weights.record_fingerprint()
            self.runner.commit(version, keep_cache=keep_cache)

        async with self._lock:
            await self._run_in_thread(commit)
            self._updating = False
        self._wake_driver()

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        async with self._lock:
            await self._synchronize()
            self.runner.commit(version, keep_cache=keep_cache)

    async def sleep(self) -> None:
        """Running requests wait for `wake`. Offloads weights that are not shared to host memory.
        Frees the cache, which is then recomputed after `wake`; keeps it if the weights are shared
        and infer.free_cache is false."""
        async with self._lock:
            self._asleep = True
            await self._synchronize()
            # `free` also drops CUDA graphs: they hold the addresses of weights that move now.
            if self._infer.free_cache or not self.weights.shared:
                self.runner.free()
            if not self.weights.shared:
                await self._run_in_thread(lambda: self.weights.move("cpu"))

    async def wake(self) -> None:
        async with self._lock:
            if not self.weights.shared:
                await self._run_in_thread(lambda: self.weights.move(self.weights.device))
            self._asleep = False
        self._wake_driver()

    def load(self) -> EngineLoad:
        stats = self.runner.stats
        return EngineLoad(
            running=self.runner.table.num_running,
            waiting=len(self.runner.queue),
            slots=self._infer.slots,
            generated_tokens=stats.generated_tokens,
            busy_seconds=stats.busy_seconds,
            version=self.runner.version,
            kv_tokens=self.runner.kv_tokens,
            kv_capacity=self.runner.kv_capacity,
            preempted=stats.preempted,
        )

    def record_steps(self, limit: int) -> None:
        self._step_records = deque(maxlen=limit)

    def take_steps(self) -> list[StepRecord]:
        records = list(self._step_records)
        self._step_records.clear()
        return records

    def fingerprint(self) -> Fingerprint:
        return self.weights.fingerprint()

    async def check_weights(self) -> None:
        def check() -> None:
            if self.weights.are_checked and not self._updating:
                self.weights.check()
                self.runner.check_copies()

        async with self._lock:
            await self._run_in_thread(check)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        async with self._lock:
            self._fail_all(EngineError("the engine was closed while the request was pending"))
        if self._driver is not None:
            self._driver.cancel()
            with suppress(asyncio.CancelledError):
                await self._driver
        # No step is running, so this returns immediately.
        self._thread.shutdown()

    def _probe(self) -> None:
        """Raises if the runner does not compute the same as the model's own forward."""
        compute = partial(self.runner.probe_logits, prefilled=PREFILLED)
        check_engine(self.module, compute, max_length=self._infer.max_length)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed", fix="create a new one")

    def _check_awake(self) -> None:
        if self._asleep:
            message = "cannot update weights: the engine is asleep"
            raise EngineError(message, fix="call wake first")

    def _wake_driver(self) -> None:
        if self._driver is None and not self._closed:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._has_work.set()

    async def _drive(self) -> None:
        """The driver task: runs steps while there is work; waits while paused or asleep."""
        while True:
            await self._has_work.wait()
            async with self._lock:
                if self._paused or self._asleep or self._updating or not self.runner.has_work:
                    self._has_work.clear()
                    continue
                await self._run_step()

    async def _synchronize(self) -> None:
        """Wait for the forwards in flight on the device, and resolve requests that they ended."""
        await self._run_and_resolve(self.runner.synchronize)

    async def _run_step(self) -> None:
        started, started_at = perf_counter(), time()
        await self._run_and_resolve(self.runner.step)
        stats = self.runner.stats
        if self._step_records.maxlen and stats.last_step.batch:
            # Includes the thread switches, because the next step starts after them.
            seconds = (perf_counter() - started) / stats.last_step_decodes
            for decode in range(stats.last_step_decodes):
                begin = started_at + decode * seconds
                self._step_records.append(replace(stats.last_step, seconds=seconds, at=begin))

    async def _run_and_resolve(self, work: Callable[[], list[FinishedRequest]]) -> None:
        try:
            finished = await self._run_in_thread(work)
        except Exception as error:  # every pending request gets the error
            self._fail_all(error)
            return
        for request, completion in finished:
            self._resolve(request, completion)
        table = self.runner.table
        for uid, num_sent in self._subscribers:
            request, _ = self._pending.get(uid, (None, None))
            if request is not None and request in table.requests:
                new_tokens = table.tokens_since(table.requests.index(request), num_sent)
                self._subscribers.send(uid, *new_tokens)

    def _resolve(self, request: EngineRequest, completion: Completion) -> None:
        pending, future = self._pending.get(request.request.uid, (None, None))
        if pending is request and future is not None and not future.done():
            future.set_result(_add_times(completion, request))

    def _fail_all(self, error: Exception) -> None:
        self.runner.clear()
        for _, future in list(self._pending.values()):
            if not future.done():
                failure = _as_engine_error(error)
                failure.__cause__ = error
                future.set_exception(failure)

    async def _run_in_thread(self, work: Callable[[], Result]) -> Result:
        loop = asyncio.get_running_loop()
        return await run_to_completion(loop.run_in_executor(self._thread, work))


def _create_runner(
    weights: EngineWeights, infer: InferConfig, stops: StopRules, *, deterministic: bool
) -> Runner:
    """PagedRunner (pages, CUDA graphs) on a GPU; SlotRunner on CPU and in deterministic runs."""
    module, device = weights.module, weights.device
    if deterministic or not device.startswith("cuda"):
        return SlotRunner(module, infer, device=device, deterministic=deterministic, stops=stops)
    if not weights.shared:
        # A learner fuses the storage of parameters before it shares them.
        fuse_storage(module)
    options = ForwardOptions.zero_mismatch() if infer.zero_mismatch else ForwardOptions()
    return PagedRunner(module, infer, device=device, stops=stops, options=options)


def _check_module(module: nn.Module) -> None:
    config: Any = module.config
    if kinds := unsupported_layer_types(config):
        raise EngineError(
            f"{type(module).__name__} has layers of kind {kinds}, which the native engine's cache "
            "does not support",
            fix="use another engine for this model",
        )
    if config._attn_implementation != CACHED:
        message = f"the module was built with attention {config._attn_implementation!r}"
        raise EngineError(message, fix=f"build it with attention={CACHED!r}")


def _add_times(completion: Completion, request: EngineRequest) -> Completion:
    now, arrived_at = perf_counter(), request.arrived_at
    admitted_at, first_token_at = min(request.admitted_at, now), min(request.first_token_at, now)
    queued_s, prefill_s = admitted_at - arrived_at, first_token_at - admitted_at
    return replace(completion, seconds=now - arrived_at, queued_s=queued_s, prefill_s=prefill_s)


def _run_in_new_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a temporary thread, so that its OpenMP workers end with it.

    Otherwise they would stay beside those of the engine's thread. With more workers than cores,
    OpenMP stops spinning, and most kernels would first wake sleeping workers (660 wake-ups in a
    step of SmolLM2-135M instead of 8).
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return EngineError(error.message, fix=error.fix)
    if is_out_of_memory(error):  # EngineLost: a restart in a new process frees the memory.
        return EngineLost(f"the engine is out of memory: {error}", fix="lower infer.slots")
    fix = error.fix if isinstance(error, RollickError) else "see the cause above"
    return EngineError(f"the engine failed: {type(error).__name__}: {error}", fix=fix)
