"""The controller's handle on its workers: call a rank, all ranks, or each rank with its part.

Owns the life of the hosts (`open_group`), the deadline of every call, and which rank is where.
Does not know what the roles do. Two transports carry the calls:

    WorkerGroup --Call--> InlineTransport --> Host           (this process, this event loop)
                      \\-> RayTransport ----> actor --> Host  (pool.py: one process per host)

Both run the same Host, so a role behaves the same under either.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

from rollick.cluster.devices import DeviceMap, HostSpec, Seat
from rollick.cluster.worker import Call, Host, RoleSpec
from rollick.config.schema import ClusterConfig
from rollick.errors import RollickError, WorkerError
from rollick.types import RoleName


class Transport(Protocol):
    """Carries calls to hosts. Hosts are known by their index."""

    async def build(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None: ...

    async def restart(self, host: HostSpec) -> None:
        """Put a new, empty host where one was; what is left of the old one ends."""
        ...

    def share(self, args: tuple[Any, ...]) -> Any:
        """Make arguments ready to be sent more than once at the cost of one copy."""
        ...

    async def send(self, host: HostSpec, call: Call, shared: Any) -> Any:
        """Run the call there with the shared arguments after its own, and return the result.

        Cancelling stops the wait, and the coroutine on the host; a plain method runs on.
        """
        ...

    async def close(self) -> None:
        """End all hosts within a bounded time."""
        ...


class InlineTransport:
    """Hosts in this process, on the current event loop."""

    def __init__(self, hosts: Sequence[HostSpec], *, threads: int) -> None:
        self._threads = threads
        self._hosts = {spec.index: self._make(spec) for spec in hosts}

    def _make(self, spec: HostSpec) -> Host:
        return Host(spec, device=_inline_device(spec), threads=self._threads)

    async def build(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None:
        await self._hosts[host.index].build(roles)

    async def restart(self, host: HostSpec) -> None:
        old, self._hosts[host.index] = self._hosts[host.index], self._make(host)
        with suppress(RollickError):
            await old.close()

    def share(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    async def send(self, host: HostSpec, call: Call, shared: Any) -> Any:
        # A call on Ray always gives other tasks a turn; without this line an inline call of a
        # coroutine that never waits would not, and a loop over such calls would starve the rest.
        await asyncio.sleep(0)
        return await self._hosts[host.index].call(replace(call, args=(*call.args, *shared)))

    async def close(self) -> None:
        errors: list[RollickError] = []
        for host in self._hosts.values():
            try:
                await host.close()
            except RollickError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _inline_device(spec: HostSpec) -> str:
    return "cpu" if spec.device.kind == "cpu" else str(spec.device)


class WorkerGroup:
    """The hosts of a run. Use it inside `open_group`.

    Every call ends: with its result, with what the role raised, or with a WorkerError when the
    host died or the deadline passed.
    """

    def __init__(
        self, device_map: DeviceMap, transport: Transport, *, call_timeout_s: float
    ) -> None:
        self.device_map = device_map
        self.call_timeout_s = call_timeout_s
        self._transport = transport
        self._hosts = {seat: host for host in device_map.hosts() for seat in host.seats}
        self._roles: Sequence[RoleSpec] = ()
        self._in_step: dict[RoleName, asyncio.Lock] = {}
        self._closed = False

    async def build(self, roles: Sequence[RoleSpec]) -> None:
        """Build the roles of all hosts, side by side."""
        missing = set(self.device_map.roles) - {role.role for role in roles}
        if missing:
            raise WorkerError(f"no RoleSpec says how to build {', '.join(sorted(missing))}")
        hosts = self.device_map.hosts()
        self._roles = roles
        await _together([self._build_host(host, roles) for host in hosts])

    def stands_alone(self, role: RoleName, rank: int) -> bool:
        """Whether the host of a rank has no other role, so that it can be restarted by itself."""
        return len(self._hosts[Seat(role, rank)].seats) == 1

    async def restart(self, role: RoleName, rank: int) -> None:
        """A new host for a rank that stands alone, with its role built anew."""
        host = self._hosts[Seat(role, rank)]
        if self._closed or not self.stands_alone(role, rank):
            raise WorkerError(f"{host} cannot be restarted for its {role} alone")
        await self._transport.restart(host)
        await self._build_host(host, [spec for spec in self._roles if spec.role == role])

    async def _build_host(self, host: HostSpec, roles: Sequence[RoleSpec]) -> None:
        try:
            async with asyncio.timeout(self.call_timeout_s):
                await self._transport.build(host, roles)
        except TimeoutError:
            raise WorkerError(
                f"{host} did not build its roles within {self.call_timeout_s:g} s",
                fix="raise cluster.call_timeout_s if loading really takes that long",
            ) from None

    async def call(
        self,
        role: RoleName,
        method: str,
        *args: Any,
        rank: int = 0,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a method on one rank and wait for its result."""
        return await self._send(Call(role, method, args, kwargs), rank, (), timeout_s)

    async def broadcast(
        self, role: RoleName, method: str, *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Run a method on every rank of a role, with the same arguments; results by rank.

        If one fails, the others are no longer waited for.
        """
        shared = self._transport.share(args)
        ranks = range(self.device_map.ranks(role))
        return await _together(
            [self._send(Call(role, method), rank, shared, timeout_s) for rank in ranks]
        )

    async def together(
        self, role: RoleName, method: str, *args: Any, timeout_s: float | None = None
    ) -> Any:
        """Run a method that all ranks of a role do in step, such as one of a sharded learner; the
        answer is that of rank 0.

        One after another: ranks that got two such calls in different orders would wait for each
        other for ever.
        """
        async with self._in_step.setdefault(role, asyncio.Lock()):
            if self.device_map.ranks(role) == 1:
                return await self.call(role, method, *args, timeout_s=timeout_s)
            return (await self.broadcast(role, method, *args, timeout_s=timeout_s))[0]

    async def scatter(
        self,
        role: RoleName,
        method: str,
        parts: Sequence[Any],
        *args: Any,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Run method(part, *args) with part i on rank i; results by rank.

        A part that is None is not sent, and its result is None.
        """
        ranks = self.device_map.ranks(role)
        if len(parts) != ranks:
            raise WorkerError(
                f"{method!r} got {len(parts)} parts for {ranks} ranks of {role}",
                fix="give one part for each rank; None skips a rank",
            )
        shared = self._transport.share(args)
        sent = [rank for rank, part in enumerate(parts) if part is not None]
        results = await _together(
            [self._send(Call(role, method, (parts[r],)), r, shared, timeout_s) for r in sent]
        )
        by_rank = dict(zip(sent, results, strict=True))
        return [by_rank.get(rank) for rank in range(ranks)]

    async def _send(self, call: Call, rank: int, shared: Any, timeout_s: float | None) -> Any:
        if self._closed:
            raise WorkerError(f"{call.method!r} was called on a closed group of workers")
        host = self._hosts.get(Seat(call.role, rank)) or self.device_map.host_of(call.role, rank)
        limit_s = self.call_timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await self._transport.send(host, call, shared)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise WorkerError(
                f"{call.role} {rank} on {host} did not finish {call.method!r} within {limit_s:g} s",
                fix="raise cluster.call_timeout_s if the work really takes that long",
            ) from None

    async def close(self) -> None:
        """Close the roles and end the hosts. Later calls fail; closing again does nothing."""
        if not self._closed:
            self._closed = True
            await self._transport.close()


@asynccontextmanager
async def open_group(
    device_map: DeviceMap,
    roles: Sequence[RoleSpec],
    *,
    cluster: ClusterConfig,
    threads: int,
    env: Mapping[str, str] | None = None,
) -> AsyncGenerator[WorkerGroup]:
    """Start the hosts, build their roles, and end everything on the way out.

    `env` is the environment that worker processes get on top of their own; with the inline
    backend there are none, and it is not used.
    """
    hosts = device_map.hosts()
    if cluster.backend == "inline":
        transport: Transport = InlineTransport(hosts, threads=threads)
    else:
        # Only here, so that an inline run never loads Ray.
        from rollick.cluster.pool import RayTransport

        transport = await RayTransport.open(hosts, cluster=cluster, threads=threads, env=env or {})
    group = WorkerGroup(device_map, transport, call_timeout_s=cluster.call_timeout_s)
    try:
        await group.build(roles)
        yield group
    except BaseException:
        # The first failure is the root cause; a close that fails after it must not hide it.
        with suppress(RollickError):
            await group.close()
        raise
    await group.close()


async def _together(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of calls that run side by side; the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]
