"""The generator: an inference engine on a host. Results wait until the controller polls them
(roles/engines.py)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import InferConfig, ModelConfig, Recipe, RlRecipe
from rollick.data.chat import ChatCodec
from rollick.errors import EngineError, EngineLost, RollickError
from rollick.infer.cancellation import run_to_completion
from rollick.infer.engine import (
    Capability,
    Engine,
    StopRules,
    SupportsAdapterMerging,
    SupportsHealthCheck,
    SupportsInPlaceUpdate,
    SupportsStepRecords,
    SupportsWeightCheck,
)
from rollick.models.loading.load import load_end_ids, load_tokenizer
from rollick.roles.engines import aborted_completion
from rollick.roles.protocols import (
    POLL_TIMEOUT_S,
    EngineDescription,
    GeneratorRole,
    NumberedRequest,
    PolledResults,
    RequestResult,
)
from rollick.roles.reports import EngineRecord
from rollick.types import Completion, Fingerprint, PolicyVersion, Request, SampleId
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import ProcessLocation, process_location
from rollick.weights.receiver import PublishReceiver
from rollick.workers.learner import LearnerWorker
from rollick.workers.model_worker import MeteredWorker, builds_worker

MAX_RECORDS = 4096
"""Steps and completions that a recording generator keeps; it drops the oldest first."""


@dataclass(slots=True, eq=False)
class _EngineJob:
    """A request between its submit and its result."""

    request: Request
    has_started: bool = False
    """Whether the engine has the request, so that it can abort it."""
    is_aborted: bool = False
    abort_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class GeneratorWorker(MeteredWorker, GeneratorRole):
    def __init__(self, engine: Engine, *, rank: int = 0, shares: bool = False) -> None:
        """`shares`: whether the engine uses the learner's own parameters."""
        super().__init__()
        self.engine = engine
        self.shares = shares
        self.lost: EngineLost | None = None
        """Why the engine is lost; it is not used afterwards."""
        self.ready: list[RequestResult] = []
        self.has_results = asyncio.Event()
        self.jobs: dict[int, _EngineJob] = {}
        self.tasks: dict[SampleId, asyncio.Task[None]] = {}
        """The task of each sample's latest request."""
        adopts = Capability.ADOPT_WEIGHTS in engine.capabilities
        self.merges = Capability.MERGE_ADAPTERS in engine.capabilities
        initial = engine.fingerprint if isinstance(engine, SupportsAdapterMerging) else None
        self.receiver = PublishReceiver(rank=rank, adopts=adopts, initial_fingerprint=initial)
        self.receive_lock = asyncio.Lock()
        self.checked_tokens = 0
        """Tokens that the engine had generated when its weights were last checked."""
        self.answers: deque[tuple[SampleId, float]] = deque(maxlen=0)
        """The completed requests, and the seconds that each took."""

    def record(self) -> None:
        """Start recording for `take_record`. Not every engine records steps."""
        self.answers = deque(maxlen=MAX_RECORDS)
        if isinstance(self.engine, SupportsStepRecords):
            self.engine.record_steps(MAX_RECORDS)

    async def take_record(self) -> EngineRecord:
        steps = self.engine.take_steps() if isinstance(self.engine, SupportsStepRecords) else []
        answers = list(self.answers)
        self.answers.clear()
        return EngineRecord(steps, answers)

    async def describe(self) -> EngineDescription:
        self._check_alive()
        return EngineDescription(self.engine.capabilities, self.engine.load())

    async def submit(
        self, requests: Sequence[NumberedRequest], abort_numbers: Sequence[int]
    ) -> None:
        for number, request in requests:
            job = self.jobs[number] = _EngineJob(request)
            previous = self.tasks.get(request.uid)
            self.tasks[request.uid] = asyncio.create_task(self._run(number, job, previous))
        await asyncio.gather(*(self._abort(number) for number in abort_numbers))

    async def poll_results(self) -> PolledResults:
        """Return all finished results; waits up to POLL_TIMEOUT_S for one. Raises EngineLost if
        there is none and the engine died."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.has_results.wait(), POLL_TIMEOUT_S)
        ready, self.ready = self.ready, []
        self.has_results.clear()
        if not ready:
            self._check_alive()
        return PolledResults(ready, self.engine.load())

    async def pause(self) -> None:
        with self._record_loss():
            await self.engine.pause()

    async def resume(self) -> None:
        with self._record_loss():
            await self.engine.resume()

    async def process_location(self) -> ProcessLocation:
        return process_location(shares_weights=self.shares, merges_adapters=self.merges)

    async def check_weights(self) -> None:
        """Raises EngineCorrupt if the engine's weights have changed since their last update. Does
        nothing if the engine has generated nothing since the last check."""
        self._check_alive()
        tokens = self.engine.load().generated_tokens
        if tokens == self.checked_tokens or not isinstance(self.engine, SupportsWeightCheck):
            return
        with self._record_loss():
            await self.engine.check_weights()
        self.checked_tokens = tokens

    async def receive(self, manifest: WeightManifest) -> Fingerprint:
        # After the weights are replaced, a corruption can no longer be detected.
        await self.check_weights()
        async with self.receive_lock:
            targets = None
            if manifest.in_place and isinstance(self.engine, SupportsInPlaceUpdate):
                targets = await self.engine.begin_update([each.name for each in manifest.layout])
            # A thread cannot be cancelled, so hold the lock until it ends.
            receiving = asyncio.to_thread(self.receiver.receive, manifest, targets)
            return await run_to_completion(receiving)

    async def commit(self, version: PolicyVersion, keep_cache: bool = False) -> bool | None:
        weights = self.receiver.take(version)
        digest = weights.fingerprint
        with self._record_loss():
            if weights.in_place:
                assert isinstance(self.engine, SupportsInPlaceUpdate)
                await self.engine.finish_update(version, digest, keep_cache=keep_cache)
            else:
                await self.engine.update(weights, version, digest, keep_cache=keep_cache)
        self.receiver.synchronize(weights)
        return weights.persistent if weights.base_fingerprint is None else None

    async def commit_shared(self, version: PolicyVersion, keep_cache: bool = False) -> None:
        with self._record_loss():
            await self.engine.commit_shared(version, keep_cache=keep_cache)

    async def sleep(self) -> None:
        with self._record_loss():
            await self.engine.sleep()

    async def wake(self) -> None:
        with self._record_loss():
            await self.engine.wake()

    async def close(self) -> None:
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engine.close()

    async def _abort(self, number: int) -> None:
        job = self.jobs.get(number)
        if job is None:  # Its result is ready or already returned.
            return
        job.is_aborted = True
        if job.has_started:
            async with job.abort_lock:
                with self._record_loss():
                    await self.engine.abort(job.request.uid)

    async def _run(self, number: int, job: _EngineJob, previous: asyncio.Task[None] | None) -> None:
        """Run a request. Waits for the sample's previous request, which was aborted: an engine
        refuses two requests of one sample."""
        request = job.request
        try:
            if previous is not None:
                await previous
            result = await self._generate(job)
            async with job.abort_lock:  # The abort must not reach the sample's next request.
                pass
        finally:
            del self.jobs[number]
            if self.tasks[request.uid] is asyncio.current_task():
                del self.tasks[request.uid]
        if isinstance(result, Completion):
            self.answers.append((request.uid, result.seconds))
        self.ready.append(RequestResult(number, request.uid, result))
        self.has_results.set()

    async def _generate(self, job: _EngineJob) -> Completion | RollickError:
        if job.is_aborted:
            return aborted_completion(job.request)
        job.has_started = True
        try:
            with self._record_loss():
                return await self.engine.generate(job.request)
        except RollickError as error:
            return error
        except Exception as error:
            # The caller must get a result for every error that the engine raises.
            return EngineError(f"the engine failed: {type(error).__name__}: {error}")

    def _check_alive(self) -> None:
        if self.lost is None and isinstance(self.engine, SupportsHealthCheck):
            with self._record_loss():
                self.engine.check_alive()
        if self.lost is not None:
            raise self.lost.copy()

    @contextmanager
    def _record_loss(self) -> Generator[None]:
        try:
            yield
        except EngineLost as error:
            self.lost = self.lost or error
            raise


@builds_worker
def create(context: HostContext, rank: int, recipe: Recipe) -> GeneratorWorker:
    """Build the engine, which shares the parameters of a learner on the same host if it can."""
    learner = context.roles.get("policy")
    shared = learner.strategy.module if isinstance(learner, LearnerWorker) else None
    engine = resolve("engines", recipe.infer.engine).create(
        recipe.infer,
        recipe.model,
        device=context.device,
        deterministic=recipe.run.deterministic,
        shared=shared,
        stops=_stop_rules(recipe.model),
    )
    shares = shared is not None and Capability.SHARED_WEIGHTS in engine.capabilities
    worker = GeneratorWorker(engine, rank=rank, shares=shares)
    if isinstance(recipe, RlRecipe) and recipe.observe.engine_steps:
        worker.record()
    return worker


@builds_worker
def create_judge(context: HostContext, rank: int, recipe: Recipe) -> GeneratorWorker:
    """Build the judge's engine, whose weights never change."""
    judge = recipe.judge
    assert judge is not None
    infer = InferConfig(slots=judge.slots, max_length=judge.max_length)
    create_engine = resolve("engines", infer.engine).create
    engine = create_engine(infer, judge, device=context.device, stops=_stop_rules(judge))
    return GeneratorWorker(engine, rank=rank)


def _stop_rules(model: ModelConfig) -> StopRules:
    tokenizer, end_ids = load_tokenizer(model), load_end_ids(model)
    codec = ChatCodec(tokenizer, model.template, end_of_turn_ids=end_ids)
    return StopRules(tuple(codec.stop_ids), codec.decode)
