"""Which generator gets new weights how. Pure: follows from the device map alone."""

from __future__ import annotations

from dataclasses import dataclass

from rollick.cluster.devices import DeviceMap


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """Generator ranks that share the learner's parameters, and those that need a copy."""

    shared: tuple[int, ...]
    copied: tuple[int, ...]


def plan_publish(device_map: DeviceMap) -> PublishPlan:
    """A generator in the learner's process shares its storage; every other one gets a copy."""
    ranks = range(device_map.ranks("generators"))
    shared = tuple(rank for rank in ranks if device_map.shares_weights(rank))
    return PublishPlan(shared, tuple(rank for rank in ranks if rank not in shared))
