"""Detects machines of the cluster that do not answer: off, hanging, or cut off from the network.

Ray needs a minute for that, and until then it sends new workers there. So an idle process on each
machine with workers, except the controller's, gets a heartbeat call every BEAT_S.

    no answer within SILENT_S -> every call to the machine's workers ends with NodeLost, and
                                 replacements go to other machines, until it answers again

A network outage shorter than SILENT_S changes nothing: Ray and TCP resend what was lost.

    free resources of the machines that answer -> plan_placement -> node ids by host
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollick.cluster.devices import HostSpec
from rollick.errors import NodeLost

BEAT_S = 2.0
SILENT_S = 20.0
ANSWER_S = 5.0
"""How long a machine may take to answer after one of its workers was lost."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A machine of the cluster that answers, and its free resources."""

    id: str
    cpus: float = 0.0
    gpus: float = 0.0


class Sentinel:
    """The idle process of a machine."""

    async def beat(self) -> None: ...


class NodeWatch:
    def __init__(self) -> None:
        self.controller_node: str = ray.get_runtime_context().get_node_id()
        """The controller's machine, which is not watched: if it is lost, so is the controller."""
        self._beats: dict[str, asyncio.Task[None]] = {}
        self._sentinels: dict[str, Any] = {}
        self._silent: set[str] = set()
        self._answered_at: dict[str, float] = {}
        """When each machine last answered, in seconds since the epoch."""
        self._calls: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """Deadlines of the calls in flight to workers of a machine."""

    def watch(self, node: str) -> None:
        if node != self.controller_node and node not in self._beats:
            self._sentinels[node] = _create_sentinel(node)
            self._beats[node] = asyncio.create_task(self._beat(node), name=f"node {node[:8]}")

    @asynccontextmanager
    async def fail_if_silent(self, node: str | None) -> AsyncGenerator[None]:
        """Raises NodeLost if the machine stops answering while the block runs."""
        limit = asyncio.timeout(0.0 if node in self._silent else None)
        calls = self._calls[node or ""]
        try:
            async with limit:
                calls.add(limit)
                try:
                    yield
                finally:
                    calls.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self.lost_error(node) from None

    async def answers(self, node: str | None) -> bool:
        """Whether the machine of a lost worker answers now. If not, no worker is placed there until
        it does."""
        if node is None or node not in self._answered_at:
            return True
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._sentinels[node].beat.remote()
        except (TimeoutError, RayError):
            self._silent.add(node)
            return False
        return node not in self._silent

    def lost_error(self, node: str | None, prefix: str = "") -> NodeLost:
        name = (node or "")[:12]
        fix = "check the machine and its network; `ray status` lists the nodes of the cluster"
        message = f"{prefix}the machine of Ray node {name} does not answer"
        return NodeLost(message, fix=fix, failed_at=self._answered_at.get(node or ""))

    async def free_nodes(self) -> list[ClusterNode]:
        """The machines that answer, and their free resources."""
        alive, free = await asyncio.to_thread(_read_nodes)
        return [
            ClusterNode(node, free[node].get("CPU", 0.0), free[node].get("GPU", 0.0))
            for node in alive
            if node in free and node not in self._silent
        ]

    def close(self) -> None:
        for task in self._beats.values():
            task.cancel()
        for sentinel in self._sentinels.values():
            with suppress(RayError):
                ray.kill(sentinel)

    async def _beat(self, node: str) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    await self._sentinels[node].beat.remote()
            except (TimeoutError, RayError) as error:
                if not isinstance(error, TimeoutError) and await self._restart_sentinel(node):
                    continue
                self._mark_silent(node)
                alive, _ = await asyncio.to_thread(_read_nodes)
                if node not in alive:
                    return  # If the machine comes back, it is a new node.
                await self._restart_sentinel(node)
            else:
                self._silent.discard(node)
                self._answered_at[node] = time.time()
            await asyncio.sleep(BEAT_S)

    async def _restart_sentinel(self, node: str) -> bool:
        """The sentinel may have died without its machine. Returns whether a new one answers."""
        ray.kill(self._sentinels[node])
        self._sentinels[node] = _create_sentinel(node)
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(SILENT_S):
                await self._sentinels[node].beat.remote()
                return True
        return False

    def _mark_silent(self, node: str) -> None:
        """Mark the machine as silent, and end the calls in flight to its workers."""
        self._silent.add(node)
        now = asyncio.get_running_loop().time()
        for limit in self._calls[node]:
            if not limit.expired():
                limit.reschedule(now)


def plan_placement(
    hosts: Sequence[HostSpec],
    nodes: Collection[ClusterNode],
    *,
    cpus: float,
    before: Mapping[int, str],
) -> dict[int, str]:
    """Choose a node for each host. Returns node ids by host index, without hosts that fit nowhere.

    A host returns to its node (`before`) if that answers: the resources of its old process are free
    there, even if the cluster does not know it yet. Each other host goes to the node with the most
    free resources, so that the loss of one machine costs little.
    """
    free = {node.id: [node.gpus, node.cpus] for node in nodes}
    placed = {host.index: before[host.index] for host in hosts if before.get(host.index) in free}
    for host in hosts:
        if host.index in placed:
            continue
        needs = [float(host.device.kind == "cuda"), cpus]
        fitting = [id for id, left in free.items() if left[0] >= needs[0] and left[1] >= needs[1]]
        if not fitting:
            continue
        # A host without a GPU prefers the node with the fewest GPUs.
        sign = 1 if needs[0] else -1
        best = max(fitting, key=lambda id: (sign * free[id][0], free[id][1]))
        placed[host.index] = best
        free[best] = [left - need for left, need in zip(free[best], needs, strict=True)]
    return placed


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """The scheduling strategy that allows an actor only on this node."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _create_sentinel(node: str) -> Any:
    actor: Any = ray.remote(Sentinel)
    return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=on_node(node)).remote()


def _read_nodes() -> tuple[Iterable[str], dict[str, dict[str, float]]]:
    """The machines that the cluster considers alive, and the free resources of each."""
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return alive, ray._private.state.available_resources_per_node()  # pyright: ignore
