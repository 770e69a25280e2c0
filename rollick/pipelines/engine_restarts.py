"""Restarts lost engines in new processes with the current weights.

    lost -> new host and engine -> reconnect -> publish to it only -> Fleet.add

A host may outlive its engine (vLLM's process died or hangs); it is restarted like a dead host. A
host with other roles is replaced by WorkerRecovery, which gives the policy its state back.

One task watches each generator. The pipeline holds `RunState.weights_lock`
from the optimizer step to the end of the publish, while the learner's weights match no published
version. A restart publishes under the same lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollick.cluster.devices import HostSpec
from rollick.errors import EngineLost, RollickError
from rollick.infer.cancellation import cancel_tasks
from rollick.observe.faults import Fault, FaultLog
from rollick.pipelines.phases import Residency
from rollick.pipelines.state import RunState
from rollick.roles.engines import Generators
from rollick.roles.publisher import Publisher
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.rollout.scheduler import Rollout

LOG = logging.getLogger("rollick")


@dataclass(slots=True)
class EngineRestarter:
    generators: Generators
    publisher: Publisher
    state: RunState
    rollout: Rollout
    faults: FaultLog
    residency: Residency
    recovery: WorkerRecovery
    budget: int
    """Restarts left of engines with a dedicated host."""
    restarts: int = 0
    """Engines that were restarted successfully."""
    in_progress: int = 0

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[EngineRestarter]:
        """Watches the engines until the block ends."""
        ranks = range(self.generators.ranks)
        may_restart = lambda: any(self._may_restart(rank) for rank in ranks)  # noqa: E731
        self.rollout.fleet.may_gain_engine = self.publisher.may_gain_engine = may_restart
        tasks = [asyncio.create_task(self._watch(r), name=f"restart generator {r}") for r in ranks]
        try:
            yield self
        finally:
            await cancel_tasks(tasks)

    async def _watch(self, rank: int) -> None:
        try:
            await self._keep_alive(rank)
        except Exception as error:
            # Task boundary: an error here ends the run and is reported as its cause.
            self.rollout.fail(error)

    def _may_restart(self, rank: int) -> bool:
        """Whether the engine is restarted, or would be if it were lost."""
        if self.in_progress:
            return True
        if self.generators.has_dedicated_host(rank):
            return self.budget > 0
        return self.recovery.can_repair(self._host(rank))

    async def _keep_alive(self, rank: int) -> None:
        """Restart the engine each time it is lost, while the budget lasts."""
        fault: Fault | None = None
        while True:
            repairs = self.recovery.repairs_of(self._host(rank))
            await self.generators.engines[rank].lost_event.wait()
            fault = fault or self._record_loss(rank)
            if not self._may_restart(rank):
                fault.give_up("the restarts are used up (rollout.engine_restarts)")
                self._fail_if_none_left(rank)
                return
            self.in_progress += 1
            try:
                await self._restart(rank, fault, repairs)
                fault = None
            except RollickError as error:
                message = "generator %d could not be restarted (%d restarts left): %s"
                LOG.warning(message, rank, self.budget, error)
            finally:
                self.in_progress -= 1

    def _host(self, rank: int) -> HostSpec:
        return self.generators.group.device_map.host_of(self.generators.role, rank)

    def _record_loss(self, rank: int) -> Fault:
        engine = self.generators.engines[rank]
        cause = engine.failure.message if engine.failure else ""
        kind = engine.fault
        return self.faults.begin("generators", rank, kind=kind, cause=cause)

    async def _restart(self, rank: int, fault: Fault, repairs: int) -> None:
        if self.generators.has_dedicated_host(rank):
            self.budget -= 1
            await self.generators.restart(rank)
        else:
            failure = self.generators.engines[rank].failure
            assert failure is not None, "the engine is lost"
            await self.recovery.repair_host(self._host(rank), failure, repairs=repairs)
        fault.restarted()
        self.publisher.forget(rank)
        async with self.state.weights_lock:
            version = self.state.version
            engine = await self.generators.reconnect(rank)
            others = frozenset(range(self.generators.ranks)) - {rank}
            try:
                await self.publisher.publish(version, without=others)
            except RollickError as error:
                # The engine must not sample with old weights: mark it lost, so that it is retried.
                engine.mark_lost(error)
                raise
            await self.residency.restore_generator(rank)
            self.rollout.fleet.add(engine)
            fault.rejoined()
        self.restarts += 1
        LOG.warning("generator %d was restarted with version %d", rank, version)

    def _fail_if_none_left(self, rank: int) -> None:
        """End the run if the budget is spent, every engine is lost, and none is being restarted."""
        if self.in_progress or self.generators.alive:
            return
        failure = self.generators.engines[rank].failure
        lost = f"all {self.generators.ranks} engines are lost, and the restarts are used up; "
        fix = "check the log for why they die, or raise rollout.engine_restarts"
        self.rollout.fail(EngineLost(lost + (failure.message if failure else ""), fix=fix))
