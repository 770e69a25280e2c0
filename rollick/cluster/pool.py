"""Hosts as processes on Ray: the only place that knows Ray.

Owns starting or joining a Ray cluster, placing one actor for each host within a deadline, and
turning what Ray says into errors that name the host. Does not know roles beyond passing them on.

    open: ray.init (or join) -> one actor per host -> all answered within place_timeout_s
    send: Call -> actor -> Reply          (a Reply carries errors as values, so that they arrive
                                           as they were raised and not as Ray's wrapped classes)
    close: a short polite close, then ray.kill, then ray.shutdown where we started Ray
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rollick.cluster.devices import HostSpec
from rollick.cluster.worker import CLOSE_TIMEOUT_S, Call, Host, RoleSpec
from rollick.config.schema import ClusterConfig
from rollick.errors import PlacementError, RollickError, WorkerError

MAX_CALLS_PER_HOST = 10_000
"""Calls that may wait in one host together; far more than an engine has samples in flight."""

RAY_SETTINGS = {
    # No reports to Ray's makers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would start one idle worker for each core, none of which our actors can use.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Stops a warning; a host on the CPU asks for no GPU and uses none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

KNOCK_TIMEOUT_S = 5.0
"""How long a given cluster may take to accept a connection."""

PASSED_ON = ("ONEDNN_MAX_CPU_ISA",)
"""Variables of the controller that change numbers, so every worker must have the same."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call gave: a value, or the error that it raised."""

    value: Any = None
    error: RollickError | None = None


class HostActor:
    """A Host inside a Ray actor."""

    def __init__(self, spec: HostSpec, *, device: str, threads: int) -> None:
        # Ctrl-C is for the controller: it saves and then closes the workers.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._host = Host(spec, device=device, threads=threads)

    async def place(self) -> int:
        """The process id: an answer says that the actor is placed."""
        return os.getpid()

    async def build(self, roles: Sequence[RoleSpec]) -> Reply:
        try:
            await self._host.build(roles)
        except RollickError as error:
            return Reply(error=error)
        return Reply()

    async def call(self, call: Call, shared: tuple[Any, ...]) -> Reply:
        try:
            return Reply(await self._host.call(replace(call, args=(*call.args, *shared))))
        except RollickError as error:
            return Reply(error=error)

    async def close(self) -> Reply:
        try:
            await self._host.close()
        except RollickError as error:
            return Reply(error=error)
        return Reply()


