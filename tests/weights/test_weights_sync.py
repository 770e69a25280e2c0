"""A publish: all engines take the new version, or none does, and no memory stays behind."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.errors import WeightError, WorkerError
from rollick.types import PolicyVersion
from rollick.weights.channels import host
from rollick.weights.channels.host import (
    WeightManifest,
    read_weights,
    verify_weights,
    write_weights,
)
from rollick.weights.sync import Publisher

FIVE = PolicyVersion(5)


@dataclass
class Diary:
    """What the roles did, in order, and what they are told to do wrong."""

    lines: list[str] = field(default_factory=list[str])
    weights: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    break_writing: bool = False
    damage_for: int | None = None
    refuse_commit_of: int | None = None


class Learner:
    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def write_weights(self, version: PolicyVersion) -> WeightManifest:
        self.diary.lines.append(f"write {version}")
        device = "meta" if self.diary.break_writing else "cpu"
        return write_weights([("a", torch.ones(3)), ("b", torch.ones(3, device=device))], version)


class Receiver:
    def __init__(self, rank: int, diary: Diary) -> None:
        self.rank = rank
        self.diary = diary
        self.received: WeightManifest | None = None

    def receive(self, manifest: WeightManifest) -> None:
        if self.diary.damage_for == self.rank:
            with Path(manifest.path).open("r+b") as file:
                file.write(b"x")
        verify_weights(manifest)
        self.received = manifest
        self.diary.lines.append(f"receive {self.rank}")

    def commit(self, version: PolicyVersion, keep_cache: bool = False) -> None:
        if self.diary.refuse_commit_of == self.rank:
            raise WeightError("the weights do not fit the model")
        assert self.received is not None
        self.diary.weights += [tensor.clone() for _, tensor in read_weights(self.received)]
        kept = " kept" if keep_cache else ""
        self.diary.lines.append(f"commit {self.rank} {version}{kept}")

    def commit_shared(self, version: PolicyVersion, keep_cache: bool = False) -> None:
        kept = " kept" if keep_cache else ""
        self.diary.lines.append(f"commit_shared {self.rank} {version}{kept}")


def make_learner(context: HostContext, rank: int, diary: Diary) -> Learner:
    return Learner(diary)


def make_receiver(context: HostContext, rank: int, diary: Diary) -> Receiver:
    return Receiver(rank, diary)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_shared_folder", lambda: str(tmp_path))
    return tmp_path


def nothing_in(folder: Path) -> bool:
    return not list(folder.iterdir())


@asynccontextmanager
async def group_of(diary: Diary, generators: str) -> AsyncGenerator[WorkerGroup]:
    devices = DeviceMap({"policy": parse_devices("cpu"), "generators": parse_devices(generators)})
    specs = [
        RoleSpec("policy", f"{__name__}:make_learner", (diary,)),
        RoleSpec("generators", f"{__name__}:make_receiver", (diary,)),
    ]
    cluster = ClusterConfig(backend="inline", call_timeout_s=30)
    async with open_group(devices, specs, cluster=cluster, threads=1) as group:
        yield group


async def test_every_engine_is_told_whether_caches_are_kept(folder: Path) -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-1") as group:
        await Publisher(group).publish(FIVE, keep_cache=True)
    assert set(diary.lines[2:]) == {"commit 1 5 kept", "commit_shared 0 5 kept"}


async def test_copies_are_written_received_by_all_and_then_committed(folder: Path) -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-2") as group:
        await Publisher(group).publish(FIVE)
    write, *receives = diary.lines[:3]
    assert write == "write 5"
    assert sorted(receives) == ["receive 1", "receive 2"]
    assert sorted(diary.lines[3:5]) == ["commit 1 5", "commit 2 5"]
    assert diary.lines[5:] == ["commit_shared 0 5"]
    assert all(torch.equal(tensor, torch.ones(3)) for tensor in diary.weights)
    assert nothing_in(folder)


async def test_engines_that_all_share_the_learners_storage_need_no_copy(folder: Path) -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0") as group:
        await Publisher(group).publish(FIVE)
    assert diary.lines == ["commit_shared 0 5"]


async def test_if_one_engine_cannot_verify_nobody_commits(folder: Path) -> None:
    diary = Diary(damage_for=2)
    async with group_of(diary, "cpu:0-2") as group:
        with pytest.raises(WeightError, match="nothing was committed"):
            await Publisher(group).publish(FIVE)
    assert not [line for line in diary.lines if line.startswith("commit")]
    assert nothing_in(folder)


async def test_a_commit_that_fails_is_told_as_it_is(folder: Path) -> None:
    diary = Diary(refuse_commit_of=1)
    async with group_of(diary, "cpu:0-1") as group:
        with pytest.raises(WeightError, match="do not fit"):
            await Publisher(group).publish(FIVE)
    assert "commit_shared 0 5" not in diary.lines
    assert nothing_in(folder)


async def test_a_learner_that_fails_while_it_writes_leaves_nothing_behind(folder: Path) -> None:
    diary = Diary(break_writing=True)
    async with group_of(diary, "cpu:0-1") as group:
        with pytest.raises(WorkerError, match="NotImplementedError"):
            await Publisher(group).publish(FIVE)
    assert diary.lines == ["write 5"]
    assert nothing_in(folder)
