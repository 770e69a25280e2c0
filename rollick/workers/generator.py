"""The generator: an engine on a host, and the controller's end of the line to it.

Calls between processes cost more than a token of a small model, so neither side makes one per
sample: RemoteEngine gathers the requests of one turn of the event loop into one `submit`, and
keeps one `drain` under way, which answers with all completions that are ready and the engine's
load.

    RemoteEngine.generate --submit([...])--> GeneratorWorker --> Engine.generate
    RemoteEngine  <--drain() [completions], load--  GeneratorWorker

A line that breaks makes the engine lost, for good: what it had goes to others, and what is
published is published without it. So does an engine that says of itself that it is lost, such as
one whose own process died, although its host lives on. Another engine may take its rank
(`replace_engine`), in a host that was restarted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from rollick.cluster.group import WorkerGroup
from rollick.cluster.worker import HostContext
from rollick.config.names import resolve
from rollick.config.schema import InferConfig, Recipe
from rollick.data.chat import ChatCodec
from rollick.errors import EngineError, EngineLost, RollickError, WorkerError
from rollick.infer.engine import CanBeLost, Capability, Engine, Merges, RecordsSteps, WeightStream
from rollick.models.load import load_end_ids, load_tokenizer
from rollick.types import (
    Completion,
    EngineLoad,
    Fingerprint,
    PolicyVersion,
    Request,
    RoleName,
    SampleId,
    StepRecord,
    StopReason,
)
from rollick.weights.here import place_here
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Place
from rollick.weights.receive import WeightReceiver
from rollick.workers.learner import LearnerWorker
from rollick.workers.memory import Meter

DRAIN_S = 20.0
"""A drain with nothing ready answers empty after this long, so that no call is unbounded."""
ANSWER_S = 10.0
"""A host that gives no sign of life within this time is lost."""

RECORDED = 4096
"""Steps and answers that a recording host keeps until it is asked for them; older ones go."""

Described = tuple[frozenset[Capability], EngineLoad]
Drained = tuple[list[tuple[SampleId, Completion | RollickError]], EngineLoad]


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What an engine did since it was last asked; see observe.engine_steps."""

    steps: list[StepRecord]
    answers: list[tuple[SampleId, float]]
    """Each answer, and the seconds that the engine had it."""


