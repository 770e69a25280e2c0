"""The judge of a run: a model on the device map, served to this run only.

judge role (engines) <- Gateway <- 127.0.0.1, token <- the reward `judge` in its processes

A lost engine is restarted, and its requests are made again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from rollick.config.schema import Recipe, RewardSpec
from rollick.data.chat import ChatCodec
from rollick.errors import EngineLost, MissingExtra
from rollick.infer.engine import Capability
from rollick.models.loading.load import load_end_ids, load_tokenizer
from rollick.observe.faults import FaultLog
from rollick.pipelines.engine_restarts import EngineRestarter
from rollick.roles.engines import EngineGroup
from rollick.roles.worker_recovery import WorkerRecovery
from rollick.types import Completion, Request

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
        if not spec.uses_judge:
            return spec
        address = {"url": self.base_url, "model": MODEL_NAME, "key_env": KEY_VARIABLE}
        return spec.model_copy(update={"options": spec.options | address})


@dataclass(slots=True)
class JudgeRestarter(EngineRestarter):
    """Gives the gateway access to the judge's engines."""

    budget_setting = "cluster.restarts"
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine was restarted, or when that was given up."""

    async def generate(self, request: Request) -> Completion:
        """On the engine with the fewest requests; again if that engine is lost."""
        while True:
            try:
                return await self.group.sample(request)
            except EngineLost:
                while not self.group.alive:
                    if not self.may_gain_engine():
                        raise
                    self.changed.clear()
                    await self.changed.wait()

    @contextmanager
    def activity(self, label: str, *, limit_s: float = 0.0) -> Generator[None]:
        yield

    async def rejoin(self, rank: int) -> None:
        await self.group.reconnect(rank)
        self.changed.set()

    def on_given_up(self, rank: int) -> None:
        self.changed.set()


@asynccontextmanager
async def open_judge(
    judge: EngineGroup, recipe: Recipe, recovery: WorkerRecovery, faults: FaultLog
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
            access=restarter,
            supports_top_p=all(truncated in engine.capabilities for engine in judge.engines),
        )
        async with run_server(gateway, ServeSettings()) as served:
            yield JudgeEndpoint(served.base_url, served.token)
