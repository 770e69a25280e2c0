"""The snapshots of a trained role, and the batches that it was trained on since the newest one.

    train -> later_batches -> take() -> restore() in a new process: the newest snapshot
                                        replay(): train on the later batches again

Snapshots are double-buffered, so that a complete one exists while the next is written. A snapshot
is valid when all ranks have written it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollick.data.batch import Batch
from rollick.errors import CheckpointError, OpenFilesExhausted, open_files_exhausted
from rollick.roles.handles import Critic, Policy
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord

LOG = logging.getLogger("rollick")


@dataclass(slots=True, eq=False)
class _SnapshotBuffer:
    """Memory for one snapshot of all ranks."""

    memories: list[SnapshotMemory]
    records: list[SnapshotRecord] = field(default_factory=list[SnapshotRecord])
    in_use: asyncio.Lock = field(default_factory=asyncio.Lock)
    batches: int = 0
    """How many batches of this process the snapshot contains."""

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class RoleSnapshots:
    """The snapshots of one trained role. `handle` must be without recovery, because `restore` is
    a part of the recovery."""

    def __init__(self, handle: Policy | Critic) -> None:
        self.handle = handle
        self.later_batches: list[Batch] = []
        """Batches that the role was trained on after the newest snapshot."""
        self.seconds = 0.0
        """Time it took to write the newest snapshot."""
        self.is_enabled = True
        self.loaded_from: Path | None = None
        """The checkpoint that the role was loaded from, which `restore` uses until there is a
        snapshot. None: the role started from its initial state."""
        self._buffers = [_SnapshotBuffer(self._new_memories()) for _ in range(2)]
        self._newest: _SnapshotBuffer | None = None

    def _new_memories(self) -> list[SnapshotMemory]:
        """Memory for each rank. Raises OpenFilesExhausted or CheckpointError if it cannot be
        created."""
        memories: list[SnapshotMemory] = []
        try:
            for rank in range(self.handle.ranks):
                memories.append(SnapshotMemory.create(f"{self.handle.role}-{rank}"))
        except OSError as error:
            for memory in memories:
                memory.close()
            raise open_files_exhausted(error) or CheckpointError(
                f"no memory for a snapshot: {error}", fix="set checkpoint.snapshot=false"
            ) from error
        return memories

    async def take(self) -> None:
        """Write a snapshot of the current state. If there is no memory for it, the run continues
        without snapshots."""
        if not self.is_enabled:
            return
        now = asyncio.get_running_loop().time
        buffer = self._older
        async with buffer.in_use:
            try:
                if len(buffer.memories) != self.handle.ranks:  # The policy has lost ranks.
                    buffer.close()
                    buffer.memories = []
                    buffer.memories = self._new_memories()
                async with self.handle.group.collective(self.handle.role):
                    # No training is under way: the snapshot contains these batches and no others.
                    begun, contained = now(), len(self.later_batches)
                    buffer.records = []  # A write that fails leaves a part of both snapshots.
                    records = await self.handle.write_snapshots(buffer.memories)
                buffer.records = await self.handle.fetch_snapshots(records, buffer.memories)
            except (CheckpointError, OpenFilesExhausted) as error:
                message = "no snapshots from now on, so the loss of the %s ends the run: %s"
                LOG.warning(message, self.handle.role, error)
                self.is_enabled, self._newest = False, None
                self.later_batches.clear()
                return
            buffer.batches = contained + (self._newest.batches if self._newest else 0)
            self._newest, self.seconds = buffer, now() - begun
            del self.later_batches[:contained]

    async def restore(self) -> None:
        """Restore the newest snapshot in new processes; call `replay` afterwards."""
        assert self.is_enabled
        if (newest := self._newest) is not None:
            try:
                await self.handle.restore_snapshots(newest.records, newest.memories)
            except CheckpointError:
                self._newest = None  # Damaged: it must not become a checkpoint either.
                raise
        elif self.loaded_from is not None:
            await self.handle.load(self.loaded_from)

    async def replay(self) -> None:
        """Train again on the batches that the restored snapshot does not contain."""
        for batch in self.later_batches:
            await self.handle.train(batch)

    @property
    def can_roll_back(self) -> bool:
        return self._newest is not None and bool(self._older.records)

    @property
    def _older(self) -> _SnapshotBuffer:
        """The snapshot before the newest one, if it has records; the next one replaces it."""
        return next(buffer for buffer in self._buffers if buffer is not self._newest)

    async def roll_back(self) -> int:
        """Restore the snapshot before the newest one in the same processes. Returns the number of
        undone batches."""
        assert self._newest is not None
        assert self.can_roll_back, "there are two snapshots"
        older = self._older
        async with older.in_use:
            await self.handle.restore_snapshots(older.records, older.memories)
        undone = self._newest.batches + len(self.later_batches) - older.batches
        self._newest = older
        self._older.records = []
        self.later_batches.clear()
        return undone

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[list[tuple[SnapshotMemory, SnapshotRecord]] | None]:
        """Yield the newest snapshot, by rank, and keep it from changing during the block. Yields
        None if it does not contain all training."""
        buffer = self._newest
        if buffer is None or self.later_batches:
            yield None
            return
        async with buffer.in_use:
            yield list(zip(buffer.memories, buffer.records, strict=True))

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
