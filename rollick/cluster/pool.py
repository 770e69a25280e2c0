"""Hosts as Ray actors. The only module that imports Ray. Ray's errors become ones that name a host.

open: ray.init (or join) -> one actor per host -> all answered within place_timeout_s
send: Call -> actor -> Reply          (a Reply carries errors as values, so that they arrive
                                       as they were raised and not as Ray's wrapped classes)
close: graceful close with a deadline, then ray.kill, then ray.shutdown if we started Ray
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from rollick.children.process_tree import is_stopped
from rollick.cluster.devices import HostSpec
from rollick.cluster.machine import machine_id
from rollick.cluster.worker import CLOSE_TIMEOUT_S, Call, Host, RoleSpec
from rollick.config.schema import ClusterConfig
from rollick.errors import (
    ClusterUnavailable,
    PlacementError,
    RollickError,
    WorkerError,
    WorkerHung,
    WorkerLost,
)

MAX_CALLS_PER_HOST = 10_000
"""Concurrent calls per host; far more than an engine has samples in flight."""

RAY_SETTINGS = {
    # No usage reports to Ray's developers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start one idle worker for each core, none of which our actors can use.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Silences a warning; a host on the CPU requests no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

LOOK_S = 1.0
"""How often to look for hosts that a signal has stopped."""

KNOCK_TIMEOUT_S = 5.0
"""How long a given cluster may take to accept a connection."""

PASSED_ON = ("ONEDNN_MAX_CPU_ISA",)
"""Variables of the controller that change numbers, so every worker must have the same."""

CreateActor = Callable[[HostSpec], Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call: a value, or the error that it raised."""

    value: Any = None
    error: RollickError | None = None


class HostProcess(NamedTuple):
    """The process of a host, and the machine that it runs on."""

    pid: int
    machine: str


class HostActor:
    """A Host inside a Ray actor."""

    def __init__(self, spec: HostSpec, *, device: str, threads: int) -> None:
        # Ctrl-C is for the controller: it saves and then closes the workers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._host = Host(spec, device=device, threads=threads)

    async def place(self) -> HostProcess:
        """A reply means that the actor is placed."""
        return HostProcess(os.getpid(), machine_id())

    async def stay(self) -> None:
        """Never returns: the call fails when this process ends."""
        await asyncio.Event().wait()

    async def build(self, roles: Sequence[RoleSpec]) -> Reply:
        return await _reply_of(self._host.build(roles))

    async def call(self, call: Call, shared: tuple[Any, ...]) -> Reply:
        return await _reply_of(self._host.call(replace(call, args=(*call.args, *shared))))

    async def close(self) -> Reply:
        return await _reply_of(self._host.close())


async def _reply_of(work: Awaitable[Any]) -> Reply:
    try:
        return Reply(await work)
    except RollickError as error:
        return Reply(error=error)


