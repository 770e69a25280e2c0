"""A publish: all engines commit the new version or none does, and no memory leaks."""

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
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.host import LARGE_PAGE
from rollick.weights.channels.shards import ShardSource
from rollick.weights.manifest import WeightManifest
from rollick.weights.plan import Channel, ProcessLocation, Route, process_location
from rollick.weights.receiver import PublishReceiver
from rollick.weights.sender import WeightSender

FIVE, SIX = PolicyVersion(5), PolicyVersion(6)


@dataclass
class CallLog:
    """The calls of the roles, in order, and the failures to inject."""

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
    damaged_rank: int | None = None
    differing_rank: int | None = None
    """This rank returns another fingerprint than that of its weights."""
    refusing_rank: int | None = None
    sharing_ranks: tuple[int, ...] = (0,)
    located_ranks: list[int] = field(default_factory=list[int])
    reset_rank: int | None = None
    """This rank gets a new receiver, without the earlier weights."""


class Learner:
    def __init__(self, log: CallLog) -> None:
        self.log = log
        self.sender = WeightSender()
        self.tensor = torch.ones(1000)

    def process_location(self) -> ProcessLocation:
        return process_location()

    def offer_weights(self, version: PolicyVersion, route: Route) -> WeightManifest:
        self.log.lines.append(f"offer {version} {route.channel}")
        self.tensor[:10] = self.log.value
        device = "meta" if self.log.break_writing else "cpu"
        stream = [("a", self.tensor), ("b", torch.ones(3, device=device))]
        return self.sender.offer(stream, version, route=route)

    def send_weights(self, channel: Channel, shards: ShardSource | None = None) -> None:
        self.sender.send(channel, shards)

    def release_weights(self, outcome: PublishOutcome) -> None:
        self.log.outcomes.append(outcome)
        self.sender.release(outcome)

    def close(self) -> None:
        self.sender.close()


class Receiver:
    def __init__(self, rank: int, log: CallLog) -> None:
        self.rank = rank
        self.log = log
        self.receiver = PublishReceiver(rank=rank, adopts=True)

    def process_location(self) -> ProcessLocation:
        self.log.located_ranks.append(self.rank)
        return process_location(shares_weights=self.rank in self.log.sharing_ranks)

    def receive(self, manifest: WeightManifest) -> Fingerprint:
        if self.log.reset_rank == self.rank:
            self.receiver = PublishReceiver(rank=self.rank, adopts=True)
            self.log.reset_rank = None
        if self.log.damaged_rank == self.rank:
            with open(manifest.source.path, "r+b") as file:
                file.seek(LARGE_PAGE)
                file.write(b"x")
        digest = self.receiver.receive(manifest)
        self.log.lines.append(f"receive {self.rank}")
        return Fingerprint("other") if self.log.differing_rank == self.rank else digest

    def commit(self, version: PolicyVersion, keep_cache: bool = False) -> bool:
        if self.log.refusing_rank == self.rank:
            raise WeightError("the weights do not fit the model")
        weights = self.receiver.take(version)
        self.log.adopted[self.rank] = dict(weights)
        self.log.weights[self.rank] = {name: tensor.clone() for name, tensor in weights}
        kept = " kept" if keep_cache else ""
        self.log.lines.append(f"commit {self.rank} {version}{kept}")
        return weights.persistent

    def commit_shared(self, version: PolicyVersion, keep_cache: bool = False) -> None:
        kept = " kept" if keep_cache else ""
        self.log.lines.append(f"commit_shared {self.rank} {version}{kept}")


def make_learner(context: HostContext, rank: int, log: CallLog) -> Learner:
    return Learner(log)


def make_receiver(context: HostContext, rank: int, log: CallLog) -> Receiver:
    return Receiver(rank, log)


@asynccontextmanager
async def open_test_group(log: CallLog, generators: str) -> AsyncGenerator[WorkerGroup]:
    devices = DeviceMap({"policy": parse_devices("cpu"), "generators": parse_devices(generators)})
    specs = [
        RoleSpec("policy", f"{__name__}:make_learner", (log,)),
        RoleSpec("generators", f"{__name__}:make_receiver", (log,)),
    ]
    cluster = ClusterConfig(backend="inline", call_timeout_s=30)
    async with open_group(devices, specs, cluster=cluster, threads=1) as group:
        yield group


