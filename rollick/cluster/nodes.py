"""Where the hosts of a lost machine go. Pure: no Ray.

free resources of the nodes that answer -> plan_placement -> a node for each host with room
ranks that were placed -> kept_ranks -> ranks with which a sharded policy continues
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollick.cluster.devices import HostSpec


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster that answers, and what is free there."""

    id: str
    cpus: float = 0.0
    gpus: float = 0.0


def plan_placement(
    hosts: Sequence[HostSpec],
    nodes: Collection[ClusterNode],
    *,
    cpus: float,
    before: Mapping[int, str],
) -> dict[int, str]:
    """The node of each host, by the host's index; hosts without room are left out.

    A host returns to its node (`before`) if that answers: what its old process used is free there,
    even if the cluster does not know it yet. The others go, in order, to the node with the most
    room, so that the loss of one machine costs little.
    """
    free = {node.id: [node.gpus, node.cpus] for node in nodes}
    placed = {host.index: before[host.index] for host in hosts if before.get(host.index) in free}
    for host in hosts:
        if host.index in placed:
            continue
        needs = [float(host.device.kind == "cuda"), cpus]
        fitting = [name for name, has in free.items() if has[0] >= needs[0] and has[1] >= needs[1]]
        if not fitting:
            continue
        # A host without a GPU leaves the GPUs to others.
        sign = 1 if needs[0] else -1
        best = max(fitting, key=lambda name: (sign * free[name][0], free[name][1]))
        placed[host.index] = best
        free[best] = [has - need for has, need in zip(free[best], needs, strict=True)]
    return placed


def kept_ranks(placed: Sequence[int], *, unit: int) -> list[int]:
    """The ranks with which a sharded policy continues: as many of those that were placed as make
    complete replicas of `unit` ranks. Empty if there is not one."""
    return sorted(placed)[: len(placed) // unit * unit]
