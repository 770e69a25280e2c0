"""Publishing: engines take the policy that the learner has just made.

    begin     the learner offers its weights (only if some engine needs a copy), on each channel of
              the plan
    transfer  every receiving engine gets at them
    verify    each compares the fingerprint; one that differs stops the publish, nothing changed
    commit    every engine takes the new version, between two of its decode steps

An engine that shares the learner's storage has nothing to transfer: it commits the version. It
must be paused from before the optimizer step until the commit; the residency plan sees to that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from rollick.cluster.group import WorkerGroup
from rollick.config.schema import WeightsConfig
from rollick.errors import RollickError, WeightError
from rollick.types import PolicyVersion
from rollick.weights.channels.base import Outcome
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Place, PublishPlan, Route, plan_publish

LOG = logging.getLogger("rollick")


class Publisher:
    """Carries versions from the learner to all generators."""

    def __init__(self, group: WorkerGroup, config: WeightsConfig | None = None) -> None:
        self.group = group
        self.config = config or WeightsConfig()
        self.transferred_bytes = 0
        """What the learner offered at the last publish, on all channels together."""
        self._policy: Place | None = None
        self._places: dict[int, Place] = {}
        """Where generators live, as they said themselves."""

    async def publish(
        self,
        version: PolicyVersion,
        *,
        without: Set[int] = frozenset(),
        keep_cache: bool = False,
    ) -> None:
        """Returns when every engine samples `version`; if one cannot verify it, nobody does.

        `without` are generators that are left out, such as those that are lost. To publish a
        version once more does no harm. With `keep_cache` running samples go on over the cache that
        they have (see Engine.update).
        """
        plan = await self.plan(without=without)
        routes = plan.routes()
        if routes:
            await self._copy(routes, version, keep_cache)
        await self._each("commit_shared", dict.fromkeys(plan.shared, version), keep_cache)

    async def plan(self, *, without: Set[int] = frozenset()) -> PublishPlan:
        """The channels of all generators but those; where each lives is asked for once."""
        device_map = self.group.device_map
        ranks = [rank for rank in range(device_map.ranks("generators")) if rank not in without]
        if not ranks:
            return PublishPlan({})
        if self._policy is None:
            self._policy = await self.group.call("policy", "place")
        for rank in ranks:
            if rank not in self._places:
                self._places[rank] = await self.group.call("generators", "place", rank=rank)
        places = {rank: self._places[rank] for rank in ranks}
        return plan_publish(device_map, policy=self._policy, generators=places, config=self.config)

    def forget(self, rank: int) -> None:
        """Another host has taken the rank, perhaps elsewhere: it is asked anew."""
        self._places.pop(rank, None)

    async def _copy(
        self, routes: Sequence[Route], version: PolicyVersion, keep_cache: bool
    ) -> None:
        try:
            await self._copy_once(routes, version, keep_cache)
        except WeightError as error:
            whole = [route.whole for route in routes]
            if whole == list(routes):
                raise
            if any(route.adapters for route in routes):
                LOG.warning("version %d is sent whole, not as adapters: %s", version, error.message)
            # Such as a receiver without the version that the changes are to, or without the model
            # that the adapters are for: the whole always fits.
            await self._copy_once(whole, version, keep_cache)

    async def _copy_once(
        self, routes: Sequence[Route], version: PolicyVersion, keep_cache: bool
    ) -> None:
        committed: bool | None = False
        try:
            self.transferred_bytes = 0
            for route in routes:
                await self._transfer(route, version)
            committed = None
            ranks = [rank for route in routes for rank in route.ranks]
            answers = await self._each("commit", dict.fromkeys(ranks, version), keep_cache)
        except BaseException:
            # What went wrong is the news, and a learner that is gone has nothing to release.
            with suppress(RollickError):
                await self._release(Outcome(committed))
            raise
        await self._release(Outcome(True, held=_held([answers[rank] for rank in ranks])))

    async def _transfer(self, route: Route, version: PolicyVersion) -> None:
        manifest: WeightManifest = await self.group.together(
            "policy", "offer_weights", version, route
        )
        self.transferred_bytes += manifest.transferred_bytes
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.group.call("policy", "send_weights", route.channel))
                tasks.create_task(self._each("receive", dict.fromkeys(route.ranks, manifest)))
        except BaseExceptionGroup as failures:
            raise _root_cause(failures.exceptions) from None

    async def _release(self, outcome: Outcome) -> None:
        await self.group.call("policy", "release_weights", outcome)

    async def _each(self, method: str, arguments: Mapping[int, object], *rest: object) -> list[Any]:
        """Each rank of `arguments` gets its own, and all get the `rest`."""
        every = range(self.group.device_map.ranks("generators"))
        if not arguments:
            return []
        return await self.group.scatter(
            "generators", method, [arguments.get(rank) for rank in every], *rest
        )


def _held(answers: Sequence[bool | None]) -> bool | None:
    """Whether some engine lives in the memory that was offered; None if a part of the weights was
    sent and all live where they lived."""
    return None if all(answer is None for answer in answers) else any(answers)


def _root_cause(failures: Iterable[BaseException]) -> BaseException:
    """A worker that died, rather than what the others say about a line that broke."""
    return sorted(failures, key=lambda failure: isinstance(failure, WeightError))[0]
