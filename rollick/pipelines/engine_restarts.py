"""Restarts lost engines in new processes; those of the policy get the current weights.

    lost -> new host and engine -> reconnect -> publish to it only -> Fleet.add

A host may outlive its engine (vLLM's process died or hangs); it is restarted like a dead host. A
host with other roles is replaced by WorkerRecovery, which gives the policy its state back.

One task watches each engine. The pipeline holds `RunState.weights_lock` from the optimizer step to
the end of the publish, while the learner's weights match no published version. A restart publishes
under the same lock.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Self

from rollick.cluster.devices import HostSpec
from rollick.errors import EngineLost, RollickError
from rollick.infer.cancellation import cancel_tasks
from rollick.observe.faults import Fault, FaultLog
from rollick.pipelines.phases import Residency
from rollick.pipelines.state import RunState
from rollick.roles.engines import EngineGroup, RemoteEngine
from rollick.roles.publisher import Publisher
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.rollout.scheduler import Rollout

LOG = logging.getLogger("rollick")


@dataclass(slots=True)
class EngineRestarter(ABC):
    """Restarts the lost engines of a role."""

    budget_setting: ClassVar[str]
    """The setting that gives the budget, for messages."""
    group: EngineGroup
    recovery: WorkerRecovery
    faults: FaultLog
    budget: int
    """Restarts left of engines with a dedicated host."""
    in_progress: int = field(default=0, init=False)
    given_up: set[int] = field(default_factory=set[int], init=False)
    """Ranks that are not restarted any more."""

    @abstractmethod
    async def rejoin(self, rank: int) -> None:
        """Use the engine of the new host."""

    @abstractmethod
    def on_given_up(self, rank: int) -> None:
        """Called when the engine is lost and is not restarted."""

    def on_error(self, rank: int, error: Exception) -> None:
        """Called when a bug ends the watch of an engine."""
        LOG.error("%s %d is not restarted any more", self.group.role, rank, exc_info=error)
        self.on_given_up(rank)

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[Self]:
        """Watches the engines until the block ends."""
        ranks, role = range(self.group.ranks), self.group.role
        tasks = [asyncio.create_task(self._watch(r), name=f"restart {role} {r}") for r in ranks]
        try:
            yield self
        finally:
            await cancel_tasks(tasks)

    def may_gain_engine(self) -> bool:
        """Whether an engine is restarted, or would be if it were lost."""
        return self.in_progress > 0 or any(map(self._may_restart, range(self.group.ranks)))

    def _may_restart(self, rank: int) -> bool:
        if rank in self.given_up:
            return False
        if self.group.has_dedicated_host(rank):
            return self.budget > 0
        return self.recovery.can_repair(self._host(rank))

    async def _watch(self, rank: int) -> None:
        try:
            await self._restart_while_allowed(rank)
        except Exception as error:  # Task boundary: nobody awaits this task.
            self.given_up.add(rank)
            self.on_error(rank, error)

    async def _restart_while_allowed(self, rank: int) -> None:
        """Restart the engine each time it is lost, while the budget lasts."""
        fault: Fault | None = None
        while True:
            engine, repairs = self.group.engines[rank], self.recovery.repairs_of(self._host(rank))
            await engine.lost_event.wait()
            failure, kind = engine.failure, engine.fault
            assert failure is not None, "a lost engine has a failure"
            fault = fault or self.faults.begin(
                *(self.group.role, rank),
                kind=kind,
                cause=failure.message,
                failed_at=engine.failed_at,
            )
            if not self._may_restart(rank):
                fault.give_up(f"the restarts are used up ({self.budget_setting})")
                self.given_up.add(rank)
                self.on_given_up(rank)
                return
            self.in_progress += 1
            try:
                await self._replace_host(rank, failure, repairs)
                fault.mark_restarted()
                await self.rejoin(rank)
                fault.mark_rejoined(lost=self.recovery.goodput.claim_lost_time())
                fault = None
            except RollickError as error:
                message = "%s could not be restarted (%d restarts left): %s"
                LOG.warning(message, engine.name, self.budget, error)
            finally:
                self.in_progress -= 1

    def _host(self, rank: int) -> HostSpec:
        return self.group.group.device_map.host_of(self.group.role, rank)

    async def _replace_host(self, rank: int, failure: RollickError, repairs: int) -> None:
        if self.group.has_dedicated_host(rank):
            self.budget -= 1
            await self.group.restart(rank)
        else:
            await self.recovery.repair_host(self._host(rank), failure, repairs=repairs)


@dataclass(slots=True)
class GeneratorRestarter(EngineRestarter):
    """Gives a new engine the current weights. Without a rollout, engines only validate."""

    budget_setting = "cluster.restarts"
    publisher: Publisher
    state: RunState
    residency: Residency
    restarts: int = field(default=0, init=False)
    """Engines that were restarted successfully."""

    def __post_init__(self) -> None:
        self.publisher.may_gain_engine = self.may_gain_engine

    async def rejoin(self, rank: int) -> None:
        self.publisher.forget(rank)
        async with self.state.weights_lock:
            version = self.state.version
            engine = await self.group.reconnect(rank)
            others = frozenset(range(self.group.ranks)) - {rank}
            try:
                await self.publisher.publish(version, without=others, in_background=True)
            except RollickError as error:
                # The engine must not sample with old weights: mark it lost, so that it is retried.
                engine.mark_lost(error)
                raise
            await self.residency.restore_generator(rank)
            self.on_rejoined(engine)
        self.restarts += 1
        LOG.warning("generator %d was restarted with version %d", rank, version)

    def on_rejoined(self, engine: RemoteEngine) -> None:
        """Called when the new engine has the current weights."""

    def on_given_up(self, rank: int) -> None:
        """A validation without engines raises."""


@dataclass(slots=True)
class RolloutRestarter(GeneratorRestarter):
    """Restarts the engines of a rollout."""

    budget_setting = "rollout.engine_restarts"
    rollout: Rollout

    def __post_init__(self) -> None:
        GeneratorRestarter.__post_init__(self)
        self.rollout.fleet.may_gain_engine = self.may_gain_engine

    def on_rejoined(self, engine: RemoteEngine) -> None:
        self.rollout.fleet.add(engine)

    def on_error(self, rank: int, error: Exception) -> None:
        self.rollout.fail(error)

    def on_given_up(self, rank: int) -> None:
        """End the run if the budget is spent, every engine is lost, and none is being restarted."""
        if self.in_progress or self.group.alive:
            return
        failure = self.group.engines[rank].failure
        lost = f"all {self.group.ranks} engines are lost, and the restarts are used up; "
        fix = "check the log for why they die, or raise rollout.engine_restarts"
        self.rollout.fail(EngineLost(lost + (failure.message if failure else ""), fix=fix))
