"""Publishing: every engine starts to sample the policy's newest version.

    offer     the policy offers its weights, once for each channel of the plan; not if every engine
              shares the policy's storage
    transfer  every engine that needs a copy receives the weights
    verify    each engine compares the fingerprint; a difference stops the publish, and no engine
              changes. An engine whose present weights are damaged is lost
    commit    every engine switches to the new version between two of its decode steps

An engine that shares the policy's storage only commits the version. It must be paused from before
the optimizer step until the commit; the residency plan ensures that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

from rollick.config.schema import WeightsConfig
from rollick.errors import EngineLost, RollickError, WeightError, WorkerError
from rollick.roles.handles import Roles
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.plan import ProcessLocation, PublishPlan, Route, plan_publish

LOG = logging.getLogger("rollick")


class Publisher:
    def __init__(self, roles: Roles, config: WeightsConfig | None = None) -> None:
        self.config = config or WeightsConfig()
        self.transferred_bytes = 0
        """Bytes that the policy offered at the last publish, summed over the channels."""
        self.may_gain_engine: Callable[[], bool] = lambda: False
        """Whether a lost engine is restarted, and then gets the current version."""
        self._policy = roles.policy
        self._generators = roles.generators
        self._roles = roles
        self._policy_location: ProcessLocation | None = None
        self._locations: dict[int, ProcessLocation] = {}
        """Where each generator runs."""

    async def publish(
        self,
        version: PolicyVersion,
        *,
        without: Set[int] = frozenset(),
        keep_cache: bool = False,
        in_background: bool = False,
    ) -> None:
        """Returns when every engine samples `version`; if one cannot verify it, no engine does.
        `without`: generators to leave out, such as lost ones. A version may be published
        again. With `keep_cache`, running samples continue on their KV cache (see Engine.update).
        `in_background`: see RoleHandle.retry."""
        await self._policy.retry(
            lambda: self._publish(version, without=without, keep_cache=keep_cache),
            others=True,
            in_background=in_background,
        )

    async def _publish(
        self, version: PolicyVersion, *, without: Set[int], keep_cache: bool
    ) -> None:
        plan = await self.plan(without=without)
        routes = plan.routes()
        if routes:
            await self._copy_weights(routes, version, keep_cache)
        if ranks := plan.shared_ranks:
            await self._generators.commit_shared(ranks, version, keep_cache=keep_cache)

    async def publish_to_alive(self, version: PolicyVersion, *, keep_cache: bool = False) -> None:
        """Publish to the engines that are not lost, also if one is lost meanwhile."""
        generators = self._generators
        lost = generators.lost_ranks
        try:
            await self.publish(version, without=lost, keep_cache=keep_cache)
        except (WorkerError, EngineLost, WeightError):
            # A lost engine can also fail the transfer at the policy, maybe first. If all engines
            # pass a health check, the failure has another cause.
            await generators.health_check()
            lost_before, lost = lost, generators.lost_ranks
            none_left = len(lost) == generators.ranks
            if lost == lost_before or (none_left and not self.may_gain_engine()):
                raise
            await self.publish(version, without=lost, keep_cache=keep_cache)
        if lost:
            ranks = ", ".join(str(rank) for rank in sorted(lost))
            LOG.warning("version %d was published without the lost generators %s", version, ranks)

    async def plan(self, *, without: Set[int] = frozenset()) -> PublishPlan:
        """Choose the channels of all generators except `without`. Caches their locations."""
        ranks = [rank for rank in range(self._generators.ranks) if rank not in without]
        if not ranks:
            return PublishPlan({})
        if self._policy_location is None:
            self._policy_location = await self._policy.process_location()
        for rank in ranks:
            if rank not in self._locations:
                self._locations[rank] = await self._generators.process_location(rank)
        return plan_publish(
            self._roles.device_map,
            learner=self._policy_location,
            generators={rank: self._locations[rank] for rank in ranks},
            config=self.config,
        )

    def forget(self, rank: int) -> None:
        """Drop the cached location of a generator whose host was restarted."""
        self._locations.pop(rank, None)

    def forget_policy(self) -> None:
        """Drop the cached location of a policy whose hosts were restarted."""
        self._policy_location = None

    async def _copy_weights(
        self, routes: Sequence[Route], version: PolicyVersion, keep_cache: bool
    ) -> None:
        try:
            await self._send_and_commit(routes, version, keep_cache)
        except WeightError as error:
            full = [route.as_full() for route in routes]
            if full == list(routes):
                raise
            if any(route.adapters_only for route in routes):
                message = "version %d: sending all weights instead of adapters; reason: %s"
                LOG.warning(message, version, error.message)
            # For example, a receiver lacks the version that the delta is relative to, or the model
            # that the adapters belong to. Full weights need neither.
            await self._send_and_commit(full, version, keep_cache)

    async def _send_and_commit(
        self, routes: Sequence[Route], version: PolicyVersion, keep_cache: bool
    ) -> None:
        committed: bool | None = False
        try:
            self.transferred_bytes = 0
            for route in routes:
                await self._transfer(route, version)
            committed = None  # From here on, only some engines may have committed.
            ranks = [rank for route in routes for rank in route.ranks]
            results = await self._generators.commit_weights(ranks, version, keep_cache=keep_cache)
        except BaseException:
            # An error here must not hide the first one: a dead policy has nothing to release.
            with suppress(RollickError):
                await self._policy.release_weights(PublishOutcome(committed))
            raise
        # None if only some weights were sent: the engine then keeps using the same memory.
        pairs = zip(ranks, results, strict=True)
        adopted = {rank: result for rank, result in pairs if result is not None}
        # A lost engine never samples again, so its memory is free.
        lost = dict.fromkeys(self._generators.lost_ranks, False)
        await self._policy.release_weights(PublishOutcome(True, adopted=lost | adopted))

    async def _transfer(self, route: Route, version: PolicyVersion) -> None:
        manifest = await self._policy.offer_weights(version, route)
        self.transferred_bytes += manifest.transferred_bytes
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._policy.send_weights(route.channel, manifest))
                tasks.create_task(self._generators.receive_weights(route.ranks, manifest))
        except BaseExceptionGroup as failures:
            # Prefer the error of a worker that died to those of workers connected to it.
            raise min(failures.exceptions, key=lambda e: isinstance(e, WeightError)) from None
