"""Repairs lost workers, so that calls to them can be retried.

    a call fails, a process ends, or its machine does not answer -> its hosts are replaced
        -> trained roles get their snapshot, and the batches since -> the call is retried

If there is no room for a rank of a sharded policy, the policy continues with fewer ranks.

Hosts that share a sharded role are replaced together, because its ranks form one process group. All
roles of a host are rebuilt. Its generators are lost with it: EngineRestarter connects to the new
ones. A budget limits the repairs of a role between two finished steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    nullcontext,
    suppress,
)
from typing import TypeVar

from rollick.cluster.devices import DeviceMap, HostSpec
from rollick.cluster.worker import RoleSpec
from rollick.data.batch import Batch
from rollick.errors import RollickError, WeightError, WorkerError, WorkerHung, WorkerLost
from rollick.infer.cancellation import cancel_tasks
from rollick.observe.faults import Fault, FaultLog, failure_time, fault_kind
from rollick.observe.goodput import TimeAccount
from rollick.roles.handles import Roles
from rollick.roles.protocols import Role
from rollick.roles.snapshots import RoleSnapshots
from rollick.types import RoleName

LOG = logging.getLogger("rollick")

T = TypeVar("T")

PING_TIMEOUT_S = 10.0
"""How long a health check may take after a failed call."""
SHORTAGE_CHECK_S = 1.0
"""How often to check whether this machine has room for messages to workers."""
SNAPSHOT_SHARE = 0.05
"""Largest share of the time that snapshots may take in a run that does not generate."""
BLOCKS_STEP: frozenset[RoleName] = frozenset({"policy", "critic", "reference", "teacher"})
"""Roles whose calls a step waits for. Other roles are called during generation."""


class WorkerRecovery:
    """Repairs lost workers and retries the calls of handles. Create it with `open`."""

    def __init__(
        self,
        direct: Roles,
        make_specs: Callable[[DeviceMap], Sequence[RoleSpec]],
        *,
        faults: FaultLog,
        goodput: TimeAccount,
        restarts: int,
        replica_ranks: int = 1,
    ) -> None:
        """`direct`: handles without recovery."""
        self.snapshots: dict[RoleName, RoleSnapshots] = {}
        self.on_replaced: Callable[[HostSpec], Awaitable[None]] = _do_nothing
        """Called for each new host after the state of its roles is restored."""
        self._direct = direct
        self._group = direct.group
        self._replica_ranks = replica_ranks
        """Ranks of a sharded policy that share a micro-batch; the policy can only lose them all."""
        self._make_specs = make_specs
        self._faults = faults
        self.goodput = goodput
        self._max_restarts = restarts
        self._restarts_used: Counter[RoleName] = Counter()
        """Restarts of each role since the last finished step."""
        self._repairs: Counter[int] = Counter()
        """Number of replacements of each host, by index."""
        self._failures: dict[RoleName, RollickError] = {}
        """Why roles cannot be repaired, for example because there is no room. Calls to them raise
        these errors: a new process without its state must not be called."""
        self._lock = asyncio.Lock()
        """Held during a repair."""
        self._snapshot_task: asyncio.Task[None] | None = None
        self._snapshots_began_at = 0.0

    @asynccontextmanager
    async def open(self, *, snapshots: bool) -> AsyncGenerator[WorkerRecovery]:
        """Watch all hosts but those with only engines, until the block ends."""
        async with AsyncExitStack() as stack:
            for handle in (self._direct.policy, self._direct.critic) if snapshots else ():
                if handle.ranks:
                    role_snapshots = stack.enter_context(closing(RoleSnapshots(handle)))
                    self.snapshots[handle.role] = role_snapshots
            watched = [host for host in self._group.device_map.hosts() if main_role(host)]
            tasks = [asyncio.create_task(self._watch(h.index), name=str(h)) for h in watched]
            tasks.append(asyncio.create_task(self._warn_of_shortage(), name="room for messages"))
            stack.push_async_callback(cancel_tasks, tasks)
            stack.push_async_callback(self.settle)
            yield self

    async def run(
        self,
        role: RoleName,
        attempt: Callable[[], Awaitable[T]],
        *,
        others: bool = False,
        in_background: bool = False,
    ) -> T:
        """Call the role, and retry after each repair. See RoleHandle.retry."""
        now, num_errors = asyncio.get_running_loop().time, 0
        blocks_step = role in BLOCKS_STEP and not in_background
        account = self.goodput.recovering if blocks_step else _no_account
        while True:
            # Wait for a repair: a call to a new process without its state would fail.
            if not all(map(self._group.has_state, self._hosts_of(role))):
                with account():
                    async with self._lock:
                        pass
            if (failure := self._failures.get(role)) is not None:
                raise failure.copy()
            begun, before = now(), self._count_repairs(self._hosts_of(role))
            try:
                return await attempt()
            except (WorkerError, WeightError) as error:
                if self._group.is_closed or (others and await self._responds(role)):
                    raise
                if isinstance(error, WeightError):  # The receiver noticed the loss first.
                    error = WorkerLost(error.message)
                error = await self._root_cause(role, error, begun_at=time.time() - (now() - begun))
                num_errors += not isinstance(error, WorkerLost)
                if num_errors > 1:  # A new process raised too, so its input is the cause.
                    raise
                with account(lost_s=now() - begun):
                    await self._repair(role, error, before)

    def trained(self, role: RoleName, batch: Batch) -> None:
        """Keep a batch that the role was trained on, so that a repair can train on it again."""
        if role in self.snapshots and self.snapshots[role].is_enabled:
            self.snapshots[role].later_batches.append(batch)

    async def take_snapshots(self, *, in_background: bool = False) -> None:
        """Write a snapshot of each trained role. Repairs roles that are lost meanwhile."""
        for role, snapshots in self.snapshots.items():
            await self.run(role, snapshots.take, in_background=in_background)

    def rollback_obstacle(self) -> str:
        """Why the trained roles cannot go back to earlier snapshots; empty if they can."""
        if not self.snapshots:
            return "there are no snapshots (checkpoint.snapshot, cluster.backend=ray)"
        if not all(snapshots.can_roll_back for snapshots in self.snapshots.values()):
            return "there is no snapshot from before them"
        return ""

    async def roll_back(self, step: int) -> int:
        """Restore the trained roles from the snapshots before the newest ones. Returns how many
        steps this undoes, including the current one, `step`."""
        with self.goodput.recovering():
            await self.settle()
            undone = max(
                [await self.run(role, each.roll_back) for role, each in self.snapshots.items()]
            )
        self.goodput.undo_steps_after(step - undone)
        return undone

    def finish_step(self, *, amortise: bool = False, hold: bool = False) -> None:
        """Reset the budget of repairs, and take snapshots in the background. `amortise`: only if
        they take at most SNAPSHOT_SHARE of the time, because a step that does not generate waits
        for them. `hold`: take none, and keep the existing ones."""
        self._restarts_used.clear()
        if not self.snapshots or hold:
            return
        now, took_s = time.monotonic(), sum(each.seconds for each in self.snapshots.values())
        if amortise and now - self._snapshots_began_at < took_s / SNAPSHOT_SHARE:
            return
        self._snapshots_began_at = now
        if self._snapshot_task is None or self._snapshot_task.done():
            self._snapshot_task = asyncio.create_task(self._take_or_warn(), name="snapshots")

    async def settle(self) -> None:
        """Wait for the snapshots that are being written."""
        if self._snapshot_task is not None:
            await asyncio.wait({self._snapshot_task})

    async def _take_or_warn(self) -> None:
        try:
            await self.take_snapshots(in_background=True)
        except RollickError as error:
            LOG.warning("a snapshot was not written: %s", error)

    def can_repair(self, host: HostSpec) -> bool:
        """Whether the run would survive the loss of the host's process."""
        role = main_role(host)
        if role is None:
            return False
        is_under_way = self._lock.locked() and not self._group.has_state(host)
        return is_under_way or not self._refusal(role, self._hosts_of(role))

    def repairs_of(self, host: HostSpec) -> int:
        return self._repairs[host.index]

    async def repair_host(self, host: HostSpec, error: RollickError, *, repairs: int) -> None:
        """Replace the host, unless it was already replaced more than `repairs` times."""
        role = main_role(host)
        assert role is not None, "EngineRestarter restarts hosts with only engines"
        others = [each for each in self._hosts_of(role) if each != host]
        await self._repair(role, error, {host.index: repairs} | self._count_repairs(others))

    async def _watch(self, index: int) -> None:
        """Repair the host as soon as its process ends, without waiting for the next call."""
        while (host := self._host(index)) and main_role(host):
            repairs = self.repairs_of(host)
            error = await self._group.transport.wait_lost(host)
            if not self.can_repair(host):
                return  # The next call to it raises.
            try:
                await self.repair_host(host, error, repairs=repairs)
            except Exception as error:
                # This task is not awaited; the next call to the host repairs it or raises.
                LOG.warning("%s was not replaced: %s", host, error)
                return

    async def _warn_of_shortage(self) -> None:
        """Warn once if this machine lacks room for messages to workers."""
        while True:
            if shortage := self._group.transport.describe_shortage():
                self._faults.begin("controller", 0, kind="shared_memory", cause=shortage)
                LOG.warning("%s; the run ends if it needs more: free some space", shortage)
                return
            await asyncio.sleep(SHORTAGE_CHECK_S)

    def _host(self, index: int) -> HostSpec | None:
        """The host with this index; None if the policy continues without it."""
        hosts = self._group.device_map.hosts()
        return next((host for host in hosts if host.index == index), None)

    async def _responds(self, role: RoleName) -> bool:
        handle = self._direct.handle(role)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                for rank in range(handle.ranks):
                    await handle.call_rank(rank, Role.peak_memory)
        except (TimeoutError, RollickError):
            return False
        return True

    async def _root_cause(
        self, role: RoleName, error: WorkerError, *, begun_at: float
    ) -> WorkerError:
        """Find the lost rank behind an error of a rank that was connected to it. Returns `error` if
        no rank is lost. `begun_at`: when the failed call began."""
        handle = self._direct.handle(role)
        if not handle.is_sharded or isinstance(error, WorkerLost):
            return error

        now = asyncio.get_running_loop().time
        pinged = now()

        async def ping(rank: int) -> WorkerLost | None:
            with suppress(WorkerError):
                try:
                    await handle.call_rank(rank, Role.machine_id, timeout_s=PING_TIMEOUT_S)
                except WorkerLost as lost:
                    if isinstance(lost, WorkerHung) and now() - pinged >= PING_TIMEOUT_S:
                        lost.failed_at = begun_at  # It hung in the failed call, not in the ping.
                    return lost
            return None

        losses = await asyncio.gather(*map(ping, range(handle.ranks)))
        return next((lost for lost in losses if lost), error)

    async def _repair(self, role: RoleName, error: RollickError, before: Mapping[int, int]) -> None:
        """Replace the hosts of the role, unless their replacement counts differ from `before`.
        Raises the error if that is not possible."""
        async with self._lock:
            if self._count_repairs(self._hosts_of(role)) != before:
                return
            if (failure := self._failures.get(role)) is not None:
                raise failure.copy()
            fault = self._faults.begin(
                *(role, 0),
                kind=fault_kind(error),
                cause=error.message,
                failed_at=failure_time(error),
            )
            lost_roles: list[RoleName] = []
            # A failed attempt may have left the policy with fewer hosts.
            while not (refusal := self._refusal(role, hosts := self._hosts_of(role))):
                self._restarts_used[role] += 1
                LOG.warning("starting a new process for the %s; reason: %s", role, error.message)
                try:
                    with self._group.restoring(hosts):
                        redone = await self._replace(hosts, fault)
                except WorkerError as failed:
                    error, lost_roles = failed, _trained_roles(hosts)
                except RollickError as failed:
                    fault.give_up(failed.message)
                    self._fail([role, *_trained_roles(hosts)], failed)
                    raise
                except BaseException as failed:
                    # For example, a signal ends the step. The next call, such as the last save,
                    # repairs the role.
                    fault.give_up(f"the repair was interrupted: {failed!r}")
                    if isinstance(failed, asyncio.CancelledError):
                        self._restarts_used[role] -= 1
                    raise
                else:
                    lost = self.goodput.claim_lost_time()
                    fault.mark_rejoined(redone_steps=redone, lost=lost)
                    LOG.warning("the %s has recovered", role)
                    return
            fault.give_up(refusal)
            self._fail(lost_roles, error)
            raise error

    def _fail(self, roles: Iterable[RoleName], failure: RollickError) -> None:
        for role in roles:
            self._failures[role] = failure

    def _refusal(self, role: RoleName, hosts: Sequence[HostSpec]) -> str:
        """Why the loss of these hosts cannot be repaired; empty if it can."""
        if role in self._failures:
            return self._failures[role].message
        if self._restarts_used[role] >= self._max_restarts:
            return "the restarts are used up (cluster.restarts)"
        for name in _trained_roles(hosts):
            if name not in self.snapshots:
                return "there are no snapshots (checkpoint.snapshot)"
            if not self.snapshots[name].is_enabled:
                return f"there is no memory for snapshots of the {name}"
        return ""

    async def _replace(self, hosts: Sequence[HostSpec], fault: Fault) -> int:
        """Replace the hosts and restore their roles. Returns the number of repeated steps."""
        missing = await self._group.transport.replace(hosts)
        if missing:
            hosts = self._continue_without(missing, hosts)
        await self._group.build_hosts(hosts, self._make_specs(self._group.device_map))
        fault.mark_restarted()
        snapshots = [self.snapshots[name] for name in _trained_roles(hosts)]
        for each in snapshots:
            await each.restore()
        redone = max((len(each.later_batches) for each in snapshots), default=0)
        with self.goodput.redoing(redone):
            for each in snapshots:
                await each.replay()
        for host in hosts:
            await self.on_replaced(host)
        for host in hosts:
            self._repairs[host.index] += 1
        self._group.mark_restored(hosts)
        return redone

    def _continue_without(
        self, missing: Sequence[HostSpec], hosts: Sequence[HostSpec]
    ) -> list[HostSpec]:
        """Continue without the policy's ranks on `missing`, for which there is no room. Returns the
        remaining hosts. Raises ClusterUnavailable if the policy cannot train without them."""
        placed = [
            host.roles["policy"] for host in hosts if has_only_policy(host) and host not in missing
        ]
        kept = kept_ranks(placed, unit=self._replica_ranks)
        if not kept or not all(map(has_only_policy, missing)):
            raise self._group.no_room_error(missing)
        ranks = self._group.device_map.ranks("policy")
        self._group.shrink("policy", kept)
        message = "the policy continues with %d ranks instead of %d: no machine has room for %s"
        LOG.warning(message, len(kept), ranks, ", ".join(map(str, missing)))
        remaining = {host.index for host in hosts if host not in missing}
        return [host for host in self._group.device_map.hosts() if host.index in remaining]

    def _count_repairs(self, hosts: Sequence[HostSpec]) -> dict[int, int]:
        return {host.index: self._repairs[host.index] for host in hosts}

    def _hosts_of(self, role: RoleName) -> list[HostSpec]:
        """The hosts that must be replaced together if the role is lost."""
        all_hosts = self._group.device_map.hosts()
        hosts = [host for host in all_hosts if role in host.roles]
        roles = {name for host in hosts for name in host.roles}
        sharded = roles & self._group.device_map.sharded
        return [host for host in all_hosts if host in hosts or not sharded.isdisjoint(host.roles)]


def kept_ranks(placed: Sequence[int], *, unit: int) -> list[int]:
    """The ranks with which a sharded policy continues: as many placed ranks as make complete
    replicas of `unit` ranks. Empty if there is no complete replica."""
    return sorted(placed)[: len(placed) // unit * unit]


def main_role(host: HostSpec) -> RoleName | None:
    """The role that represents the host in records; None for hosts with only engines."""
    return next((name for name in host.roles if name not in ("generators", "judge")), None)


def has_only_policy(host: HostSpec) -> bool:
    """Whether the host has a rank of the policy and, besides engines, no other role."""
    return "policy" in host.roles and {*host.roles} <= {"policy", "generators"}


def _trained_roles(hosts: Sequence[HostSpec]) -> list[RoleName]:
    """The roles on these hosts that have state."""
    names = {name for host in hosts for name in host.roles}
    trained: tuple[RoleName, ...] = ("policy", "critic")
    return [name for name in trained if name in names]


def _no_account(*, lost_s: float = 0.0) -> AbstractContextManager[None]:
    """For repairs that no step waits for."""
    return nullcontext()


async def _do_nothing(host: HostSpec) -> None: ...
