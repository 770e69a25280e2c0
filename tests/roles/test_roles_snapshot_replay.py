"""The batches in the snapshots of a role, and those that a rollback undoes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from rollick.roles.snapshots import RoleSnapshots


class FakeRole:
    """A role whose state is the batches that it was trained on."""

    role, ranks = "policy", 1

    def __init__(self) -> None:
        self.state: list[str] = []
        self.group = SimpleNamespace(collective=lambda role: asyncio.Lock())

    async def train(self, batch: str) -> None:
        self.state.append(batch)

    async def write_snapshots(self, memories: Any) -> list[list[str]]:
        return [list(self.state)]

    async def fetch_snapshots(self, records: list[list[str]], memories: Any) -> list[list[str]]:
        return records

    async def restore_snapshots(self, records: list[list[str]], memories: Any) -> None:
        self.state = list(records[0])


@pytest.fixture
def role() -> FakeRole:
    return FakeRole()


@pytest.fixture
def snapshots(role: FakeRole) -> Iterator[RoleSnapshots]:
    with closing(RoleSnapshots(role)) as snapshots:  # type: ignore[arg-type]
        yield snapshots


async def train(snapshots: RoleSnapshots, batches: str) -> None:
    for batch in batches:
        await snapshots.handle.train(batch)  # type: ignore[arg-type]
        snapshots.later_batches.append(batch)  # type: ignore[arg-type]


async def test_a_rollback_undoes_all_batches_since_the_snapshot_before_the_newest(
    role: FakeRole, snapshots: RoleSnapshots
) -> None:
    await snapshots.take()
    for batches in ("a", "bcd"):
        await train(snapshots, batches)
        await snapshots.take()
    await train(snapshots, "ef")
    assert await snapshots.roll_back() == 5
    assert role.state == ["a"]
    await train(snapshots, "gh")
    await snapshots.take()
    await train(snapshots, "i")
    assert await snapshots.roll_back() == 3
    assert role.state == ["a"]


async def test_a_new_worker_trains_on_the_batches_again_that_its_snapshot_does_not_contain(
    role: FakeRole, snapshots: RoleSnapshots
) -> None:
    await train(snapshots, "a")
    await snapshots.take()
    await train(snapshots, "bc")
    role.state = []
    await snapshots.restore()
    assert role.state == ["a"]
    await snapshots.replay()
    assert role.state == ["a", "b", "c"]
