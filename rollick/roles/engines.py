"""Handles of the roles that generate text (generators and judge) and of their engines.

A remote call costs more than decoding a token of a small model, so calls are batched, not made for
each sample. RemoteEngine sends all requests and aborts that arrived since the last `submit` in the
next. One `submit` is in flight at a time: two could arrive in the wrong order, and an abort that
arrives before its request would be lost. One `poll_results` is always in flight: a long poll that
returns all finished completions and the engine's load. Requests are numbered, so that a late result
does not end a newer request of the same sample.

    RemoteEngine.generate, abort --submit([...], [...])--> GeneratorWorker --> Engine
    RemoteEngine  <--poll_results() [completions], load--  GeneratorWorker

An engine is lost, permanently, when a submit, poll or health check fails, when it makes no
progress (engine_health.py), or when it reports that it died (its host may still be alive). Its
requests are rerouted, other calls to it end, and publishes skip it. `reconnect` replaces it with a
new engine of the same rank, on a restarted host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Self, TypeVar

from rollick.cluster.group import WorkerGroup
from rollick.errors import (
    EngineCorrupt,
    EngineError,
    EngineLost,
    RollickError,
    WeightError,
    WorkerError,
    WorkerLost,
)
from rollick.observe.faults import FaultKind, failure_time, fault_kind
from rollick.roles.calls import RoleHandle
from rollick.roles.engine_health import EngineHealth
from rollick.roles.protocols import (
    EngineDescription,
    GeneratorRole,
    NumberedRequest,
    RequestResult,
)
from rollick.roles.reports import EngineRecord
from rollick.types import (
    Completion,
    EngineLoad,
    PolicyVersion,
    Request,
    RoleName,
    SampleId,
    StopReason,
)
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import ProcessLocation

T = TypeVar("T")

RECORD_TIMEOUT_S = 10.0
"""Time for an engine to send its record; the record is empty if it does not."""
CLOSE_TIMEOUT_S = 20.0
"""Time for a lost engine to close before its host is restarted."""


@dataclass(slots=True, eq=False)
class _Outbox:
    """The contents of the next `submit`."""

    requests: dict[int, Request] = field(default_factory=dict[int, Request])
    aborts: list[int] = field(default_factory=list[int])
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the `submit` has returned or failed."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingRequest:
    number: int
    future: asyncio.Future[Completion]


_NUMBERS = count()
"""Unique numbers for the requests to all engines."""


class RemoteEngine:
    """Client of an Engine on a host. Created by `EngineGroup.connect`."""

    def __init__(
        self, handle: RoleHandle[GeneratorRole], rank: int, description: EngineDescription
    ) -> None:
        self.handle = handle
        self.rank = rank
        self.name = f"{'judge' if handle.role == 'judge' else 'generator'} {rank}"
        self.capabilities, self.last_load = description
        now = asyncio.get_running_loop().time
        self.health = EngineHealth(handle.role, rank, handle.group.deadlines, now)
        self.pending: dict[SampleId, _PendingRequest] = {}
        self.outbox = _Outbox()
        self.has_outgoing = asyncio.Event()
        self.failure: RollickError | None = None
        self.fault: FaultKind = "killed"
        """Kind of the failure."""
        self.failed_at: float | None = None
        """When the engine ended or last answered, if known."""
        self.host_answers = False
        """Whether the engine itself reported its loss, so that its host can close it."""
        self.lost_event = asyncio.Event()
        self.tasks = [
            asyncio.create_task(self._run(loop), name=f"{handle.role} {rank}")
            for loop in (self._send_requests, self._take_results)
        ]

    @property
    def lost(self) -> bool:
        return self.failure is not None

    async def generate(self, request: Request) -> Completion:
        self._check_connected()
        if request.uid in self.pending:
            raise EngineError(f"sample {request.uid} is already being generated")
        pending = _PendingRequest(next(_NUMBERS), asyncio.get_running_loop().create_future())
        self.pending[request.uid] = pending
        self.outbox.requests[pending.number] = request
        self.has_outgoing.set()
        try:
            return await pending.future
        except asyncio.CancelledError:
            # After a lost connection there is nothing to abort; raise the cancellation.
            with suppress(RollickError):
                await self.abort(request.uid)
            raise
        finally:
            self.pending.pop(request.uid, None)

    async def abort(self, uid: SampleId) -> None:
        """Returns when the engine has received the abort."""
        self._check_connected()
        pending, outbox = self.pending.get(uid), self.outbox
        if pending is None:
            return
        unsent = outbox.requests.pop(pending.number, None)
        if unsent is not None:
            self._deliver_result(RequestResult(pending.number, uid, aborted_completion(unsent)))
            return
        outbox.aborts.append(pending.number)
        self.has_outgoing.set()
        await outbox.submitted.wait()
        self._check_connected()

    def load(self) -> EngineLoad:
        return self.last_load

    async def health_check(self) -> None:
        """Marks the engine as lost if it does not answer in time."""
        try:
            await self.handle.call_rank(self.rank, GeneratorRole.describe)
        except RollickError as error:
            self.mark_lost(error)

    async def check_weights(self) -> None:
        """Raises EngineLost and marks the engine as lost if its weights are damaged, or if it does
        not answer."""
        self._check_connected()
        try:
            with self.health.expect_no_progress():
                await self.handle.call_rank(self.rank, GeneratorRole.check_weights)
        except RollickError as error:
            self.mark_lost(error)
        self._check_connected()

    async def take_record(self) -> EngineRecord:
        """The engine's record since the last call; empty if the engine does not respond."""
        try:
            take, limit_s = GeneratorRole.take_record, RECORD_TIMEOUT_S
            return await self.handle.call_rank(self.rank, take, timeout_s=limit_s)
        except RollickError:
            return EngineRecord([], [])

    async def disconnect(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.fail(WorkerError(f"the connection to {self.name} was closed"))

    def fail(self, error: RollickError) -> None:
        """Fail all pending and later requests with the error. Only the first failure is kept."""
        self.failure = self.failure or error
        self.lost_event.set()
        self.outbox.submitted.set()
        for pending in self.pending.values():
            if not pending.future.done():
                pending.future.set_exception(self.failure.copy())

    def mark_lost(self, error: Exception) -> None:
        """Fail all requests with an EngineLost that contains the reason; end all calls."""
        if not self.lost:
            self.fault = (
                fault_kind(error) if isinstance(error, WorkerLost | EngineCorrupt) else "killed"
            )
            self.failed_at = failure_time(error)
            self.host_answers = isinstance(error, EngineLost)
        reason, fix = f"{type(error).__name__}: {error}", ""
        if isinstance(error, RollickError):
            reason, fix = error.message, error.fix
        error_class = EngineCorrupt if isinstance(error, EngineCorrupt) else EngineLost
        self.fail(error_class(f"{self.name} is lost: {reason}", fix=fix))
        self.handle.group.abandon(self.handle.role, self.rank)

    async def _run(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except Exception as error:
            # This background task is not awaited, so pass the error to the pending requests.
            self.mark_lost(error)

    async def _send_requests(self) -> None:
        """Send the outbox, one `submit` at a time; later requests go in the next one."""
        while True:
            await self.has_outgoing.wait()
            self.has_outgoing.clear()
            outbox, self.outbox = self.outbox, _Outbox()
            requests = [NumberedRequest(*item) for item in outbox.requests.items()]
            try:
                if requests or outbox.aborts:
                    submit = GeneratorRole.submit
                    await self.handle.call_rank(self.rank, submit, requests, outbox.aborts)
            finally:
                outbox.submitted.set()

    async def _take_results(self) -> None:
        now = asyncio.get_running_loop().time
        while not self.lost:
            begun, limit_s = now(), self.health.poll_limit_s(self.last_load)
            poll = self.handle.call_rank(self.rank, GeneratorRole.poll_results, timeout_s=limit_s)
            results, self.last_load = await poll
            for result in results:
                self._deliver_result(result)
            seconds, has_requests = now() - begun, bool(self.pending)
            self.health.check_progress(self.last_load, seconds, has_requests=has_requests)

    def _deliver_result(self, finished: RequestResult) -> None:
        number, uid, result = finished
        if isinstance(result, EngineLost):
            self.mark_lost(result)
        pending = self.pending.get(uid)
        if pending is None or pending.number != number or pending.future.done():
            return
        if isinstance(result, RollickError):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)

    def _check_connected(self) -> None:
        if self.failure is not None:
            raise self.failure.copy()


class EngineGroup(RoleHandle[GeneratorRole]):
    """The engines of a role, such as the judge. `engines` is empty until `connect`, then it has one
    per rank."""

    def __init__(self, group: WorkerGroup, role: RoleName) -> None:
        super().__init__(group, role)
        self.engines: list[RemoteEngine] = []
        self._reconnected = asyncio.Event()

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Self]:
        descriptions = await self.call_all(GeneratorRole.describe)
        self.engines = [RemoteEngine(self, rank, each) for rank, each in enumerate(descriptions)]
        try:
            yield self
        finally:
            for engine in self.engines:
                await engine.disconnect()

    @property
    def alive(self) -> list[RemoteEngine]:
        return [engine for engine in self.engines if not engine.lost]

    @property
    def lost_ranks(self) -> frozenset[int]:
        return frozenset(engine.rank for engine in self.engines if engine.lost)

    async def sample(self, request: Request) -> Completion:
        """Generate a completion on the engine with the fewest requests in flight."""
        alive = self.alive
        if not alive:
            raise EngineLost(f"every {self.role} engine is lost", fix="read its host's log")
        return await min(alive, key=lambda engine: len(engine.pending)).generate(request)

    async def health_check(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self.alive:
                tasks.create_task(engine.health_check())

    def has_dedicated_host(self, rank: int) -> bool:
        """Whether no other role runs on the rank's host, so that the host can be restarted."""
        return self.group.has_dedicated_host(self.role, rank)

    async def restart(self, rank: int) -> None:
        """Restart the rank on a new host. Closes the old engine first if its host answers, so that
        none of its processes keeps the device."""
        if self.engines[rank].host_answers:
            with suppress(RollickError):
                await self.call_rank(rank, GeneratorRole.close, timeout_s=CLOSE_TIMEOUT_S)
        await self.group.restart(self.role, rank)

    async def reconnect(self, rank: int) -> RemoteEngine:
        """Replace a lost engine by the new engine of its restarted host."""
        description = await self.call_rank(rank, GeneratorRole.describe)
        old, self.engines[rank] = (self.engines[rank], RemoteEngine(self, rank, description))
        await old.disconnect()
        self._reconnected.set()
        return self.engines[rank]

    async def wait_for_engine(self, timeout_s: float) -> bool:
        """Wait until an engine is alive. Returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.alive:
                    self._reconnected.clear()
                    await self._reconnected.wait()
        except TimeoutError:
            return False
        return True


class Generators(EngineGroup):
    """The engines that sample the policy."""

    async def pause(self, rank: int) -> None:
        """Pause the engine between two decode steps. It keeps its requests."""
        self.engines[rank].health.is_paused = True
        await self.call_rank(rank, GeneratorRole.pause)

    async def resume(self, rank: int) -> None:
        await self.call_rank(rank, GeneratorRole.resume)
        self.engines[rank].health.is_paused = False

    async def sleep(self, rank: int) -> None:
        with self._expect_no_progress([rank]):
            await super().sleep(rank)

    async def wake(self, rank: int) -> None:
        with self._expect_no_progress([rank]):
            await super().wake(rank)

    async def process_location(self, rank: int) -> ProcessLocation:
        return await self.call_rank(rank, GeneratorRole.process_location)

    async def receive_weights(self, ranks: Collection[int], manifest: WeightManifest) -> None:
        """Receive and verify weights on each rank; `commit_weights` then activates them. Raises
        WeightError if ranks received different weights."""
        with self._expect_no_progress(ranks):
            manifests = self._values_by_rank(ranks, manifest)
            received = await self.scatter(GeneratorRole.receive, manifests)
        fingerprints = {rank: each for rank, each in enumerate(received) if each is not None}
        if len(set(fingerprints.values())) > 1:
            raise WeightError(
                f"generators received version {manifest.version} with different fingerprints: "
                f"{fingerprints}",
                fix="nothing was committed; publish again",
            )

    async def commit_weights(
        self, ranks: Collection[int], version: PolicyVersion, *, keep_cache: bool
    ) -> list[bool | None]:
        """Activate the received weights on each rank; for the result see GeneratorWorker.commit."""
        versions = self._values_by_rank(ranks, version)
        with self._expect_no_progress(ranks):
            results = await self.scatter(GeneratorRole.commit, versions, keep_cache)
        return [results[rank] for rank in ranks]

    async def commit_shared(
        self, ranks: Collection[int], version: PolicyVersion, *, keep_cache: bool
    ) -> None:
        """Set the new version on ranks whose engines share the learner's parameters."""
        versions = self._values_by_rank(ranks, version)
        with self._expect_no_progress(ranks):
            await self.scatter(GeneratorRole.commit_shared, versions, keep_cache)

    async def take_records(self) -> list[EngineRecord]:
        return await asyncio.gather(*(engine.take_record() for engine in self.alive))

    def _expect_no_progress(self, ranks: Collection[int]) -> ExitStack:
        stack = ExitStack()
        for rank in ranks:
            if rank < len(self.engines):
                stack.enter_context(self.engines[rank].health.expect_no_progress())
        return stack

    def _values_by_rank(self, ranks: Collection[int], value: T) -> list[T | None]:
        return [value if rank in ranks else None for rank in range(self.ranks)]


def aborted_completion(request: Request) -> Completion:
    """The result of a request that was aborted before it was sent to the engine."""
    if request.continue_from is not None:
        return request.continue_from
    empty = request.token_ids[:0]
    return Completion(request.uid, empty, empty.astype("float32"), empty, StopReason.ABORTED)
