"""Hosts as Ray actors. Ray's errors become errors that name a host.

open: ray.init (or join) -> one actor per host -> all answered within place_timeout_s
replace: a spare (spares.py) or a new actor takes the place of a lost one
send: Call -> actor -> Reply          (a Reply carries errors as values, so that they arrive
                                       as they were raised and not as Ray's wrapped classes)
close: graceful close with a deadline, then ray.kill, then ray.shutdown if we started Ray
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from rollick.children.process_tree import is_stopped
from rollick.cluster.devices import HostSpec
from rollick.cluster.machine import machine_id
from rollick.cluster.node_watch import NodeWatch, on_node, plan_placement
from rollick.cluster.object_store import ObjectStore
from rollick.cluster.ray_start import start_ray
from rollick.cluster.spares import SpareWorkers, WorkerPlan, keep_prepared, take_prepared
from rollick.cluster.worker import CLOSE_TIMEOUT_S, Call, Host, RoleSpec
from rollick.config.schema import ClusterConfig
from rollick.errors import (
    ClusterUnavailable,
    NodeLost,
    PlacementError,
    RollickError,
    WorkerError,
    WorkerHung,
    WorkerLost,
)

MAX_CALLS_PER_HOST = 10_000
"""Concurrent calls per host; far more than an engine has samples in flight."""

LOOK_S = 1.0
"""How often to check for hosts that a signal has stopped."""

PASSED_ON = ("ONEDNN_MAX_CPU_ISA",)
"""Environment variables that change numerical results: workers get the controller's values."""

PLACE_AGAIN_S = 0.5
"""How often to check for resources for a lost host."""

SPARE_DELAY_S = 5.0
"""Delay between a restart and its new spare, which would slow the restart down."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call: a value, or the error that it raised."""

    value: Any = None
    error: RollickError | None = None


class HostProcess(NamedTuple):
    """The process of a host, and the machine that it runs on."""

    pid: int
    machine: str
    node: str
    """Ray's id of the machine."""


class HostActor:
    """A Ray actor that contains a Host, created by `place`."""

    def __init__(self) -> None:
        # Ctrl-C is for the controller: it saves and then closes the workers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._host: Host

    async def preload(self, modules: Sequence[str]) -> HostProcess:
        for module in modules:
            importlib.import_module(module)
        return _current_process()

    async def place(self, spec: HostSpec, threads: int) -> HostProcess:
        """Create the host. A reply means that the actor is placed."""
        # A worker sees only its own GPU, as number 0.
        device = "cuda:0" if spec.device.kind == "cuda" else "cpu"
        self._host = Host(spec, device=device, threads=threads)
        return _current_process()

    async def stay(self) -> None:
        """Never returns: the call fails when this process ends."""
        await asyncio.Event().wait()

    async def build(self, roles: Sequence[RoleSpec]) -> Reply:
        return await _make_reply(self._host.build(roles))

    async def call(self, call: Call, args: tuple[Any, ...]) -> Reply:
        return await _make_reply(self._host.call(call, args))

    async def close(self) -> Reply:
        return await _make_reply(self._host.close())


def _current_process() -> HostProcess:
    return HostProcess(os.getpid(), machine_id(), ray.get_runtime_context().get_node_id())


async def _make_reply(work: Awaitable[Any]) -> Reply:
    try:
        return Reply(await work)
    except RollickError as error:
        return Reply(error=error)


