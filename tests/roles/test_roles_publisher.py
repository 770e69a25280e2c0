"""A publish: all engines take the new version, or none does, and no memory stays behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rollick.cluster.devices import DeviceMap
from rollick.cluster.group import WorkerGroup, open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig, WeightsConfig
from rollick.errors import WeightError, WorkerError
from rollick.roles.handles import Roles
from rollick.roles.publisher import Publisher
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import LARGE_PAGE
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, ProcessLocation, Route, process_location
from rollick.weights.receiver import PublishReceiver
from rollick.weights.sender import WeightSender

FIVE, SIX = PolicyVersion(5), PolicyVersion(6)


@dataclass
class Diary:
    """What the roles did, in order, and the failures to inject."""

    lines: list[str] = field(default_factory=list[str])
    weights: dict[int, dict[str, torch.Tensor]] = field(
        default_factory=dict[int, dict[str, torch.Tensor]]
    )
    adopted: dict[int, dict[str, torch.Tensor]] = field(
        default_factory=dict[int, dict[str, torch.Tensor]]
    )
    outcomes: list[PublishOutcome] = field(default_factory=list[PublishOutcome])
    value: float = 1.0
    break_writing: bool = False
    damage_for: int | None = None
    refuse_commit_of: int | None = None
    sharing: tuple[int, ...] = (0,)
    asked: list[int] = field(default_factory=list[int])
    forgetful: int | None = None


class Learner:
    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        self.sender = WeightSender()
        self.tensor = torch.ones(1000)

    def process_location(self) -> ProcessLocation:
        return process_location()

    def offer_weights(self, version: PolicyVersion, route: Route) -> WeightManifest:
        self.diary.lines.append(f"offer {version} {route.channel}")
        self.tensor[:10] = self.diary.value
        device = "meta" if self.diary.break_writing else "cpu"
        stream = [("a", self.tensor), ("b", torch.ones(3, device=device))]
        return self.sender.offer(stream, version, route=route)

    def send_weights(self, channel: Channel) -> None:
        self.sender.send(channel)

    def release_weights(self, outcome: PublishOutcome) -> None:
        self.diary.outcomes.append(outcome)
        self.sender.release(outcome)

    def close(self) -> None:
        self.sender.close()


class Receiver:
    def __init__(self, rank: int, diary: Diary) -> None:
        self.rank = rank
        self.diary = diary
        self.receiver = PublishReceiver(rank=rank, adopts=True)

    def process_location(self) -> ProcessLocation:
        self.diary.asked.append(self.rank)
        return process_location(shares_weights=self.rank in self.diary.sharing)

    def receive(self, manifest: WeightManifest) -> None:
        if self.diary.forgetful == self.rank:
            self.receiver = PublishReceiver(rank=self.rank, adopts=True)
            self.diary.forgetful = None
        if self.diary.damage_for == self.rank:
            with open(manifest.source.path, "r+b") as file:
                file.seek(LARGE_PAGE)
                file.write(b"x")
        self.receiver.receive(manifest)
        self.diary.lines.append(f"receive {self.rank}")

    def commit(self, version: PolicyVersion, keep_cache: bool = False) -> bool:
        if self.diary.refuse_commit_of == self.rank:
            raise WeightError("the weights do not fit the model")
        weights = self.receiver.take(version)
        self.diary.adopted[self.rank] = dict(weights)
        self.diary.weights[self.rank] = {name: tensor.clone() for name, tensor in weights}
        kept = " kept" if keep_cache else ""
        self.diary.lines.append(f"commit {self.rank} {version}{kept}")
        return weights.persistent

    def commit_shared(self, version: PolicyVersion, keep_cache: bool = False) -> None:
        kept = " kept" if keep_cache else ""
        self.diary.lines.append(f"commit_shared {self.rank} {version}{kept}")


def make_learner(context: HostContext, rank: int, diary: Diary) -> Learner:
    return Learner(diary)


def make_receiver(context: HostContext, rank: int, diary: Diary) -> Receiver:
    return Receiver(rank, diary)


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


def publisher(group: WorkerGroup, **options: Any) -> Publisher:
    return Publisher(Roles(group), WeightsConfig.model_validate({"channel": "host"} | options))


async def test_every_engine_gets_the_setting_that_keeps_caches() -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-1") as group:
        await publisher(group).publish(FIVE, keep_cache=True)
    assert set(diary.lines[2:]) == {"commit 1 5 kept", "commit_shared 0 5 kept"}


async def test_copies_are_offered_received_by_all_and_then_committed() -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-2") as group:
        await publisher(group).publish(FIVE)
    first, *receives = diary.lines[:3]
    assert first == "offer 5 host"
    assert sorted(receives) == ["receive 1", "receive 2"]
    assert sorted(diary.lines[3:5]) == ["commit 1 5", "commit 2 5"]
    assert diary.lines[5:] == ["commit_shared 0 5"]
    assert diary.outcomes == [PublishOutcome(True, adopted={1: True, 2: True})]
    for rank in (1, 2):
        assert torch.equal(diary.weights[rank]["b"], torch.ones(3))


async def test_engines_that_all_share_the_learners_storage_need_no_copy() -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0") as group:
        await Publisher(Roles(group)).publish(FIVE)
    assert diary.lines == ["commit_shared 0 5"]


async def test_an_engine_of_the_learners_process_that_does_not_share_gets_its_tensors() -> None:
    diary = Diary(sharing=(), value=3.0)
    async with group_of(diary, "cpu:0") as group:
        await Publisher(Roles(group)).publish(FIVE)
    assert diary.lines == ["offer 5 direct", "receive 0", "commit 0 5"]
    assert diary.weights[0]["a"][0] == 3.0


async def test_if_one_engine_cannot_verify_none_commits() -> None:
    diary = Diary(damage_for=2)
    async with group_of(diary, "cpu:0-2") as group:
        with pytest.raises(WeightError, match="nothing was committed"):
            await publisher(group).publish(FIVE)
    assert not [line for line in diary.lines if line.startswith("commit")]
    assert diary.outcomes == [PublishOutcome(False)]


async def test_a_failed_commit_raises_its_own_error() -> None:
    diary = Diary(refuse_commit_of=1)
    async with group_of(diary, "cpu:0-1") as group:
        with pytest.raises(WeightError, match="do not fit"):
            await publisher(group).publish(FIVE)
    assert "commit_shared 0 5" not in diary.lines
    assert diary.outcomes == [PublishOutcome(None)]


async def test_a_learner_that_fails_while_it_writes_stops_the_publish() -> None:
    diary = Diary(break_writing=True)
    async with group_of(diary, "cpu:0-1") as group:
        with pytest.raises(WorkerError, match="TypeError"):
            await publisher(group).publish(FIVE)
    assert diary.lines == ["offer 5 host"]


async def test_lost_generators_are_left_out_and_a_version_can_be_published_once_more() -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-2") as group:
        sync = publisher(group)
        await sync.publish(FIVE)
        diary.lines.clear()
        await sync.publish(FIVE, without=frozenset({2}))
    assert diary.lines == ["offer 5 host", "receive 1", "commit 1 5", "commit_shared 0 5"]


async def test_after_a_restarted_engine_was_published_to_alone_the_others_keep_their_weights() -> (
    None
):
    diary = Diary(sharing=(), value=5.0)
    async with group_of(diary, "cpu:0-1") as group:
        sync = publisher(group)
        await sync.publish(FIVE)
        diary.forgetful = 1
        await sync.publish(FIVE, without=frozenset({0}))
        # The next version is written and cannot be committed: both engines still sample version 5.
        diary.value, diary.refuse_commit_of = 6.0, 0
        with pytest.raises(WeightError, match="do not fit"):
            await sync.publish(SIX, without=frozenset({1}))
    assert [diary.adopted[rank]["a"][0].item() for rank in (0, 1)] == [5.0, 5.0]


async def test_the_location_of_a_generator_is_queried_at_its_first_publish() -> None:
    diary = Diary(sharing=())
    async with group_of(diary, "cpu:0-2") as group:
        sync = publisher(group, channel="auto")
        await sync.publish(FIVE, without=frozenset({0, 2}))
        assert diary.asked == [1]
        await sync.publish(FIVE, without=frozenset({1}))
        assert diary.asked == [1, 0, 2]
        diary.lines.clear()
        await sync.publish(SIX)
    assert diary.asked == [1, 0, 2]
    # The one process of this test: had the place been made up, it would be another channel.
    assert diary.lines[0] == "offer 6 direct"
    assert sorted(diary.lines[1:4]) == ["receive 0", "receive 1", "receive 2"]


async def test_a_replaced_generator_is_located_again_and_may_get_another_channel() -> None:
    diary = Diary(sharing=(0,))
    async with group_of(diary, "cpu:0-1") as group:
        sync = publisher(group, channel="auto")
        await sync.publish(FIVE)
        diary.sharing = (0, 1)
        await sync.publish(FIVE)
        assert diary.asked == [0, 1]
        sync.forget(1)
        diary.lines.clear()
        await sync.publish(SIX)
    assert diary.asked == [0, 1, 1]
    assert sorted(diary.lines) == ["commit_shared 0 6", "commit_shared 1 6"]


async def test_after_the_first_full_publish_only_changes_are_sent() -> None:
    diary = Diary()
    sizes: list[int] = []
    async with group_of(diary, "cpu:0-2") as group:
        sync = publisher(group, changes_only=True)
        for step in range(4):
            diary.value = 2.0 + step
            await sync.publish(PolicyVersion(step))
            sizes.append(sync.transferred_bytes)
            for rank in (1, 2):
                assert diary.weights[rank]["a"].tolist() == [2.0 + step] * 10 + [1.0] * 990
    # Ten changed elements of four bytes, each with a gap of one byte.
    assert sizes == [4012, 50, 50, 50]


async def test_a_receiver_without_the_base_of_a_delta_gets_full_weights() -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-2") as group:
        sync = publisher(group, changes_only=True)
        await sync.publish(FIVE)
        diary.forgetful, diary.value = 2, 7.0
        await sync.publish(SIX)
        assert sync.transferred_bytes == 4012
    assert [outcome.committed for outcome in diary.outcomes] == [True, False, True]
    assert all(diary.weights[rank]["a"][0] == 7.0 for rank in (1, 2))


async def test_after_a_failed_publish_full_weights_are_sent_again() -> None:
    diary = Diary()
    async with group_of(diary, "cpu:0-2") as group:
        sync = publisher(group, changes_only=True)
        await sync.publish(FIVE)
        diary.refuse_commit_of = 1
        with pytest.raises(WeightError, match="do not fit"):
            await sync.publish(SIX)
        diary.refuse_commit_of, diary.value = None, 9.0
        await sync.publish(SIX)
        assert sync.transferred_bytes == 4012
    assert all(diary.weights[rank]["a"][0] == 9.0 for rank in (1, 2))
