"""The snapshots of a trained role, and the batches that it was trained on since the newest one.

    train -> later_batches -> take() -> restore() in a new process: the newest snapshot
                                        replay(): the later batches again

Two memories alternate, so that one complete snapshot exists while the next is written. A snapshot
counts when all ranks have written it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollick.data.batch import Batch
from rollick.errors import CheckpointError
from rollick.roles.handles import Critic, Policy
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord

LOG = logging.getLogger("rollick")


@dataclass(slots=True, eq=False)
class _Slot:
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
    """The snapshots of one trained role. `handle` must not repair the role itself: `restore` is a
    part of its repair."""

    def __init__(self, handle: Policy | Critic) -> None:
        self.handle = handle
        self.later_batches: list[Batch] = []
        """Batches that the role was trained on after the newest snapshot."""
        self.seconds = 0.0
        """How long it took to write the newest snapshot."""
        self.is_enabled = True
        self.loaded_from: Path | None = None
        """The checkpoint that the role was loaded from: `restore` uses it until there is a
        snapshot. None: the role began as a new process builds it."""
        self._slots = [_Slot(self._new_memories()) for _ in range(2)]
        self._newest: _Slot | None = None

    def _new_memories(self) -> list[SnapshotMemory]:
        role, ranks = self.handle.role, range(self.handle.ranks)
        return [SnapshotMemory.create(f"{role}-{rank}") for rank in ranks]

    async def take(self) -> None:
        """Write a snapshot of the current state. Without memory for it, the run goes on without
        snapshots."""
        if not self.is_enabled:
            return
        now = asyncio.get_running_loop().time
        slot = self._older
        async with slot.in_use:
            if len(slot.memories) != self.handle.ranks:  # The policy continues with fewer ranks.
                slot.close()
                slot.memories = self._new_memories()
            try:
                async with self.handle.group.collective(self.handle.role):
                    # No training is under way: the snapshot contains these batches and no others.
                    begun, contained = now(), len(self.later_batches)
                    slot.records = []  # A write that fails leaves a part of both snapshots.
                    records = await self.handle.write_snapshots(slot.memories)
                slot.records = await self.handle.fetch_snapshots(records, slot.memories)
            except CheckpointError as error:
                text = "no snapshots from now on, so the loss of the %s ends the run: %s"
                LOG.warning(text, self.handle.role, error)
                self.is_enabled, self._newest = False, None
                self.later_batches.clear()
                return
            slot.batches = contained + (self._newest.batches if self._newest else 0)
            self._newest, self.seconds = slot, now() - begun
            del self.later_batches[:contained]

    async def restore(self) -> None:
        """Restore the state of the newest snapshot in new processes; `replay` does the rest."""
        assert self.is_enabled
        if (newest := self._newest) is not None:
            try:
                await self.handle.restore_snapshots(newest.records, newest.memories)
            except CheckpointError:
                self._newest = None  # It is damaged: it must not become a checkpoint either.
                raise
        elif self.loaded_from is not None:
            await self.handle.load(self.loaded_from)

    async def replay(self) -> None:
        """Train on the batches again that the restored snapshot does not contain."""
        for batch in self.later_batches:
            await self.handle.train(batch)

    @property
    def can_roll_back(self) -> bool:
        return self._newest is not None and bool(self._older.records)

    @property
    def _older(self) -> _Slot:
        """The snapshot before the newest one, if it has records; the next one replaces it."""
        return next(slot for slot in self._slots if slot is not self._newest)

    async def roll_back(self) -> int:
        """Restore the snapshot before the newest one, in the same processes. Returns how many
        batches this undoes."""
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
        """The newest snapshot, by rank; it does not change while the block runs. None if it does
        not contain all training."""
        slot = self._newest
        if slot is None or self.later_batches:
            yield None
            return
        async with slot.in_use:
            yield list(zip(slot.memories, slot.records, strict=True))

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