def make_publisher(group: WorkerGroup, **options: Any) -> Publisher:
    return Publisher(Roles(group), WeightsConfig.model_validate({"channel": "host"} | options))


async def test_every_engine_gets_the_setting_that_keeps_caches() -> None:
    log = CallLog()
    async with open_test_group(log, "cpu:0-1") as group:
        await make_publisher(group).publish(FIVE, keep_cache=True)
    assert set(log.lines[2:]) == {"commit 1 5 kept", "commit_shared 0 5 kept"}


async def test_copies_are_offered_received_by_all_and_then_committed() -> None:
    log = CallLog()
    async with open_test_group(log, "cpu:0-2") as group:
        await make_publisher(group).publish(FIVE)
    first, *receives = log.lines[:3]
    assert first == "offer 5 host"
    assert sorted(receives) == ["receive 1", "receive 2"]
    assert sorted(log.lines[3:5]) == ["commit 1 5", "commit 2 5"]
    assert log.lines[5:] == ["commit_shared 0 5"]
    assert log.outcomes == [PublishOutcome(True, adopted={1: True, 2: True})]
    for rank in (1, 2):
        assert torch.equal(log.weights[rank]["b"], torch.ones(3))


async def test_engines_that_all_share_the_learners_storage_need_no_copy() -> None:
    log = CallLog()
    async with open_test_group(log, "cpu:0") as group:
        await Publisher(Roles(group)).publish(FIVE)
    assert log.lines == ["commit_shared 0 5"]


async def test_an_engine_of_the_learners_process_that_does_not_share_gets_its_tensors() -> None:
    log = CallLog(sharing_ranks=(), value=3.0)
    async with open_test_group(log, "cpu:0") as group:
        await Publisher(Roles(group)).publish(FIVE)
    assert log.lines == ["offer 5 direct", "receive 0", "commit 0 5"]
    assert log.weights[0]["a"][0] == 3.0


async def test_if_one_engine_cannot_verify_none_commits() -> None:
    log = CallLog(damaged_rank=2)
    async with open_test_group(log, "cpu:0-2") as group:
        with pytest.raises(WeightError, match="nothing was committed"):
            await make_publisher(group).publish(FIVE)
    assert not [line for line in log.lines if line.startswith("commit")]
    assert log.outcomes == [PublishOutcome(False)]


async def test_engines_that_received_different_weights_do_not_commit() -> None:
    log = CallLog(differing_rank=2)
    async with open_test_group(log, "cpu:0-2") as group:
        with pytest.raises(WeightError, match="with different fingerprints"):
            await make_publisher(group).publish(FIVE)
    assert not [line for line in log.lines if line.startswith("commit")]


async def test_a_failed_commit_raises_its_own_error() -> None:
    log = CallLog(refusing_rank=1)
    async with open_test_group(log, "cpu:0-1") as group:
        with pytest.raises(WeightError, match="do not fit"):
            await make_publisher(group).publish(FIVE)
    assert "commit_shared 0 5" not in log.lines
    assert log.outcomes == [PublishOutcome(None)]


async def test_a_learner_that_fails_while_it_writes_stops_the_publish() -> None:
    log = CallLog(break_writing=True)
    async with open_test_group(log, "cpu:0-1") as group:
        with pytest.raises(WorkerError, match="TypeError"):
            await make_publisher(group).publish(FIVE)
    assert log.lines == ["offer 5 host"]


async def test_lost_generators_are_left_out_and_a_version_can_be_published_once_more() -> None:
    log = CallLog()
    async with open_test_group(log, "cpu:0-2") as group:
        publisher = make_publisher(group)
        await publisher.publish(FIVE)
        log.lines.clear()
        await publisher.publish(FIVE, without=frozenset({2}))
    assert log.lines == ["offer 5 host", "receive 1", "commit 1 5", "commit_shared 0 5"]


