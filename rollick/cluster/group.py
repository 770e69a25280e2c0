"""WorkerGroup: lets the controller call one rank, all ranks, or each rank with its own part.

Owns the lifetime of the hosts (`open_group`) and the deadline of every call (deadlines.py).

    WorkerGroup --Call--> InlineTransport --> Host           (this process, this event loop)
                      \\-> RayTransport ----> actor --> Host  (pool.py: one process per host)
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollick.cluster.deadlines import GRACE_S, Deadlines
from rollick.cluster.devices import DeviceMap, HostSpec, RoleRank
from rollick.cluster.worker import Call, Host, RoleSpec
from rollick.config.devices import Device
from rollick.config.schema import ClusterConfig
from rollick.data.batch import Batch, BatchShare
from rollick.errors import ClusterUnavailable, RollickError, WorkerError, WorkerHung, WorkerLost
from rollick.types import RoleName

_RESTORES_HOSTS = ContextVar("restores_hosts", default=False)
"""Whether the current task restores hosts."""


class Transport(Protocol):
    """Sends calls to hosts; identifies a host by its index."""

    async def build(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None: ...

    async def replace(self, hosts: Sequence[HostSpec]) -> Sequence[HostSpec]:
        """End these hosts and start empty ones in their place. Returns those for which there was
        no room in time."""
        ...

    def remove(self, hosts: Sequence[HostSpec]) -> None:
        """End hosts that are no longer needed."""

    def share(self, args: tuple[Any, ...]) -> Any:
        """Prepare arguments for several ranks, so that they are copied once."""
        ...

    async def send(self, host: HostSpec, call: Call, args: Any) -> Any:
        """Run the call with these arguments, or with the result of `share`. Cancellation also
        cancels a coroutine on the host; a synchronous method keeps running there."""
        ...

    async def wait_lost(self, host: HostSpec) -> WorkerLost:
        """Returns when the host's process has ended, or its machine does not answer."""
        ...

    def process_ids(self) -> Mapping[int, int]:
        """Process ids of the hosts on this machine, by host index; excludes this process."""
        ...

    def describe_shortage(self) -> str:
        """Why this machine may have no room for messages to the hosts; empty if it has room."""
        ...

    async def close(self) -> None:
        """End all hosts within a bounded time."""


