"""vLLM as an engine, for large models and several GPUs, through its public interfaces only.

    generate() -> VllmRequest -> one segment after another -> vLLM (child processes) -> Completion
    update()   -> stage, check, verify -> interrupt all segments -> reload in every worker -> resume

A segment is one request to vLLM, and all of its tokens come from one version. Before the weights
change, every segment is interrupted and returns its tokens; then its request continues as a new
segment with a new cache. So the version of each token is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineCorrupt, EngineError, RollickError, WeightError
from rollick.infer.cancellation import run_to_completion
from rollick.infer.engine import Capability, Delta, StopRules, WeightStream
from rollick.infer.request_validation import RequestLimits, check_finite, vocabulary_size
from rollick.infer.stream import StreamSubscribers
from rollick.infer.vllm.client import VllmClient, import_start
from rollick.infer.vllm.request import VllmRequest
from rollick.infer.vllm.weight_staging import remove_leftovers, stage_file, translate_disk_errors
from rollick.infer.vllm.worker import write_bundle
from rollick.infer.weight_checks import check_fingerprint, check_shapes, stage_weights
from rollick.models.loading.load import empty_model
from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
    StopReason,
)

ABORT_RETRY_S = 0.02
"""An abort is repeated after this time: vLLM ignores it if the segment has not reached it yet."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one, with only a log line."""

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class VllmEngine:
    def __init__(
        self,
        llm: Any,
        stats: Any,
        infer: InferConfig,
        *,
        skeleton: nn.Module,
        device: str,
        stops: StopRules,
    ) -> None:
        """`llm` is vLLM's AsyncLLM, `stats` its LoadStats; `skeleton` has the parameters' names
        and shapes, without memory."""
        self._client = VllmClient(llm, on_loss=self._fail_all)
        self._stats = stats
        self._infer = infer
        self._skeleton = skeleton
        self._device = device
        vocabulary = vocabulary_size(skeleton)
        self._limits = RequestLimits(infer.max_length, vocabulary, stops, MIN_TEMPERATURE)
        self._version = 0
        self._paused = False
        self._asleep = False
        self._state_lock = asyncio.Lock()
        self._expected: Sequence[str] | None = None
        """The fingerprint of each worker's parameters after the last update."""
        self._may_run = True
        self._watcher: asyncio.Task[None] | None = None
        self._pending: dict[SampleId, tuple[VllmRequest, asyncio.Task[Completion]]] = {}
        self._subscribers = StreamSubscribers()
        self._segment_numbers = count()

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
    ) -> VllmEngine:
        """Start vLLM with the model's weights on `device`, and the next devices if tensor
        parallel. Blocks until its processes are ready."""
        if shared is not None:
            fix = "give the generators their own devices, or use infer.engine=native"
            raise EngineError("vLLM cannot share the parameters of a learner", fix=fix)
        if deterministic:
            message = "vLLM's results depend on the other requests of a batch"
            raise EngineError(message, fix="use infer.engine=native in a deterministic run")
        start = import_start()
        remove_leftovers()
        # The skeleton first: it fails fast for a model that transformers does not know.
        skeleton = empty_model(model, attention="eager")
        llm, stats = start(infer, model, device=device)
        return cls(llm, stats, infer, skeleton=skeleton, device=device, stops=stops)

    @property
    def capabilities(self) -> frozenset[Capability]:
        on_cpu = self._device.startswith("cpu")
        sampling = frozenset({Capability.TRUNCATED_SAMPLING})
        return sampling if on_cpu else sampling | {Capability.SLEEP}

    async def generate(self, request: Request) -> Completion:
        self._client.check_open()
        self._limits.check(request, pending=self._pending)
        pending = VllmRequest(request)
        if self._may_run:
            pending.may_run.set()
        if not self._pending:
            self._stats.start_clock()
        task = asyncio.create_task(self._run(pending), name=f"vllm {request.uid}")
        self._pending[request.uid] = (pending, task)
        if self._watcher is None or self._watcher.done():
            watch = self._client.watch(lambda: bool(self._pending))
            self._watcher = asyncio.create_task(watch, name="vllm watch")
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if pending.failure is None or (caller is not None and caller.cancelling()):
                raise
            raise pending.failure from None
        finally:
            del self._pending[request.uid]

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        return self._subscribers.stream(request, self.generate)

    async def abort(self, uid: SampleId) -> None:
        if uid not in self._pending:
            return
        request, _ = self._pending[uid]
        request.aborted = True
        request.may_run.set()
        await self._interrupt(uid)

    async def pause(self) -> None:
        """Segments stay in vLLM, with their cache."""
        async with self._state_lock:
            self._client.check_open()
            self._paused = True
            self._update_may_run()
            pause = self._client.llm.pause_generation(mode="keep", clear_cache=False)
            await self._client.call(pause)

    async def resume(self) -> None:
        async with self._state_lock:
            self._client.check_open()
            self._paused = False
            if not self._asleep:
                await self._client.call(self._client.llm.resume_generation())
            self._update_may_run()

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        """Generation continues until every worker has verified the weights."""
        self._client.check_open()
        if keep_cache:
            fix = "call it without keep_cache (rollout.at_publish: continue or move)"
            raise EngineError("vLLM recomputes its caches after an update", fix=fix)
        async with self._state_lock:
            if self._asleep:
                message = "cannot update weights: the engine is asleep"
                raise EngineError(message, fix="call wake first")
            # Even for a cancelled caller: an update must not stop halfway.
            return await run_to_completion(self._update(weights, version, expected))

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        message = "vLLM has its own weights and cannot share a learner's"
        raise EngineError(message, fix="call update with the weights")

    async def sleep(self) -> None:
        """Frees the cache and moves the weights to host memory. Requests wait for `wake`."""
        self._client.check_open()
        if Capability.SLEEP not in self.capabilities:
            fix = "give the generators their own devices, or use infer.engine=native"
            raise EngineError("vLLM cannot sleep on the CPU: it would free nothing", fix=fix)
        async with self._state_lock:
            self._asleep = True
            self._update_may_run()
            await self._interrupt()
            await self._client.call(self._client.llm.sleep(level=1))

    async def wake(self) -> None:
        async with self._state_lock:
            self._client.check_open()
            await self._client.call(self._client.llm.wake_up())
            self._asleep = False
            self._update_may_run()

    def load(self) -> EngineLoad:
        """The last counts that vLLM reported. Other pending requests count as waiting."""
        pending, stats = len(self._pending), self._stats
        running = min(stats.running, pending)
        return EngineLoad(
            running=running,
            waiting=pending - running,
            slots=self._infer.slots,
            generated_tokens=stats.generated_tokens,
            busy_seconds=stats.busy_seconds,
            version=self._version,
            kv_tokens=stats.kv_tokens if pending else 0,
            kv_capacity=stats.kv_capacity,
            preempted=stats.preempted,
        )

    def check_alive(self) -> None:
        self._client.check_open()

    async def close(self) -> None:
        if not self._client.close():
            return
        tasks = self._fail_all(EngineError("the engine was closed while the request was pending"))
        if self._watcher is not None:
            self._watcher.cancel()
            tasks.append(self._watcher)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.shut_down()

    async def _run(self, request: VllmRequest) -> Completion:
        """Generate all segments of a request; waits while the engine is paused."""
        stop = self._limits.stop_before_start(request.request)
        while stop is None:
            await request.may_run.wait()
            stop = StopReason.ABORTED if request.aborted else await self._run_segment(request)
        return request.completion(stop)

    async def _run_segment(self, request: VllmRequest) -> StopReason | None:
        """Run one request to vLLM, generated by one version. Returns None if it was interrupted."""
        version, stop, uid = self._version, None, request.request.uid
        request.interrupted = False
        request.segment_ended.clear()
        request.segment_id = f"{uid}-{next(self._segment_numbers)}"
        started = perf_counter()
        try:
            with self._client.translate_errors(f"{uid}: vLLM failed"):
                inputs = self._segment_inputs(request)
                outputs = self._client.llm.generate(*inputs, request.segment_id)
                async with aclosing(outputs):
                    async for output in outputs:
                        request.record_times(started, output.metrics)
                        stop = self._add_output(request, output.outputs[0], version)
                        if stop is not None:
                            break
        finally:
            request.segment_id = None
            request.segment_ended.set()
        if stop is StopReason.ABORTED and request.interrupted and not request.aborted:
            return None
        if stop is None or (stop is StopReason.ABORTED and not request.aborted):
            raise EngineError(f"{uid}: vLLM ended the request without a reason")
        return stop

    def _add_output(self, request: VllmRequest, output: Any, version: int) -> StopReason | None:
        """Append new tokens; returns the stop reason if the segment ended."""
        uid, before = request.request.uid, len(request.token_ids)
        logprobs = output.logprobs.logprobs if output.logprobs is not None else []
        request.add(output.token_ids, logprobs, version)
        check_finite(np.asarray(request.logprobs[before:]), lambda _: uid, version=version)
        stop = _STOP_REASONS.get(output.finish_reason)
        if output.finish_reason is not None and stop is None:
            raise EngineError(f"{uid}: vLLM ended it with {output.finish_reason!r}")
        decode = self._limits.stops.decode
        if decode is not None and request.truncate_at_stop_string(decode, before):
            stop = StopReason.STOP
        self._subscribers.send(uid, *request.tokens_since(before))
        return stop

    def _segment_inputs(self, request: VllmRequest) -> tuple[Any, Any]:
        from rollick.infer.vllm.start import sampling_params, tokens_input

        prompt, sampling = request.request.token_ids, request.request.sampling
        generated = len(request.token_ids)
        params = sampling_params(
            sampling,
            max_new_tokens=self._limits.total_length(request.request) - len(prompt) - generated,
            generated=generated,
            stream=request.request.stream,
            stop_ids=self._limits.stops.stop_ids,
            incremental=request.request.uid in self._subscribers or bool(sampling.stop),
        )
        return tokens_input([*prompt.tolist(), *request.token_ids]), params

    def _update_may_run(self, *, is_reloading: bool = False) -> None:
        """Allow or block new segments, according to the engine's state."""
        self._may_run = not (is_reloading or self._paused or self._asleep)
        for request, _ in self._pending.values():
            if self._may_run or request.aborted:
                request.may_run.set()
            else:
                request.may_run.clear()

    async def _interrupt(self, *uids: SampleId) -> None:
        """Abort the segments of these requests (by default all); waits until they have returned
        their tokens."""
        requests = [self._pending[uid][0] for uid in uids or self._pending]
        for request in requests:
            request.interrupted = True
        async with self._client.deadline("return the running requests"):
            while running := [r for r in requests if r.segment_id is not None]:
                with self._client.translate_errors("vLLM failed"):
                    await self._client.llm.abort([request.segment_id for request in running])
                with suppress(TimeoutError):
                    async with asyncio.timeout(ABORT_RETRY_S):
                        for request in running:
                            await request.segment_ended.wait()

    async def _update(
        self, weights: WeightStream, version: PolicyVersion, expected: Fingerprint | None
    ) -> Fingerprint:
        staged, fingerprint = await asyncio.to_thread(stage_weights, weights, device="cpu")
        check_shapes(staged, dict(self._skeleton.named_parameters(remove_duplicate=False)))
        check_fingerprint(fingerprint, expected, version=version)
        with stage_file(sum(tensor.nbytes for _, tensor in staged)) as path:
            with translate_disk_errors():
                await asyncio.to_thread(write_bundle, staged, path)
            del staged
            rpc = self._client.llm.collective_rpc("rollick_file_fingerprint", args=(path,))
            received = await self._client.call(rpc)
            if any(digest != fingerprint for digest in received):
                raise WeightError(
                    f"version {version} reached vLLM's workers with fingerprints {received}, not "
                    f"{fingerprint}; the engine still serves version {self._version}",
                    fix="publish again; if it repeats, check the machine's memory",
                )
            await self._commit(path, version)
            return fingerprint

    async def _commit(self, path: str, version: PolicyVersion) -> None:
        """No segment runs while the weights change. After a failure the engine is lost, because it
        is unknown which of its tensors are new."""
        client, llm = self._client, self._client.llm
        self._update_may_run(is_reloading=True)
        try:
            await self._interrupt()
            await client.call(llm.pause_generation(mode="abort", clear_cache=True))
            await client.call(llm.collective_rpc("rollick_reload", args=(path,)))
            self._expected = await self._fingerprints()
            if not self._paused:
                await client.call(llm.resume_generation())
        except Exception as error:
            client.mark_lost(f"it failed while loading version {version}: {error}")
            client.check_open()
            raise
        self._version = version
        self._update_may_run()

    async def check_weights(self) -> None:
        """Compares vLLM's parameters with those of the first check or last update, but not its
        packed copies on a CPU."""
        async with self._state_lock:
            self._client.check_open()
            if self._asleep:
                return
            actual = await self._fingerprints()
            if self._expected is None:
                self._expected = actual
            if actual != self._expected:
                raise EngineCorrupt(
                    f"vLLM's weights of version {self._version} have changed: their fingerprints "
                    f"are {actual}, and were {self._expected}",
                    fix="check the device's memory if it happens again",
                )

    async def _fingerprints(self) -> Sequence[str]:
        return await self._client.call(self._client.llm.collective_rpc("rollick_fingerprint"))

    def _fail_all(self, error: RollickError) -> list[asyncio.Task[Any]]:
        """Fail the pending requests and cancel their tasks, which are returned. Skips the current
        task, which raises the error itself."""
        cancelled: list[asyncio.Task[Any]] = []
        for request, task in self._pending.values():
            request.failure = error.copy()
            if task is not asyncio.current_task():
                task.cancel()
                cancelled.append(task)
        return cancelled
