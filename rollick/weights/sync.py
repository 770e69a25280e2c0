"""Publishing: engines take the policy that the learner has just made.

    begin     the learner writes its weights once (only if some engine needs a copy)
    transfer  every receiving engine maps them
    verify    each compares the fingerprint; one that differs stops the publish, nothing changed
    commit    every engine takes the new version, between two of its decode steps

An engine that shares the learner's storage has nothing to transfer: it commits the version. It
must be paused from before the optimizer step until the commit; the residency plan sees to that.
"""

from __future__ import annotations

from collections.abc import Set

from rollick.cluster.group import WorkerGroup
from rollick.types import PolicyVersion
from rollick.weights.channels.host import WeightManifest, remove_weights
from rollick.weights.plan import plan_publish


class Publisher:
    """Carries versions from the learner to all generators."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.plan = plan_publish(group.device_map)

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
        copied = tuple(rank for rank in self.plan.copied if rank not in without)
        if copied:
            manifest: WeightManifest = await self.group.call("policy", "write_weights", version)
            try:
                await self._each(copied, "receive", manifest)
                await self._each(copied, "commit", version, keep_cache)
            finally:
                remove_weights(manifest)
        shared = tuple(rank for rank in self.plan.shared if rank not in without)
        await self._each(shared, "commit_shared", version, keep_cache)

    async def _each(self, ranks: tuple[int, ...], method: str, *arguments: object) -> None:
        every = range(self.group.device_map.ranks("generators"))
        first, *rest = arguments
        parts = [first if rank in ranks else None for rank in every]
        await self.group.scatter("generators", method, parts, *rest)