class RayTransport:
    """One Ray actor for each host. Create it with `open`."""

    def __init__(self, cluster: ClusterConfig, spares: SpareWorkers, *, owns_ray: bool) -> None:
        self._cluster = cluster
        self._spares = spares
        self._threads = spares.plan.threads
        self._actors: dict[int, Any] = {}
        self._owns_ray = owns_ray
        self.processes: dict[int, HostProcess] = {}
        """By host index."""
        self._stopped: dict[int, float] = {}
        """Hosts that were killed because a signal had stopped them, and when they last ran."""
        self._watch: asyncio.Task[None] | None = None
        self._nodes = NodeWatch()
        self._object_store = ObjectStore.open()

    @classmethod
    async def open(
        cls, hosts: Sequence[HostSpec], cluster: ClusterConfig, plan: WorkerPlan
    ) -> RayTransport:
        """Wait until every actor is placed. Raises PlacementError after place_timeout_s."""
        prepared = take_prepared()
        owns_ray = start_ray(cluster.address) or prepared is not None
        if prepared and prepared.plan != plan:
            prepared.kill()
            prepared = None
        spares = prepared or _new_spares(cluster, plan)
        transport = cls(cluster, spares, owns_ray=owns_ray)
        try:
            if owns_ray:
                check_totals(hosts, cluster)
            transport._actors = {h.index: spares.take_or_create(h.device.kind) for h in hosts}
            await transport._wait_placed(hosts)
            transport._watch = asyncio.create_task(transport._kill_stopped(), name="stopped hosts")
            transport._refill_later()
        except BaseException:
            transport._kill()
            raise
        return transport

    async def replace(self, hosts: Sequence[HostSpec]) -> list[HostSpec]:
        before: dict[int, str] = {}
        for host in hosts:
            ray.kill(self._actors[host.index], no_restart=True)
            self._stopped.pop(host.index, None)
            if old := self.processes.pop(host.index, None):
                before[host.index] = old.node
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cluster.place_timeout_s):
                while missing := self._not_placed(hosts):
                    await self._place(missing, before)
                    await asyncio.sleep(PLACE_AGAIN_S if self._not_placed(hosts) else 0)
        missing = self._not_placed(hosts)
        self.remove(missing)
        self._refill_later()
        return missing

    def _refill_later(self) -> None:
        """Replace used spares later. Only on CPUs: a spare on a GPU would reserve the GPU."""
        count = self._cluster.spare_workers
        asyncio.get_running_loop().call_later(SPARE_DELAY_S, self._refill, count)

    def _refill(self, count: int) -> None:
        if self._actors:  # Not closed.
            self._spares.start("cpu", count)

    def _not_placed(self, hosts: Sequence[HostSpec]) -> list[HostSpec]:
        return [host for host in hosts if host.index not in self.processes]

    def remove(self, hosts: Sequence[HostSpec]) -> None:
        for host in hosts:
            self.processes.pop(host.index, None)
            ray.kill(self._actors[host.index], no_restart=True)

    async def _place(self, hosts: Sequence[HostSpec], before: Mapping[int, str]) -> None:
        """Start the hosts for which a machine has room, and wait until each runs or has failed."""
        nodes = await self._nodes.free_nodes()
        plan = plan_placement(hosts, nodes, cpus=self._cluster.cpus_per_worker, before=before)

        async def start(host: HostSpec, node: str) -> None:
            self._actors[host.index] = actor = self._spares.take_or_create(host.device.kind, node)
            with suppress(RayError, WorkerLost):
                async with self._nodes.fail_if_silent(node):
                    self._record_placement(host, await actor.place.remote(host, self._threads))

        await asyncio.gather(*(start(h, plan[h.index]) for h in hosts if h.index in plan))

    def _record_placement(self, host: HostSpec, process: HostProcess) -> None:
        self.processes[host.index] = process
        self._nodes.watch(process.node)

    async def _wait_placed(self, hosts: Sequence[HostSpec]) -> None:
        cluster, placed = self._cluster, 0
        replies = [self._actors[h.index].place.remote(h, self._threads) for h in hosts]
        try:
            async with asyncio.timeout(cluster.place_timeout_s):
                for placed, host in enumerate(hosts):
                    self._record_placement(host, await replies[placed])
        except TimeoutError:
            unplaced = f"{len(hosts) - placed} of {len(hosts)} workers were not placed"
            within = f"within {cluster.place_timeout_s:g} s; required: {_required(hosts, cluster)}"
            free = f"free: {_amounts(ray.available_resources())}"
            fix = "free these resources, use fewer devices, or raise cluster.place_timeout_s"
            raise ClusterUnavailable(f"{unplaced} {within}; {free}", fix=fix) from None
        except RayError as error:
            raise ClusterUnavailable(f"a worker could not start: {error}") from None

    async def _kill_stopped(self) -> None:
        """Kill hosts of this machine that were stopped (SIGSTOP) for LOOK_S: calls to them would
        wait for their deadlines."""
        last_ran: dict[int, float] = {}
        """When the hosts that were stopped at the last check had last run."""
        checked_at = time.time()
        while True:
            await asyncio.sleep(LOOK_S)
            stopped = {i: pid for i, pid in self.process_ids().items() if is_stopped(pid)}
            for index in last_ran.keys() & stopped:
                self._stopped[index] = last_ran[index]
                with suppress(ProcessLookupError):
                    os.kill(stopped[index], signal.SIGKILL)
            last_ran = {index: last_ran.get(index, checked_at) for index in stopped}
            checked_at = time.time()

    def process_ids(self) -> Mapping[int, int]:
        machine = machine_id()
        return {i: p.pid for i, p in self.processes.items() if p.machine == machine}

    async def wait_lost(self, host: HostSpec) -> WorkerLost:
        try:
            return await self._await_reply(host, "stay", self._actors[host.index].stay.remote())
        except WorkerError as error:
            return error if isinstance(error, WorkerLost) else WorkerLost(error.message)

    def describe_shortage(self) -> str:
        return self._object_store.describe_shortage()

    def _node_of(self, host: HostSpec) -> str | None:
        process = self.processes.get(host.index)
        return process.node if process else None

    async def build(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None:
        specs = [spec for spec in roles if spec.role in host.roles]
        await self._await_reply(host, "build", self._actors[host.index].build.remote(specs))

    def share(self, args: tuple[Any, ...]) -> Any:
        self._object_store.check_room(args)
        return ray.put(args) if args else ()

    async def send(self, host: HostSpec, call: Call, args: Any) -> Any:
        actor = self._actors[host.index]
        if isinstance(args, tuple):
            self._object_store.check_room(args)
        return await self._await_reply(host, call.method, actor.call.remote(call, args))

    async def _await_reply(self, host: HostSpec, method: str, ref: Any) -> Any:
        node = self._node_of(host)
        try:
            async with self._nodes.fail_if_silent(node):
                reply: Reply = await ref
        except NodeLost:
            raise self._nodes.lost_error(node, f"{host} was lost in {method!r}: ") from None
        except asyncio.CancelledError:
            # The caller is gone; without this the call would stay in the host's event loop.
            ray.cancel(ref)
            raise
        except RayActorError as error:
            if host.index in self._stopped:
                message = f"{host} was stopped by a signal in {method!r}, so it was killed"
                fix, last_ran = "find out what sends SIGSTOP", self._stopped[host.index]
                raise WorkerHung(message, fix=fix, failed_at=last_ran) from None
            if not await self._nodes.answers(node):
                raise self._nodes.lost_error(node, f"{host} was lost in {method!r}: ") from None
            fix = "see the worker's log in Ray's session folder; a usual cause is out of memory"
            raise WorkerLost(f"{host} was lost in {method!r}: {error}", fix=fix) from None
        except RayError as error:
            raise WorkerError(f"{host} could not answer {method!r}: {error}") from None
        if reply.error is not None:
            raise reply.error
        return reply.value

    async def close(self) -> None:
        """Close the hosts within a deadline, then kill them. Ignores hosts that are lost."""
        error: RollickError | None = None
        try:
            refs = [actor.close.remote() for actor in self._actors.values()]
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    for ref in refs:
                        with suppress(RayError):
                            reply: Reply = await ref
                            error = error or reply.error
        finally:
            self._kill()
        if error:
            raise error

    def _kill(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._nodes.close()
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors = {}
        self._spares.kill()
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


def worker_environment(*, threads: int, env: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    openmp = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**inherited, **openmp, **env}


def prepare_workers(kinds: Sequence[str], cluster: ClusterConfig, plan: WorkerPlan) -> None:
    """Start Ray and spares for a later run in this process, which then owns both. Waits until the
    spares have imported their modules. `kinds`: the kind of device of each spare."""
    start_ray(None)
    spares = _new_spares(cluster, plan)
    for kind in set(kinds):
        spares.start(kind, kinds.count(kind))
    spares.wait(cluster.place_timeout_s)
    keep_prepared(spares)


def _new_spares(cluster: ClusterConfig, plan: WorkerPlan) -> SpareWorkers:
    variables = worker_environment(threads=plan.threads, env=plan.env)
    return SpareWorkers(partial(_create_actor, cluster=cluster, variables=variables), plan)


def _create_actor(
    kind: str, node: str | None = None, *, cluster: ClusterConfig, variables: Mapping[str, str]
) -> Any:
    """Create an actor without a host on a kind of device, on machine `node` if that is not None."""
    actor: Any = ray.remote(HostActor)
    return actor.options(
        num_cpus=cluster.cpus_per_worker,
        num_gpus=1 if kind == "cuda" else 0,
        max_concurrency=MAX_CALLS_PER_HOST,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": dict(variables)},
        scheduling_strategy=on_node(node) if node else None,
    ).remote()


def check_totals(hosts: Sequence[HostSpec], cluster: ClusterConfig) -> None:
    """Raise PlacementError if the workers cannot fit: a local Ray never gains resources."""
    total = ray.cluster_resources()
    gpus = sum(host.device.kind == "cuda" for host in hosts)
    cpus = cluster.cpus_per_worker * len(hosts)
    if gpus > total.get("GPU", 0) or cpus > total.get("CPU", 0):
        amounts = f"required: {_required(hosts, cluster)}; available: {_amounts(total)}"
        fix = "use fewer devices, lower cluster.cpus_per_worker, or set cluster.address"
        raise PlacementError(f"the workers do not fit on this machine; {amounts}", fix=fix)


def _required(hosts: Sequence[HostSpec], cluster: ClusterConfig) -> str:
    cpus = f"CPU {cluster.cpus_per_worker:g}"
    return ", ".join(f"{host} {cpus} GPU {int(host.device.kind == 'cuda')}" for host in hosts)


def _amounts(resources: Mapping[str, float]) -> str:
    return f"CPU {resources.get('CPU', 0):g} GPU {resources.get('GPU', 0):g}"
