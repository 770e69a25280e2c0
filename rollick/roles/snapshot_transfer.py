"""Snapshots of workers on another machine than the controller: their bytes are sent in parts.

    fetch_snapshot    after a rank has written one: from its memory to the controller's
    send_snapshots    before a new rank restores some: from the controller's memory to its own

On the controller's machine a worker maps the controller's memory, and nothing is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rollick.cluster.machine import machine_id
from rollick.errors import CheckpointError
from rollick.roles.calls import RoleHandle
from rollick.roles.protocols import TrainedRole
from rollick.trainer.snapshot import SnapshotMemory, SnapshotRecord

PART_BYTES = 32 << 20

Trained = TypeVar("Trained", bound=TrainedRole)


async def fetch_snapshot(
    handle: RoleHandle[Trained], rank: int, record: SnapshotRecord, memory: SnapshotMemory
) -> SnapshotRecord:
    """Copy a rank's snapshot into the controller's memory, if it is not there. Returns its record.
    Raises CheckpointError without room for it."""
    if record.path == memory.path:
        return record
    memory.truncate(record.bytes)
    for offset in range(0, record.bytes, PART_BYTES):
        part = await handle.call_rank(
            rank, TrainedRole.read_snapshot_part, record.path, offset, PART_BYTES
        )
        try:
            await asyncio.to_thread(memory.write, offset, part)
        except OSError as error:
            raise CheckpointError(
                f"no memory for a snapshot of {record.bytes / 1e9:.2f} GB: {error}",
                fix="free memory of the controller's machine, or set checkpoint.snapshot=false",
            ) from error
    return replace(record, path=memory.path)


async def send_snapshots(
    handle: RoleHandle[Trained],
    rank: int,
    pairs: Sequence[tuple[SnapshotRecord, SnapshotMemory]],
) -> list[SnapshotRecord]:
    """Send a rank the snapshots that it needs, if it cannot map them. Returns their records."""
    if await handle.call_rank(rank, TrainedRole.machine) == machine_id():
        return [record for record, _ in pairs]
    return [await _send(handle, rank, record, memory) for record, memory in pairs]


async def _send(
    handle: RoleHandle[Trained], rank: int, record: SnapshotRecord, memory: SnapshotMemory
) -> SnapshotRecord:
    path = ""
    for offset in range(0, record.bytes, PART_BYTES):
        part = await asyncio.to_thread(memory.read, offset, PART_BYTES)
        path = await handle.call_rank(
            rank, TrainedRole.receive_snapshot_part, record.path, offset, part
        )
    return replace(record, path=path)
