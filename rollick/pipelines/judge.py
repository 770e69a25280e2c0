"""The judge of a run: a model on the device map, served to this run only.

judge role (engines) <- Gateway <- 127.0.0.1, token <- the reward `judge` in its processes

A lost engine is restarted, and its requests are made again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from rollick.cluster.devices import HostSpec
from rollick.config.schema import Recipe, RewardSpec
from rollick.data.chat import ChatCodec
from rollick.errors import EngineLost, MissingExtra, RollickError
from rollick.infer.cancellation import cancel_tasks
from rollick.infer.engine import Capability
from rollick.models.loading.load import load_end_ids, load_tokenizer
from rollick.observe.faults import FaultLog
from rollick.roles.engines import Judge
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.types import Completion, Request

LOG = logging.getLogger("rollick")

KEY_VARIABLE = "ROLLICK_JUDGE_KEY"
MODEL_NAME = "judge"


@dataclass(frozen=True, slots=True)
class JudgeEndpoint:
    base_url: str
    token: str

    @property
    def secrets(self) -> Mapping[str, str]:
        return {KEY_VARIABLE: self.token}

    def with_address(self, spec: RewardSpec) -> RewardSpec:
        if not spec.asks_judge:
            return spec
        address = {"url": self.base_url, "model": MODEL_NAME, "key_env": KEY_VARIABLE}
        return spec.model_copy(update={"options": spec.options | address})


@dataclass(slots=True)
class JudgeRestarter:
    """Restarts lost engines of the judge."""

    judge: Judge
    recovery: WorkerRecovery
    faults: FaultLog
    budget: int
    """Restarts left of engines with a dedicated host."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine was restarted, or when that was given up."""

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[JudgeRestarter]:
        ranks = range(self.judge.ranks)
        tasks = [asyncio.create_task(self._keep_alive(r), name=f"restart judge {r}") for r in ranks]
        try:
            yield self
        finally:
            await cancel_tasks(tasks)

    async def generate(self, request: Request) -> Completion:
        """On the engine with the fewest requests; again if that engine is lost."""
        while True:
            self.changed.clear()
            try:
                return await self.judge.sample(request)
            except EngineLost:
                if not self._may_gain_engine():
                    raise
                await self.changed.wait()

    def _may_gain_engine(self) -> bool:
        return bool(self.judge.alive) or any(map(self._may_restart, range(self.judge.ranks)))

    def _may_restart(self, rank: int) -> bool:
        if self.judge.has_dedicated_host(rank):
            return self.budget > 0
        return self.recovery.can_repair(self._host(rank))

    def _host(self, rank: int) -> HostSpec:
        return self.judge.group.device_map.host_of(self.judge.role, rank)

    async def _keep_alive(self, rank: int) -> None:
        while True:
            engine, repairs = self.judge.engines[rank], self.recovery.repairs_of(self._host(rank))
            await engine.lost_event.wait()
            failure = engine.failure
            assert failure is not None, "a lost engine has a failure"
            kind = engine.fault
            fault = self.faults.begin("judge", rank, kind=kind, cause=failure.message)
            if not self._may_restart(rank):
                fault.give_up("the restarts are used up (cluster.restarts)")
                self.changed.set()
                return
            try:
                await self._restart(rank, failure, repairs)
                fault.rejoined()
            except RollickError as error:
                fault.give_up(error.message)
                LOG.warning("judge %d could not be restarted: %s", rank, error)
            self.changed.set()

    async def _restart(self, rank: int, failure: RollickError, repairs: int) -> None:
        if self.judge.has_dedicated_host(rank):
            self.budget -= 1
            await self.judge.restart(rank)
        else:
            await self.recovery.repair_host(self._host(rank), failure, repairs=repairs)
        await self.judge.reconnect(rank)


@dataclass(frozen=True, slots=True)
class JudgeAccess:
    """Gives the gateway access to the judge's engines."""

    restarter: JudgeRestarter

    async def generate(self, request: Request) -> Completion:
        return await self.restarter.generate(request)

    @contextmanager
    def activity(self, what: str, *, limit_s: float = 0.0) -> Generator[None]:
        yield


@asynccontextmanager
async def open_judge(
    judge: Judge, recipe: Recipe, recovery: WorkerRecovery, faults: FaultLog
) -> AsyncGenerator[JudgeEndpoint]:
    """Serve the judge's engines until the block ends."""
    try:
        from rollick.serve.gateway import Gateway
        from rollick.serve.server import ServeSettings, run_server
    except ImportError as error:  # Only a run with a judge needs the server.
        raise MissingExtra.of(error.name or "uvicorn", "serve") from error
    config, truncated = recipe.judge, Capability.TRUNCATED_SAMPLING
    assert config is not None
    codec = ChatCodec(load_tokenizer(config), config.template, end_of_turn_ids=load_end_ids(config))
    restarter = JudgeRestarter(judge, recovery, faults, recipe.cluster.restarts)
    async with judge.connect(), restarter.watch():
        gateway = Gateway(
            codec,
            model=MODEL_NAME,
            max_length=config.max_length,
            access=JudgeAccess(restarter),
            supports_top_p=all(truncated in engine.capabilities for engine in judge.engines),
        )
        async with run_server(gateway, ServeSettings()) as served:
            yield JudgeEndpoint(served.base_url, served.token)