async def test_after_a_restarted_engine_was_published_to_alone_the_others_keep_their_weights() -> (
    None
):
    log = CallLog(sharing_ranks=(), value=5.0)
    async with open_test_group(log, "cpu:0-1") as group:
        publisher = make_publisher(group)
        await publisher.publish(FIVE)
        log.reset_rank = 1
        await publisher.publish(FIVE, without=frozenset({0}))
        # The next version is written and cannot be committed: both engines still sample version 5.
        log.value, log.refusing_rank = 6.0, 0
        with pytest.raises(WeightError, match="do not fit"):
            await publisher.publish(SIX, without=frozenset({1}))
    assert [log.adopted[rank]["a"][0].item() for rank in (0, 1)] == [5.0, 5.0]


async def test_the_location_of_a_generator_is_queried_at_its_first_publish() -> None:
    log = CallLog(sharing_ranks=())
    async with open_test_group(log, "cpu:0-2") as group:
        publisher = make_publisher(group, channel="auto")
        await publisher.publish(FIVE, without=frozenset({0, 2}))
        assert log.located_ranks == [1]
        await publisher.publish(FIVE, without=frozenset({1}))
        assert log.located_ranks == [1, 0, 2]
        log.lines.clear()
        await publisher.publish(SIX)
    assert log.located_ranks == [1, 0, 2]
    # All roles are in one process. With a wrong location, the channel would be another.
    assert log.lines[0] == "offer 6 direct"
    assert sorted(log.lines[1:4]) == ["receive 0", "receive 1", "receive 2"]


async def test_a_replaced_generator_is_located_again_and_may_get_another_channel() -> None:
    log = CallLog(sharing_ranks=(0,))
    async with open_test_group(log, "cpu:0-1") as group:
        publisher = make_publisher(group, channel="auto")
        await publisher.publish(FIVE)
        log.sharing_ranks = (0, 1)
        await publisher.publish(FIVE)
        assert log.located_ranks == [0, 1]
        publisher.forget(1)
        log.lines.clear()
        await publisher.publish(SIX)
    assert log.located_ranks == [0, 1, 1]
    assert sorted(log.lines) == ["commit_shared 0 6", "commit_shared 1 6"]


async def test_after_the_first_full_publish_only_changes_are_sent() -> None:
    log = CallLog()
    sizes: list[int] = []
    async with open_test_group(log, "cpu:0-2") as group:
        publisher = make_publisher(group, changes_only=True)
        for step in range(4):
            log.value = 2.0 + step
            await publisher.publish(PolicyVersion(step))
            sizes.append(publisher.transferred_bytes)
            for rank in (1, 2):
                assert log.weights[rank]["a"].tolist() == [2.0 + step] * 10 + [1.0] * 990
    # Ten changed elements of four bytes, each with a gap of one byte.
    assert sizes == [4012, 50, 50, 50]


async def test_a_receiver_without_the_base_of_a_delta_gets_full_weights() -> None:
    log = CallLog()
    async with open_test_group(log, "cpu:0-2") as group:
        publisher = make_publisher(group, changes_only=True)
        await publisher.publish(FIVE)
        log.reset_rank, log.value = 2, 7.0
        await publisher.publish(SIX)
        assert publisher.transferred_bytes == 4012
    assert [outcome.committed for outcome in log.outcomes] == [True, False, True]
    assert all(log.weights[rank]["a"][0] == 7.0 for rank in (1, 2))


async def test_after_a_failed_publish_full_weights_are_sent_again() -> None:
    log = CallLog()
    async with open_test_group(log, "cpu:0-2") as group:
        publisher = make_publisher(group, changes_only=True)
        await publisher.publish(FIVE)
        log.refusing_rank = 1
        with pytest.raises(WeightError, match="do not fit"):
            await publisher.publish(SIX)
        log.refusing_rank, log.value = None, 9.0
        await publisher.publish(SIX)
        assert publisher.transferred_bytes == 4012
    assert all(log.weights[rank]["a"][0] == 9.0 for rank in (1, 2))
