"""Phases of a step. Entering one pauses or wakes roles by its plan; its time is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rollick.cluster.devices import HostSpec, PhasePlan, RoleRank
from rollick.errors import EngineLost, PlacementError, WorkerError
from rollick.observe.faults import FaultLog
from rollick.observe.goodput import PHASE_STATES, TimeAccount
from rollick.observe.live_view import LiveView, Stopwatch
from rollick.observe.metrics import MetricLog
from rollick.observe.trace import Trace
from rollick.pipelines.memory import MemoryWatch
from rollick.pipelines.state import RunState
from rollick.pipelines.status import StatusReporter
from rollick.roles.handles import Roles
from rollick.roles.protocols import Role


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What records and shows the progress of a run."""

    log: MetricLog
    view: LiveView
    trace: Trace
    stopwatch: Stopwatch
    memory: MemoryWatch
    faults: FaultLog
    goodput: TimeAccount


class Residency:
    """Pauses generators and puts roles to sleep, as the plan of the current phase requires.

    The end of a phase resumes nothing; only the next plan does. So an engine that shares the
    learner's parameters stays paused from before the optimizer step until the commit.
    """

    def __init__(self, roles: Roles, plans: Mapping[str, PhasePlan]) -> None:
        self.roles = roles
        self.plans = plans
        self.paused: frozenset[int] = frozenset()
        self.asleep: frozenset[RoleRank] = frozenset()
        self._lock = asyncio.Lock()

    async def enter(self, phase: str) -> None:
        """Apply the plan of the phase: pause, offload, wake and resume. Skips lost generators."""
        if (plan := self.plans.get(phase)) is None:
            return
        roles, generators = self.roles, self.roles.generators
        pauses, asleep = frozenset(plan.pauses), frozenset(plan.sleeps)
        async with self._lock:
            await self._each(_generators(pauses - self.paused), lambda r: generators.pause(r.rank))
            await self._each(asleep - self.asleep, lambda r: roles.handle(r.role).sleep(r.rank))
            await self._each(self.asleep - asleep, lambda r: roles.handle(r.role).wake(r.rank))
            await self._each(_generators(self.paused - pauses), lambda r: generators.resume(r.rank))
            self.paused, self.asleep = pauses, asleep

    async def restore_roles(self, host: HostSpec) -> None:
        """Put the roles of a new process to sleep, where the phase requires it. Its generators are
        not connected yet."""
        for role_rank in host.role_ranks:
            if role_rank in self.asleep and role_rank.role != "generators":
                await self.roles.handle(role_rank.role).call_rank(role_rank.rank, Role.sleep)

    async def restore_generator(self, rank: int) -> None:
        """Pause a new engine and put it to sleep, where the phase requires it."""
        async with self._lock:
            if rank in self.paused:
                await self.roles.generators.pause(rank)
            if RoleRank("generators", rank) in self.asleep:
                await self.roles.generators.sleep(rank)

    async def _each(
        self, ranks: Set[RoleRank], call: Callable[[RoleRank], Coroutine[Any, Any, None]]
    ) -> None:
        """Call all ranks except lost generators concurrently; raises the first error. A generator
        that is lost meanwhile is left out, and so are ranks that a policy continues without."""
        generators = self.roles.generators
        ranks = ranks - _generators(generators.lost_ranks)

        async def call_unless_lost(rank: RoleRank) -> None:
            try:
                await call(rank)
            except PlacementError:
                if rank.rank < self.roles.device_map.ranks(rank.role):
                    raise
            except (WorkerError, EngineLost):
                if rank.role != "generators":
                    raise
                await generators.engines[rank.rank].health_check()
                if rank.rank not in generators.lost_ranks:
                    raise

        try:
            async with asyncio.TaskGroup() as tasks:
                for rank in sorted(ranks):
                    tasks.create_task(call_unless_lost(rank))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None


def _generators(ranks: Set[int]) -> frozenset[RoleRank]:
    return frozenset(RoleRank("generators", rank) for rank in ranks)


@dataclass(frozen=True, slots=True)
class Phases:
    state: RunState
    telemetry: Telemetry
    residency: Residency
    status: StatusReporter

    @asynccontextmanager
    async def enter(self, name: str) -> AsyncGenerator[None]:
        now = asyncio.get_running_loop().time
        begun = now()
        self.state.begin_phase(name)
        plan = self.residency.plans.get(name)
        for role in self.residency.roles.device_map.roles:
            is_used = plan is not None and role in plan.phase.uses
            self.telemetry.view.set_role_activity(role, name if is_used else "-")
        self.telemetry.view.begin_phase(name)
        try:
            with self.telemetry.goodput.during(PHASE_STATES.get(name, "train")):
                await self.residency.enter(name)
                with self.status.report_stuck():
                    yield
        finally:
            self.telemetry.stopwatch.add(name, now() - begun)
            self.telemetry.trace.record_phase(name, begun, now(), step=self.state.step + 1)


class HasPhases(Protocol):
    """An object with methods marked by `@phase`."""

    phases: Phases


H = TypeVar("H", bound=HasPhases)
P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[H, P], Coroutine[Any, Any, T]]


def phase(name: str) -> Callable[[Method[H, P, T]], Method[H, P, T]]:
    """Decorator that runs a method inside `self.phases.enter(name)`."""

    def mark(method: Method[H, P, T]) -> Method[H, P, T]:
        @wraps(method)
        async def run(self: H, *args: P.args, **kwargs: P.kwargs) -> T:
            async with self.phases.enter(name):
                return await method(self, *args, **kwargs)

        return run

    return mark
