"""Who is paused and who sleeps while a phase is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set

from rollick.cluster.devices import PhasePlan, Seat
from rollick.cluster.group import WorkerGroup
from rollick.workers.generator import RemoteEngine, lost_ranks


class Residency:
    """Keeps generators paused and roles asleep as the plan of the phase under way says.

    Nothing is resumed when a phase ends: the next one's plan decides. So an engine that shares
    the learner's parameters stays paused from before the optimizer step until the commit.
    """

    def __init__(
        self,
        group: WorkerGroup,
        plans: Mapping[str, PhasePlan],
        engines: Sequence[RemoteEngine] = (),
    ) -> None:
        """`engines` are the generators; those that are lost are left alone."""
        self.group = group
        self.engines = engines
        self.plans = plans
        self.paused: frozenset[int] = frozenset()
        self.asleep: frozenset[Seat] = frozenset()

    async def enter(self, phase: str) -> None:
        plan = self.plans.get(phase)
        if plan is None:
            return
        pauses, asleep = frozenset(plan.pauses), frozenset(plan.sleeps)
        await self._each("pause", {Seat("generators", rank) for rank in pauses - self.paused})
        await self._each("sleep", asleep - self.asleep)
        await self._each("wake", self.asleep - asleep)
        await self._each("resume", {Seat("generators", rank) for rank in self.paused - pauses})
        self.paused, self.asleep = pauses, asleep

    async def _each(self, method: str, seats: Set[Seat]) -> None:
        seats = seats - {Seat("generators", rank) for rank in lost_ranks(self.engines)}
        try:
            async with asyncio.TaskGroup() as tasks:
                for role, rank in sorted(seats):
                    tasks.create_task(self.group.call(role, method, rank=rank))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