class GeneratorWorker:
    """The generators role of a host: an engine whose results wait to be drained."""

    def __init__(
        self,
        engine: Engine,
        *,
        rank: int = 0,
        shares: bool = False,
        meter: Meter | None = None,
    ) -> None:
        """`shares`: whether the engine uses the learner's own parameters."""
        self.meter = meter or Meter()
        self.engine = engine
        self.shares = shares
        self.lost: EngineLost | None = None
        """What the engine said when it was lost; it is never asked for anything again."""
        self.ready: list[tuple[SampleId, Completion | RollickError]] = []
        self.arrived = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.unstarted: set[SampleId] = set()
        adopts = Capability.ADOPTS_WEIGHTS in engine.capabilities
        self.merges = Capability.MERGES_ADAPTERS in engine.capabilities
        loaded = engine.fingerprint if self.merges and isinstance(engine, Merges) else None
        self.receiver = WeightReceiver(rank=rank, adopts=adopts, loaded=loaded)
        self.receiving = asyncio.Lock()
        self.answers: deque[tuple[SampleId, float]] | None = None

    def record(self) -> None:
        """From now on keep what `take_record` gives; an engine may have no steps to tell of."""
        self.answers = deque(maxlen=RECORDED)
        if isinstance(self.engine, RecordsSteps):
            self.engine.record_steps(RECORDED)

    async def take_record(self) -> EngineRecord:
        """What was recorded since the last call."""
        steps = self.engine.take_steps() if isinstance(self.engine, RecordsSteps) else []
        answers = list(self.answers or ())
        if self.answers is not None:
            self.answers.clear()
        return EngineRecord(steps, answers)

    async def describe(self) -> Described:
        """Also the sign of life: raises EngineLost if the engine is gone."""
        self._check_alive()
        return self.engine.capabilities, self.engine.load()

    async def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.unstarted.add(request.uid)
            task = asyncio.create_task(self._run(request))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def drain(self) -> Drained:
        """Waits for a result (at most DRAIN_S) and gives all there are; raises EngineLost if there
        are none, and the engine is gone."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.arrived.wait(), DRAIN_S)
        ready, self.ready = self.ready, []
        self.arrived.clear()
        if not ready:
            self._check_alive()
        return ready, self.engine.load()

    async def abort(self, uids: Sequence[SampleId]) -> None:
        for uid in uids:
            # The engine does not know a request whose task has not had its first turn.
            self.unstarted.discard(uid)
            with self._noting_loss():
                await self.engine.abort(uid)

    async def pause(self) -> None:
        with self._noting_loss():
            await self.engine.pause()

    async def resume(self) -> None:
        with self._noting_loss():
            await self.engine.resume()

    async def peak_memory(self) -> int:
        """Bytes that this process held at the most since the role began to be built."""
        return self.meter.peak()

    async def place(self) -> Place:
        return place_here(shares=self.shares, adapters=self.merges)

    async def receive(self, manifest: WeightManifest) -> None:
        """Transfer and verify: keeps the weights for `commit` if the bytes are right."""
        async with self.receiving:
            work = asyncio.ensure_future(asyncio.to_thread(self.receiver.receive, manifest))
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                # A thread cannot be stopped: who receives next waits until this one has ended.
                await asyncio.wait([work])
                raise

    async def commit(self, version: PolicyVersion, keep_cache: bool = False) -> bool | None:
        """Whether the engine now lives in the memory that was offered; None if that is as before,
        because a part of the weights was taken."""
        weights = self.receiver.take(version)
        with self._noting_loss():
            await self.engine.update(weights, version, weights.fingerprint, keep_cache=keep_cache)
        self.receiver.committed(weights)
        return weights.lasting if weights.base is None else None

    async def commit_shared(self, version: PolicyVersion, keep_cache: bool = False) -> None:
        with self._noting_loss():
            await self.engine.commit_shared(version, keep_cache=keep_cache)

    async def sleep(self) -> None:
        with self._noting_loss():
            await self.engine.sleep()

    async def wake(self) -> None:
        with self._noting_loss():
            await self.engine.wake()

    async def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.engine.close()

    async def _run(self, request: Request) -> None:
        result: Completion | RollickError
        try:
            if request.uid in self.unstarted:
                self.unstarted.discard(request.uid)
                with self._noting_loss():
                    result = await self.engine.generate(request)
            else:
                result = _nothing_drawn(request)
        except RollickError as error:
            result = error
        except Exception as error:
            # The worker's boundary: the caller waits for an answer, whatever the engine raised.
            result = EngineError(f"the engine failed: {type(error).__name__}: {error}")
        if self.answers is not None and isinstance(result, Completion):
            self.answers.append((request.uid, result.seconds))
        self.ready.append((request.uid, result))
        self.arrived.set()

    def _check_alive(self) -> None:
        if self.lost is None and isinstance(self.engine, CanBeLost):
            with self._noting_loss():
                self.engine.check_alive()
        if self.lost is not None:
            raise _again(self.lost)

    @contextmanager
    def _noting_loss(self) -> Generator[None]:
        try:
            yield
        except EngineLost as error:
            self.lost = self.lost or error
            raise


class RemoteEngine:
    """An Engine whose real one lives on a host. Open it with `open_engine`."""

    def __init__(
        self,
        group: WorkerGroup,
        rank: int,
        capabilities: frozenset[Capability],
        load: EngineLoad,
        *,
        role: RoleName = "generators",
    ) -> None:
        self.group = group
        self.role: RoleName = role
        self.rank = rank
        self.capabilities = capabilities
        self.waiting: dict[SampleId, asyncio.Future[Completion]] = {}
        self.outbox: list[Request] = []
        self.outgoing = asyncio.Event()
        self.snapshot = load
        self.broken: RollickError | None = None
        self.gone = asyncio.Event()
        """Set when it is lost."""
        self.lines: list[asyncio.Task[None]] = []

    @property
    def lost(self) -> bool:
        return self.broken is not None

    async def generate(self, request: Request) -> Completion:
        self._check()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if request.uid in self.waiting:
            raise EngineError(f"sample {request.uid} is already being generated")
        self.waiting[request.uid] = future
        self.outbox.append(request)
        self.outgoing.set()
        try:
            return await future
        except asyncio.CancelledError:
            # A line that broke has ended the request too; the caller's cancellation is the news.
            with suppress(RollickError):
                await self.abort(request.uid)
            raise
        finally:
            self.waiting.pop(request.uid, None)

    async def abort(self, uid: SampleId) -> None:
        unsent = [request for request in self.outbox if request.uid == uid]
        if unsent:
            self.outbox.remove(unsent[0])
            self._settle(uid, _nothing_drawn(unsent[0]))
        else:
            await self._call("abort", [uid])

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def update(
        self,
        weights: WeightStream,
        version: PolicyVersion,
        expected: Fingerprint | None = None,
        *,
        keep_cache: bool = False,
    ) -> Fingerprint:
        raise EngineError(
            "weights do not travel through this object", fix="publish with weights.sync.Publisher"
        )

    async def commit_shared(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        await self._call("commit_shared", version, keep_cache)

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    def load(self) -> EngineLoad:
        return self.snapshot

    async def close(self) -> None:
        """The host closes the engine."""

    async def send_requests(self) -> None:
        """Consumes the outbox for ever; one call for all requests of a turn of the loop."""
        while True:
            await self.outgoing.wait()
            self.outgoing.clear()
            batch, self.outbox = self.outbox, []
            if batch:
                await self._call("submit", batch)

    async def take_results(self) -> None:
        """Drains for ever and settles the pending generates."""
        # A drain waits by itself, which must not count as work that takes too long.
        limit_s = DRAIN_S + self.group.call_timeout_s
        while not self.lost:
            drained: Drained = await self.group.call(
                self.role, "drain", rank=self.rank, timeout_s=limit_s
            )
            results, self.snapshot = drained
            for uid, result in results:
                self._settle(uid, result)

    def fail(self, error: RollickError) -> None:
        """End all that waits, and all that comes later, with the error; the first one stays."""
        self.broken = self.broken or error
        self.gone.set()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(_again(self.broken))

    def lose(self, error: Exception) -> None:
        """It is gone: end everything with an EngineLost that says why."""
        why, fix = f"{type(error).__name__}: {error}", ""
        if isinstance(error, RollickError):
            why, fix = error.message, error.fix
        name = "generator" if self.role == "generators" else self.role
        self.fail(EngineLost(f"{name} {self.rank} is lost: {why}", fix=fix))

    def _settle(self, uid: SampleId, result: Completion | RollickError) -> None:
        if isinstance(result, EngineLost):
            self.lose(result)
        future = self.waiting.get(uid)
        if future is None or future.done():
            return
        if isinstance(result, RollickError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _check(self) -> None:
        if self.broken is not None:
            raise _again(self.broken)

    async def _call(self, method: str, *args: Any) -> Any:
        self._check()
        try:
            return await self.group.call(self.role, method, *args, rank=self.rank)
        except EngineLost as error:
            self.lose(error)
            raise


@asynccontextmanager
async def open_engines(
    group: WorkerGroup, role: RoleName = "generators"
) -> AsyncGenerator[list[RemoteEngine]]:
    """The controller's ends of all engines of a role. A line that breaks fails what waits on it."""
    described = await group.broadcast(role, "describe")
    engines = [_open_line(group, rank, about, role=role) for rank, about in enumerate(described)]
    try:
        yield engines
    finally:
        for engine in engines:
            await _close_line(engine)