class InlineTransport:
    """Hosts in this process, on the current event loop."""

    def __init__(self, hosts: Sequence[HostSpec], *, threads: int) -> None:
        self._threads = threads
        self._hosts = {spec.index: self._make(spec) for spec in hosts}

    def _make(self, spec: HostSpec) -> Host:
        device = "cpu" if spec.device.kind == "cpu" else str(spec.device)
        return Host(spec, device=device, threads=self._threads)

    async def build(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None:
        await self._hosts[host.index].build(roles)

    async def replace(self, hosts: Sequence[HostSpec]) -> Sequence[HostSpec]:
        for host in hosts:
            old, self._hosts[host.index] = self._hosts[host.index], self._make(host)
            with suppress(RollickError):
                await old.close()
        return []

    def remove(self, hosts: Sequence[HostSpec]) -> None:
        """Does nothing: the hosts are this process."""

    async def wait_lost(self, host: HostSpec) -> WorkerLost:
        """Never returns: the host is this process."""
        await asyncio.Event().wait()
        raise AssertionError

    def process_ids(self) -> Mapping[int, int]:
        return {}

    def describe_shortage(self) -> str:
        return ""

    def share(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    async def send(self, host: HostSpec, call: Call, args: tuple[Any, ...]) -> Any:
        # Yields to other tasks, as a call over Ray does. Otherwise a loop over inline calls that
        # never wait would starve them.
        await asyncio.sleep(0)
        return await self._hosts[host.index].call(call, args)

    async def close(self) -> None:
        errors: list[RollickError] = []
        for host in self._hosts.values():
            try:
                await host.close()
            except RollickError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class WorkerGroup:
    """The hosts of a run; create it with `open_group`. Every call ends: it returns its result, or
    raises the role's error, or WorkerLost if the host died or the deadline passed."""

    def __init__(self, device_map: DeviceMap, transport: Transport, deadlines: Deadlines) -> None:
        self.device_map: DeviceMap
        self.deadlines = deadlines
        self.transport = transport
        self._hosts: dict[RoleRank, HostSpec] = {}
        self._set_device_map(device_map)
        self._roles: Sequence[RoleSpec] = ()
        self._collective_locks: defaultdict[frozenset[Device], asyncio.Lock] = defaultdict(
            asyncio.Lock
        )
        self._in_flight: defaultdict[RoleRank, set[_CallDeadline]] = defaultdict(set)
        self._without_state: set[int] = set()
        """Indices of hosts that are being restored; see `restoring`."""
        self.is_closed = False
        self._batch_bytes = 0

    def _set_device_map(self, device_map: DeviceMap) -> None:
        self.device_map = device_map
        self._hosts = {rank: host for host in device_map.hosts() for rank in host.role_ranks}

    def take_batch_bytes(self) -> int:
        """Bytes of the batches sent to ranks, and of the arrays they returned, since the last
        call."""
        num_bytes, self._batch_bytes = self._batch_bytes, 0
        return num_bytes

    async def build(self, roles: Sequence[RoleSpec]) -> None:
        missing = set(self.device_map.roles) - {role.role for role in roles}
        if missing:
            raise WorkerError(f"no RoleSpec for {', '.join(sorted(missing))}")
        await self.build_hosts(self.device_map.hosts(), roles)

    def has_dedicated_host(self, role: RoleName, rank: int) -> bool:
        """Whether a rank is alone on its host, so that the host can be restarted."""
        return len(self._hosts[RoleRank(role, rank)].role_ranks) == 1

    async def restart(self, role: RoleName, rank: int) -> None:
        """Replace the dedicated host of a rank, and build its role there."""
        host = self._hosts[RoleRank(role, rank)]
        if self.is_closed:
            raise WorkerError(f"{host} cannot be restarted: the group of workers is closed")
        if not self.has_dedicated_host(role, rank):
            raise WorkerError(f"{host} cannot be restarted: it has other roles than {role}")
        if await self.transport.replace([host]):
            raise self.no_room_error([host])
        await self.build_hosts([host], self._roles)

    async def build_hosts(self, hosts: Sequence[HostSpec], roles: Sequence[RoleSpec]) -> None:
        """Build the roles of new hosts. Later restarts use these specs too."""
        self._roles = roles
        await _gather([self._build_host(host, roles) for host in hosts])

    def shrink(self, role: RoleName, ranks: Sequence[int]) -> None:
        """Keep only these ranks of a role, and renumber them. Ends hosts without a role."""
        before = self.device_map.hosts()
        self._set_device_map(self.device_map.with_ranks(role, ranks))
        kept = {host.index for host in self.device_map.hosts()}
        self.transport.remove([host for host in before if host.index not in kept])

    @contextmanager
    def restoring(self, hosts: Sequence[HostSpec]) -> Generator[None]:
        """The block replaces these hosts and restores their roles. Until `mark_restored`, also if
        the block fails, calls from outside the block raise WorkerLost."""
        self._without_state |= {host.index for host in hosts}
        token = _RESTORES_HOSTS.set(True)
        try:
            yield
        finally:
            _RESTORES_HOSTS.reset(token)

    def mark_restored(self, hosts: Sequence[HostSpec]) -> None:
        """Allow calls from outside the block of `restoring` again."""
        self._without_state -= {host.index for host in hosts}

    def has_state(self, host: HostSpec) -> bool:
        """Whether the host's roles have their state: False from `restoring` to `mark_restored`."""
        return host.index not in self._without_state

    def no_room_error(self, hosts: Sequence[HostSpec]) -> ClusterUnavailable:
        names = ", ".join(map(str, hosts))
        return ClusterUnavailable(
            f"no machine of the cluster has room for {names}",
            fix="add a machine, free resources, or raise cluster.place_timeout_s; then --resume",
        )

    def worker_processes(self) -> dict[str, int]:
        """Process ids on this machine, by role and rank; empty for workers in this process."""
        pids, hosts = self.transport.process_ids(), self.device_map.hosts()
        return {
            str(role_rank): pids[host.index]
            for host in hosts
            if host.index in pids
            for role_rank in host.role_ranks
        }

    async def _build_host(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None:
        limit_s = self.deadlines.ceiling_s
        for role in host.roles:
            self.deadlines.forget(role)
        try:
            async with asyncio.timeout(limit_s):
                await self.transport.build(host, roles)
        except TimeoutError:
            message = f"{host} did not build its roles within {limit_s:g} s"
            fix = "raise cluster.call_timeout_s if loading really takes that long"
            raise WorkerLost(message, fix=fix) from None

    async def call(
        self, role: RoleName, method: str, *args: Any, rank: int = 0, timeout_s: float | None = None
    ) -> Any:
        return await self._send(Call(role, method), rank, args, args, limit_s=timeout_s)

    async def broadcast(self, role: RoleName, method: str, *args: Any) -> list[Any]:
        """Run a method on every rank of a role, with the same arguments; results by rank."""
        return await self._call_each(role, method, [args] * self.device_map.ranks(role))

    async def scatter(
        self, role: RoleName, method: str, parts: Sequence[Any], *args: Any
    ) -> list[Any]:
        """Run method(parts[rank], *args) on each rank; results by rank. A rank whose part is None
        is skipped, and its result is None. A part of several ranks is copied once."""
        ranks = self.device_map.ranks(role)
        if len(parts) != ranks:
            message = f"{method!r} got {len(parts)} parts for {ranks} ranks of {role}"
            raise WorkerError(message, fix="give one part for each rank; None skips a rank")
        by_part = {id(part): (part, *args) for part in parts if part is not None}
        return await self._call_each(role, method, [by_part.get(id(part)) for part in parts])

    async def _call_each(
        self, role: RoleName, method: str, args_of_ranks: Sequence[tuple[Any, ...] | None]
    ) -> list[Any]:
        by_rank = {rank: args for rank, args in enumerate(args_of_ranks) if args is not None}
        distinct = {id(args): args for args in by_rank.values()}
        shared = {key: self.transport.share(args) for key, args in distinct.items()}
        call = Call(role, method)
        calls = [self._send(call, rank, args, shared[id(args)]) for rank, args in by_rank.items()]
        results = dict(zip(by_rank, await _gather(calls), strict=True))
        return [results.get(rank) for rank in range(len(args_of_ranks))]

    def collective(self, role: RoleName) -> asyncio.Lock:
        """Held while ranks of a role communicate: two such calls in different orders would
        deadlock. Roles on the same devices share it. A trained role also holds it while it trains
        or writes a snapshot."""
        return self._collective_locks[frozenset(self.device_map.roles[role])]

    def abandon(self, role: RoleName, rank: int) -> None:
        """End the calls in flight to a lost rank: they raise WorkerHung."""
        for deadline in self._in_flight[RoleRank(role, rank)]:
            deadline.expire()

    async def _send(
        self,
        call: Call,
        rank: int,
        args: tuple[Any, ...],
        payload: Any,
        *,
        limit_s: float | None = None,
    ) -> Any:
        """`payload`: the arguments, or the result of `share`."""
        if self.is_closed:
            raise WorkerError(f"{call.method!r} was called on a closed group of workers")
        role_rank = RoleRank(call.role, rank)
        host = self._hosts.get(role_rank) or self.device_map.host_of(*role_rank)
        if not self.has_state(host) and not _RESTORES_HOSTS.get():
            raise WorkerLost(f"{role_rank} on {host} was lost, and its state is not restored yet")
        batches = [arg for arg in args if isinstance(arg, (Batch, BatchShare))]
        is_measured, size = limit_s is None, max(1, sum(batch.tokens for batch in batches))
        if limit_s is None:
            limit_s = self.deadlines.limit(call.role, call.method, size=size)
        now = asyncio.get_running_loop().time
        started_at = now()
        deadline = _CallDeadline(limit_s)
        try:
            async with deadline.timeout:
                with deadline.track_in(self._in_flight[role_rank]):
                    result = await self.transport.send(host, call, payload)
        except TimeoutError:
            if not deadline.timeout.expired():
                raise
            waited = f"{now() - started_at:.3g} s" if deadline.abandoned else f"{limit_s:g} s"
            message = f"{role_rank} on {host} did not finish {call.method!r} within {waited}"
            fix = "raise cluster.call_timeout_s if the work really takes that long"
            failed_at = time.time() - (now() - started_at)
            raise WorkerHung(message, fix=fix, failed_at=failed_at) from None
        if is_measured:
            self.deadlines.observe(call.role, call.method, now() - started_at, size=size)
        self._batch_bytes += sum(batch.nbytes for batch in batches) + _array_bytes(result)
        return result

    async def close(self) -> None:
        """Close the roles and end the hosts. Later calls fail."""
        self.is_closed = True
        await self.transport.close()


@dataclass(slots=True, eq=False)
class _CallDeadline:
    """The deadline of a call in flight. When it passes, the call gets GRACE_S more: its reply may
    be unread because the event loop was blocked."""

    limit_s: float
    timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    abandoned: bool = False

    @contextmanager
    def track_in(self, in_flight: set[_CallDeadline]) -> Generator[None]:
        """Start the timer; `in_flight` contains this deadline while the block runs."""
        timer = asyncio.get_running_loop().call_later(self.limit_s, self._end, GRACE_S)
        in_flight.add(self)
        try:
            yield
        finally:
            in_flight.discard(self)
            timer.cancel()

    def expire(self) -> None:
        self.abandoned = True
        self._end(0.0)

    def _end(self, delay_s: float) -> None:
        if not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time() + delay_s)


@asynccontextmanager
async def open_group(
    device_map: DeviceMap,
    roles: Sequence[RoleSpec],
    *,
    cluster: ClusterConfig,
    threads: int,
    env: Mapping[str, str] | None = None,
) -> AsyncGenerator[WorkerGroup]:
    """Start the hosts and build their roles; close them on exit. `env`: additional environment
    variables of worker processes; ignored by the inline backend."""
    hosts = device_map.hosts()
    if cluster.backend == "inline":
        transport: Transport = InlineTransport(hosts, threads=threads)
    else:
        # Imported here, so that an inline run does not load Ray.
        from rollick.cluster.pool import RayTransport
        from rollick.cluster.spares import WorkerPlan

        plan = WorkerPlan(threads, env or {}, modules_of(roles))
        transport = await RayTransport.open(hosts, cluster, plan)
    deadlines = Deadlines(
        cluster.call_timeout_s,
        measured=cluster.backend != "inline",
        on_gpu=any(host.device.kind == "cuda" for host in hosts),
    )
    group = WorkerGroup(device_map, transport, deadlines)
    try:
        await group.build(roles)
        yield group
    except BaseException:
        # A failed close must not hide the first error.
        with suppress(RollickError):
            await group.close()
        raise
    await group.close()


def modules_of(roles: Sequence[RoleSpec]) -> tuple[str, ...]:
    return tuple(sorted({role.target.partition(":")[0] for role in roles}))


async def _gather(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of concurrent calls; the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


def _array_bytes(result: Any) -> int:
    """Bytes of the arrays in a call's result."""
    if isinstance(result, np.ndarray):
        return result.nbytes
    return sum(map(_array_bytes, result)) if isinstance(result, tuple) else 0
