"""Engines that come back: a lost generator gets a new process, the current weights, and then work.

    lost -> a new host, its engine built -> its line opened -> published to alone -> Fleet.add

A host may outlive its engine (vLLM's own process died, or hangs). It is restarted like a dead one;
before that the engine is closed, so that no process of it keeps the device.

Owns the budget of restarts and one task for each generator that has its process for itself. The
learner's weights are those of the session's version only outside the optimizer step and the publish
after it, so the pipeline holds `Session.changing` there, and a publish to one engine waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from rollick.errors import EngineLost, RollickError
from rollick.pipelines.base import Session
from rollick.rollout.scheduler import Rollout
from rollick.workers.generator import lost_ranks, replace_engine

LOG = logging.getLogger("rollick")

CLOSE_S = 20.0
"""A lost engine whose host lives may take this long to close; then the host is restarted anyway."""


class Revival:
    """Restarts lost engines of a rollout. Made by `open`."""

    def __init__(self, session: Session, rollout: Rollout) -> None:
        self.restarts = 0
        """Engines that came back."""
        self._session = session
        self._rollout = rollout
        self._left = session.recipe.rollout.engine_restarts
        self._under_way = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, session: Session, rollout: Rollout) -> AsyncGenerator[Revival]:
        """Looks after the engines until the block ends."""
        revival = cls(session, rollout)
        ranks = [engine.rank for engine in session.engines]
        alone = [rank for rank in ranks if session.group.stands_alone("generators", rank)]
        rollout.fleet.expects_more = lambda: bool(alone) and revival._goes_on
        tasks = [
            asyncio.create_task(revival._look_after(rank), name=f"revive generator {rank}")
            for rank in alone
        ]
        try:
            yield revival
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _goes_on(self) -> bool:
        return self._left > 0 or self._under_way > 0

    async def _look_after(self, rank: int) -> None:
        try:
            await self._keep(rank)
        except Exception as error:
            # The boundary of a task: what goes wrong here ends the run, as its root cause.
            self._rollout.fail(error)

    async def _keep(self, rank: int) -> None:
        """Waits for the loss of an engine, and brings it back, while the budget lasts."""
        while True:
            await self._session.engines[rank].gone.wait()
            if not self._left:
                self._give_up(rank)
                return
            self._left -= 1
            self._under_way += 1
            try:
                await self._revive(rank)
            except RollickError as error:
                LOG.warning(
                    "generator %d could not be restarted (%d restarts are left): %s",
                    rank,
                    self._left,
                    error,
                )
            finally:
                self._under_way -= 1

    async def _revive(self, rank: int) -> None:
        session = self._session
        with suppress(RollickError):
            await session.group.call("generators", "close", rank=rank, timeout_s=CLOSE_S)
        await session.group.restart("generators", rank)
        session.publisher.forget(rank)
        async with session.changing:
            engine = await replace_engine(session.engines, rank)
            others = frozenset(range(len(session.engines))) - {rank}
            try:
                await session.publisher.publish(session.version, without=others)
            except RollickError as error:
                # It must not serve what it has: it is lost again, and the next try begins anew.
                engine.lose(error)
                raise
            self._rollout.fleet.add(engine)
        self.restarts += 1
        LOG.warning("generator %d is back, with version %d", rank, session.version)

    def _give_up(self, rank: int) -> None:
        """The budget is spent: with nobody left and nobody coming, the run ends."""
        engines = self._session.engines
        if not self._under_way and len(lost_ranks(engines)) == len(engines):
            why = engines[rank].broken
            error = EngineLost(
                f"all {len(engines)} engines are lost, and the restarts are used up; "
                f"{why.message if why else ''}",
                fix="see why they die, or raise rollout.engine_restarts",
            )
            self._rollout.fail(error)