class RayTransport:
    """One Ray actor for each host. Create it with `open`."""

    def __init__(self, cluster: ClusterConfig, create: CreateActor, *, owns_ray: bool) -> None:
        self._cluster = cluster
        self._create = create
        self._actors: dict[int, Any] = {}
        self._owns_ray = owns_ray
        self.processes: dict[int, HostProcess] = {}
        """By the index of the host."""
        self._stopped: set[int] = set()
        """Hosts that were killed because a signal had stopped them."""
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, hosts: Sequence[HostSpec], cluster: ClusterConfig, threads: int, env: Mapping[str, str]
    ) -> RayTransport:
        """Wait until every actor is placed. Raises PlacementError after place_timeout_s."""
        owns_ray = start_ray(cluster.address)
        variables = worker_environment(threads=threads, env=env)
        create = partial(_create_actor, cluster=cluster, threads=threads, variables=variables)
        transport = cls(cluster, create, owns_ray=owns_ray)
        try:
            if owns_ray:
                check_totals(hosts, cluster)
            transport._actors = {host.index: create(host) for host in hosts}
            await transport._wait_placed(hosts)
            transport._watch = asyncio.create_task(transport._kill_stopped(), name="stopped hosts")
        except BaseException:
            transport._kill()
            raise
        return transport

    async def restart(self, host: HostSpec) -> None:
        """Kill the old process, if it exists, and wait until a new one is placed."""
        ray.kill(self._actors[host.index], no_restart=True)
        self._actors[host.index] = self._create(host)
        self.processes.pop(host.index, None)
        self._stopped.discard(host.index)
        await self._wait_placed([host])

    async def _wait_placed(self, hosts: Sequence[HostSpec]) -> None:
        cluster, placed = self._cluster, 0
        replies = [self._actors[host.index].place.remote() for host in hosts]
        try:
            async with asyncio.timeout(cluster.place_timeout_s):
                for placed, host in enumerate(hosts):
                    self.processes[host.index] = await replies[placed]
        except TimeoutError:
            late = f"{len(hosts) - placed} of {len(hosts)} workers were not placed"
            within = f"within {cluster.place_timeout_s:g} s; required: {_required(hosts, cluster)}"
            free = f"free: {_amounts(ray.available_resources())}"
            fix = "free these resources, use fewer devices, or raise cluster.place_timeout_s"
            raise ClusterUnavailable(f"{late} {within}; {free}", fix=fix) from None
        except RayError as error:
            raise ClusterUnavailable(f"a worker could not start: {error}") from None

    async def _kill_stopped(self) -> None:
        """Kill hosts of this machine that a signal has stopped (SIGSTOP) for LOOK_S. They would
        answer nothing until a deadline."""
        here, suspects = machine_id(), set[int]()
        while True:
            await asyncio.sleep(LOOK_S)
            found = [(i, pid) for i, (pid, where) in self.processes.items() if where == here]
            stopped = {index: pid for index, pid in found if is_stopped(pid)}
            for index in suspects.intersection(stopped):
                self._stopped.add(index)
                with suppress(ProcessLookupError):
                    os.kill(stopped[index], signal.SIGKILL)
            suspects = set(stopped)

    async def wait_lost(self, host: HostSpec) -> None:
        with suppress(RayError):
            await self._actors[host.index].stay.remote()

    async def build(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None:
        here = [role for role in roles if role.role in host.roles]
        await self._reply(host, "build", self._actors[host.index].build.remote(here))

    def share(self, args: tuple[Any, ...]) -> Any:
        return ray.put(args) if args else ()

    async def send(self, host: HostSpec, call: Call, shared: Any) -> Any:
        actor = self._actors[host.index]
        return await self._reply(host, call.method, actor.call.remote(call, shared))

    async def _reply(self, host: HostSpec, method: str, ref: Any) -> Any:
        try:
            reply: Reply = await ref
        except asyncio.CancelledError:
            # No caller waits any more; without this the call would stay in the host's event loop.
            ray.cancel(ref)
            raise
        except RayActorError as error:
            if host.index in self._stopped:
                message = f"{host} was stopped by a signal in {method!r}, and killed for that"
                raise WorkerHung(message, fix="find out what sends SIGSTOP") from None
            fix = "see the worker's log in Ray's session folder; a usual cause is out of memory"
            raise WorkerLost(f"{host} was lost in {method!r}: {error}", fix=fix) from None
        except RayError as error:
            raise WorkerError(f"{host} could not answer {method!r}: {error}") from None
        if reply.error is not None:
            raise reply.error
        return reply.value

    async def close(self) -> None:
        """Close hosts within a deadline, then kill them. Skips hosts that are gone."""
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
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors = {}
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


def start_ray(address: str | None) -> bool:
    """Start Ray on this machine, or join the cluster at `address`. Returns whether the caller must
    shut Ray down. Uses Ray as it is if it is already initialised."""
    if ray.is_initialized():
        return False
    if address is not None:
        check_address(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Must run on the main thread: Ray's processes die with the thread that started them.
    with _keep_signal_handlers(), _environment(RAY_SETTINGS), _own_process_groups():
        try:
            ray.init(
                address=address or "local",
                namespace=f"rollick-{uuid.uuid4().hex[:8]}",
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            message = f"Ray did not start ({address or 'on this machine'}): {error}"
            fix = "check cluster.address, or leave it out to start Ray on this machine"
            raise ClusterUnavailable(message, fix=fix) from error
    return True


def check_address(address: str) -> None:
    """Check the address first: Ray would retry an unreachable address for minutes."""
    if address == "auto":
        return
    fix = "use auto or host:port, or leave it out to start Ray on this machine"
    if address.startswith("ray://"):
        message = f"cluster.address={address} is a Ray client address, which is not supported"
        raise PlacementError(message, fix=f"start rollick on a node of the cluster and {fix}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"cluster.address={address} is not a Ray address", fix=fix)
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        message = f"no Ray cluster answers at {address}: {error}"
        raise ClusterUnavailable(message, fix=fix) from None


def worker_environment(*, threads: int, env: Mapping[str, str]) -> dict[str, str]:
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    count = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return {**passed, **count, **env}


def _create_actor(
    host: HostSpec, *, cluster: ClusterConfig, threads: int, variables: Mapping[str, str]
) -> Any:
    on_gpu = host.device.kind == "cuda"
    kind: Any = ray.remote(HostActor)
    return kind.options(
        num_cpus=cluster.cpus_per_worker,
        num_gpus=1 if on_gpu else 0,
        max_concurrency=MAX_CALLS_PER_HOST,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": dict(variables)},
        # A worker sees only its own GPU, as number 0.
    ).remote(host, device="cuda:0" if on_gpu else "cpu", threads=threads)


def check_totals(hosts: Sequence[HostSpec], cluster: ClusterConfig) -> None:
    """Raise now if the workers cannot fit: a local Ray never gains resources."""
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


@contextmanager
def _keep_signal_handlers() -> Generator[None]:
    """Keep the controller's signal handlers: ray.init replaces that of SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _own_process_groups() -> Generator[None]:
    """Processes started in the block lead process groups of their own; workers are in the raylet's.

    A supervisor or a terminal signals the controller's group: the controller saves, and needs its
    workers for that. Ray has no option for this.
    """
    original = subprocess.Popen.__init__
    grouped: Any = partialmethod(original, process_group=0)
    subprocess.Popen.__init__ = grouped
    try:
        yield
    finally:
        subprocess.Popen.__init__ = original


@contextmanager
def _environment(settings: Mapping[str, str]) -> Generator[None]:
    """Set variables for processes started in the block; keeps those the user set."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ |= added
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