class RayTransport:
    """One Ray actor for each host. Made by `open`."""

    def __init__(
        self, cluster: ClusterConfig, *, create: Callable[[HostSpec], Any], owns_ray: bool
    ) -> None:
        self._cluster = cluster
        self._create = create
        self._actors: dict[int, Any] = {}
        self._owns_ray = owns_ray
        self.pids: dict[int, int] = {}
        """Process id of each host, by index."""

    @classmethod
    async def open(
        cls,
        hosts: Sequence[HostSpec],
        *,
        cluster: ClusterConfig,
        threads: int,
        env: Mapping[str, str],
    ) -> RayTransport:
        """Waits until every actor is placed; fails with PlacementError after place_timeout_s."""
        owns_ray = start_ray(cluster.address)
        variables = worker_environment(threads=threads, env=env)
        create = partial(_create_actor, cluster=cluster, threads=threads, variables=variables)
        transport = cls(cluster, create=create, owns_ray=owns_ray)
        try:
            if owns_ray:
                check_totals(hosts, cluster)
            transport._actors = {host.index: create(host) for host in hosts}
            await transport._wait_placed(hosts)
        except BaseException:
            transport._kill()
            raise
        return transport

    async def restart(self, host: HostSpec) -> None:
        """The old process is killed, if it is there; waits until the new one is placed."""
        ray.kill(self._actors[host.index], no_restart=True)
        self._actors[host.index] = self._create(host)
        await self._wait_placed([host])

    async def _wait_placed(self, hosts: Sequence[HostSpec]) -> None:
        cluster = self._cluster
        waiting = {host.index: host for host in hosts}
        answers = {host.index: self._actors[host.index].place.remote() for host in hosts}
        try:
            async with asyncio.timeout(cluster.place_timeout_s):
                for host in hosts:
                    self.pids[host.index] = await answers[host.index]
                    del waiting[host.index]
        except TimeoutError:
            raise PlacementError(
                f"{len(waiting)} of {len(hosts)} workers were not placed within "
                f"{cluster.place_timeout_s:g} s; wanted: {_wanted(hosts, cluster)}; "
                f"free: {_amounts(ray.available_resources())}",
                fix="free these resources, ask for fewer devices, or raise cluster.place_timeout_s",
            ) from None
        except RayError as error:
            raise PlacementError(f"a worker could not start: {error}") from None

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
            # Nobody waits for it any more; without this it would stay in the host's loop.
            ray.cancel(ref)
            raise
        except RayActorError as error:
            raise WorkerError(
                f"{host} was lost in {method!r}: {error}",
                fix="the worker's own log is under Ray's session folder; out of memory is the "
                "usual cause of a sudden death",
            ) from None
        except RayError as error:
            raise WorkerError(f"{host} could not answer {method!r}: {error}") from None
        if reply.error is not None:
            raise reply.error
        return reply.value

    async def close(self) -> None:
        """Ask politely within a deadline, then kill. A host that is gone is closed already."""
        errors: list[RollickError] = []
        try:
            refs = [actor.close.remote() for actor in self._actors.values()]
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    for ref in refs:
                        with suppress(RayError):
                            reply: Reply = await ref
                            errors += [reply.error] if reply.error else []
        finally:
            self._kill()
        if errors:
            raise errors[0]

    def _kill(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        self._actors = {}
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


def start_ray(address: str | None) -> bool:
    """Start Ray on this machine, or join the cluster at `address`; whether we have to end it.

    A Ray that this process already uses is taken as it is.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        check_address(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Called on the main thread and not in a helper thread: Ray's processes die with the thread
    # that started them.
    with _own_signals(), _environment(RAY_SETTINGS):
        try:
            ray.init(
                address=address or "local",
                namespace=f"rollick-{uuid.uuid4().hex[:8]}",
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise PlacementError(
                f"Ray did not start ({address or 'on this machine'}): {error}",
                fix="check cluster.address, or leave it out to start Ray on this machine",
            ) from error
    return True


def check_address(address: str) -> None:
    """Knock first: Ray itself would retry an address that nobody serves for minutes."""
    if address == "auto":
        return
    fix = "use auto or host:port, or leave it out to start Ray on this machine"
    if address.startswith("ray://"):
        raise PlacementError(
            f"cluster.address={address} is a Ray client address, which cannot carry our calls",
            fix=f"start rollick on a node of the cluster and {fix}",
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"cluster.address={address} is not an address of Ray", fix=fix)
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise PlacementError(f"no Ray cluster answers at {address}: {error}", fix=fix) from None


def worker_environment(*, threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker process is started with, on top of its machine's."""
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
        # Ray shows a worker only its own GPU, which is then number 0 there.
    ).remote(host, device="cuda:0" if on_gpu else "cpu", threads=threads)


def check_totals(hosts: Sequence[HostSpec], cluster: ClusterConfig) -> None:
    """On a machine of our own nothing will ever be added: do not wait for what is not there."""
    total = ray.cluster_resources()
    gpus = sum(host.device.kind == "cuda" for host in hosts)
    cpus = cluster.cpus_per_worker * len(hosts)
    if gpus > total.get("GPU", 0) or cpus > total.get("CPU", 0):
        raise PlacementError(
            f"the workers do not fit on this machine; wanted: {_wanted(hosts, cluster)}; "
            f"there is: {_amounts(total)}",
            fix="ask for fewer devices, lower cluster.cpus_per_worker, or set cluster.address",
        )


def _wanted(hosts: Sequence[HostSpec], cluster: ClusterConfig) -> str:
    return ", ".join(
        f"{host} CPU {cluster.cpus_per_worker:g} GPU {int(host.device.kind == 'cuda')}"
        for host in hosts
    )


def _amounts(resources: Mapping[str, float]) -> str:
    return f"CPU {resources.get('CPU', 0):g} GPU {resources.get('GPU', 0):g}"


@contextmanager
def _own_signals() -> Generator[None]:
    """Keep the controller's signal handlers: ray.init puts its own in for SIGTERM."""
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
def _environment(settings: Mapping[str, str]) -> Generator[None]:
    """Set variables for the processes started inside; what the user has set stays."""
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
