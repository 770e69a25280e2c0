"""Typed calls to the workers of a role: the base class of all handles.

Pass a method as the Protocol's function (`call_collective(PolicyRole.train, batch)`), so that its
arguments and its result are type-checked. The WorkerGroup gets the function's name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple

from rollick.cluster.group import WorkerGroup
from rollick.data.batch import Batch
from rollick.roles.protocols import Role
from rollick.trainer.parallel.shares import BatchSplit, SplitPlan
from rollick.types import RoleName

if TYPE_CHECKING:
    from rollick.roles.worker_recovery import WorkerRecovery

EVEN_SPLIT = BatchSplit()

W = TypeVar("W", bound=Role)
A = TypeVar("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class RoleHandle(Generic[W]):
    """The workers of one role, whose Protocol is W. Without `recovery`, a lost worker is an error
    of the call. `batch_split`: how the ranks divide a batch."""

    def __init__(
        self,
        group: WorkerGroup,
        role: RoleName,
        recovery: WorkerRecovery | None = None,
        *,
        batch_split: BatchSplit = EVEN_SPLIT,
    ) -> None:
        self.group = group
        self.role: RoleName = role
        self.recovery = recovery
        self.batch_split = batch_split

    async def retry(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        others: bool = False,
        in_background: bool = False,
    ) -> T:
        """Make the call, and retry it after a lost worker was repaired. `others`: the call also
        reaches other roles, which may be the ones that failed. `in_background`: no step waits for
        the call, so the time of a repair does not count as lost."""
        if self.recovery is None:
            return await attempt()
        return await self.recovery.run(
            self.role, attempt, others=others, in_background=in_background
        )

    @property
    def ranks(self) -> int:
        """Number of workers; 0 if the run does not have the role."""
        return self.group.device_map.ranks(self.role)

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks have parts of one model, so that they communicate."""
        return self.role in self.group.device_map.sharded

    async def sleep(self, rank: int) -> None:
        await self.retry(lambda: self.call_rank(rank, Role.sleep))

    async def wake(self, rank: int) -> None:
        await self.retry(lambda: self.call_rank(rank, Role.wake))

    async def peak_memory(self, rank: int) -> int:
        """Peak bytes of the worker's process since the role's construction began."""
        return await self.retry(lambda: self.call_rank(rank, Role.peak_memory))

    async def call_rank(
        self,
        rank: int,
        method: Callable[[W, *Ts], Awaitable[T] | T],
        *args: *Ts,
        timeout_s: float | None = None,
    ) -> T:
        """Call one rank, within `timeout_s` if given, else within the group's deadline."""
        name = method.__name__
        return await self.group.call(self.role, name, *args, rank=rank, timeout_s=timeout_s)

    async def call_all(self, method: Callable[[W], Awaitable[T] | T]) -> list[T]:
        return await self.group.broadcast(self.role, method.__name__)

    async def call_collective(self, method: Callable[[W, *Ts], Awaitable[T] | T], *args: *Ts) -> T:
        """Call all ranks of a sharded role with the same arguments. Returns rank 0's result."""
        async with self.group.collective(self.role):
            if self.ranks == 1:
                return await self.call_rank(0, method, *args)
            return (await self.group.broadcast(self.role, method.__name__, *args))[0]

    async def scatter(
        self, method: Callable[[W, A, *Ts], Awaitable[T] | T], parts: Sequence[A | None], *args: *Ts
    ) -> list[T | None]:
        """Call rank i with part i. A rank whose part is None is skipped, and its result is None."""
        return await self.group.scatter(self.role, method.__name__, parts, *args)

    async def scatter_collective(
        self, method: Callable[[W, A], Awaitable[T] | T], parts: Sequence[A]
    ) -> list[T]:
        """As `scatter`, for a method whose ranks communicate. One such call at a time."""
        async with self.group.collective(self.role):
            return await self.group.scatter(self.role, method.__name__, parts)

    async def split(
        self, method: Callable[[W, Batch], Awaitable[T] | T], batch: Batch
    ) -> tuple[Sequence[T | None], SplitPlan]:
        """Call the ranks, each with its part of the batch. Returns the result of each replica (None
        for an empty part), and the plan that restores the order of the batch."""
        if self.is_sharded:
            return await self.split_collective(method, batch)
        plan = self.batch_split.plan(batch, ranks=self.ranks)
        parts = [_part(batch, rows) if rows else None for rows in plan]
        return await self.scatter(method, parts), plan

    async def split_collective(
        self, method: Callable[[W, Batch], Awaitable[T] | T], batch: Batch
    ) -> tuple[list[T], SplitPlan]:
        """As `split`, for a method whose ranks communicate: ranks without rows are called too.
        Returns one result for each replica."""
        size = self.batch_split.ranks_per_replica
        plan = self.batch_split.plan(batch, ranks=self.ranks)
        parts = [part for rows in plan for part in [_part(batch, rows)] * size]
        return (await self.scatter_collective(method, parts))[::size], plan


AnyHandle = RoleHandle[Any]


def _part(batch: Batch, rows: Sequence[int]) -> Batch:
    """The rows of a batch; the batch itself, not a copy, if these are all its rows."""
    return batch if len(rows) == batch.rows else batch.take(rows)