async def replace_engine(engines: list[RemoteEngine], rank: int) -> RemoteEngine:
    """The end of the line to a host that was restarted takes the place of the one that is lost."""
    group = engines[rank].group
    about = await group.call("generators", "describe", rank=rank)
    old, engines[rank] = engines[rank], _open_line(group, rank, about)
    await _close_line(old)
    return engines[rank]


def _open_line(
    group: WorkerGroup, rank: int, about: Described, *, role: RoleName = "generators"
) -> RemoteEngine:
    engine = RemoteEngine(group, rank, *about, role=role)
    for loop in (engine.send_requests, engine.take_results):
        line = asyncio.create_task(_line(engine, loop), name=f"{role} {rank}")
        engine.lines.append(line)
    return engine


async def _close_line(engine: RemoteEngine) -> None:
    for line in engine.lines:
        line.cancel()
    await asyncio.gather(*engine.lines, return_exceptions=True)
    engine.fail(WorkerError(f"the line to generator {engine.rank} was closed"))


async def _line(engine: RemoteEngine, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception as error:
        # The boundary of a background task: who waits on the line must learn that it is gone.
        engine.lose(error)


def lost_ranks(engines: Iterable[RemoteEngine]) -> frozenset[int]:
    """The generators that are known to be lost."""
    return frozenset(engine.rank for engine in engines if engine.lost)


async def take_records(engines: Iterable[RemoteEngine]) -> list[EngineRecord]:
    """What each engine recorded since the last call; nothing from one that does not answer."""

    async def take(engine: RemoteEngine) -> EngineRecord:
        try:
            return await engine.group.call(
                "generators", "take_record", rank=engine.rank, timeout_s=ANSWER_S
            )
        except RollickError:
            return EngineRecord([], [])

    return await asyncio.gather(*(take(engine) for engine in engines if not engine.lost))


async def ask_for_life(engines: Iterable[RemoteEngine]) -> None:
    """Waits for a sign of life of every engine; those that give none in time are lost."""

    async def ask(engine: RemoteEngine) -> None:
        try:
            await engine.group.call("generators", "describe", rank=engine.rank, timeout_s=ANSWER_S)
        except RollickError as error:
            engine.lose(error)

    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            if not engine.lost:
                tasks.create_task(ask(engine))


def _again(error: RollickError) -> RollickError:
    """One instance for each who waits: a raised error collects the traceback of its reader."""
    return type(error)(error.message, fix=error.fix)


def _nothing_drawn(request: Request) -> Completion:
    if request.continue_from is not None:
        return request.continue_from
    empty = request.token_ids[:0]
    return Completion(request.uid, empty, empty.astype("float32"), empty, StopReason.ABORTED)


def create(context: HostContext, rank: int, recipe: Recipe) -> GeneratorWorker:
    """Build the engine on its host; with a learner there, over the learner's parameters."""
    meter = Meter()
    torch.set_num_threads(context.threads)
    learner = context.roles.get("policy")
    shared = learner.strategy.module if isinstance(learner, LearnerWorker) else None
    codec = ChatCodec(
        load_tokenizer(recipe.model),
        recipe.model.template,
        end_of_turn_ids=load_end_ids(recipe.model),
    )
    engine = resolve("engines", recipe.infer.engine).create(
        recipe.infer,
        recipe.model,
        device=context.device,
        deterministic=recipe.run.deterministic,
        shared=shared,
        stop_ids=codec.stop_ids,
        decode=codec.decode,
    )
    sharing = shared is not None and Capability.SHARED_WEIGHTS in engine.capabilities
    worker = GeneratorWorker(engine, rank=rank, shares=sharing, meter=meter)
    if recipe.observe.engine_steps:
        worker.record()
    return worker


def create_judge(context: HostContext, rank: int, recipe: Recipe) -> GeneratorWorker:
    """Build the judge's engine on its host: a model of its own, which never changes."""
    meter = Meter()
    torch.set_num_threads(context.threads)
    judge = recipe.judge
    assert judge is not None
    codec = ChatCodec(load_tokenizer(judge), judge.template, end_of_turn_ids=load_end_ids(judge))
    infer = InferConfig(slots=judge.slots, max_length=judge.max_length)
    engine = resolve("engines", infer.engine).create(
        infer, judge, device=context.device, stop_ids=codec.stop_ids, decode=codec.decode
    )
    return GeneratorWorker(engine, rank=rank, meter=meter)
