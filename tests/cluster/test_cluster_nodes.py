"""Placement of the hosts of a lost machine, and the ranks with which a policy continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from rollick.cluster import node_watch
from rollick.cluster.devices import DeviceMap, HostSpec
from rollick.cluster.node_watch import ClusterNode, NodeWatch, plan_placement
from rollick.config.devices import parse_devices
from rollick.errors import NodeLost
from rollick.roles.worker_recovery import kept_ranks


def hosts(devices: str) -> tuple[HostSpec, ...]:
    return DeviceMap({"generators": parse_devices(devices)}).hosts()


A, B = ClusterNode("a", cpus=1), ClusterNode("b", cpus=2)
GPU, GPUS = ClusterNode("g", cpus=8, gpus=1), ClusterNode("h", cpus=4, gpus=4)


@pytest.mark.parametrize(
    ("devices", "nodes", "cpus", "before", "placed"),
    [
        pytest.param("cpu:0", [A, B], 1, {}, {0: "b"}, id="most room"),
        pytest.param("cpu:0-2", [A, B], 1, {}, {0: "b", 1: "a", 2: "b"}, id="one after the other"),
        pytest.param("cpu:0-3", [A, B], 1, {}, {0: "b", 1: "a", 2: "b"}, id="no room for the last"),
        pytest.param("cpu:0", [A, B], 3, {}, {}, id="no room at all"),
        pytest.param("cpu:0", [], 0, {}, {}, id="no machine"),
        pytest.param("cpu:0", [A, B], 1, {0: "a"}, {0: "a"}, id="its own machine answers"),
        pytest.param(
            "cpu:0", [ClusterNode("a")], 1, {0: "a"}, {0: "a"}, id="its room is not free yet"
        ),
        pytest.param("cpu:0", [B], 1, {0: "a"}, {0: "b"}, id="its own machine is lost"),
        pytest.param("0", [B, GPU, GPUS], 1, {}, {0: "h"}, id="a GPU"),
        pytest.param("0", [A, B], 0, {}, {}, id="no GPU"),
        pytest.param("cpu:0", [GPU, B], 1, {}, {0: "b"}, id="leaves the GPUs to others"),
    ],
)
def test_hosts_go_to_machines_with_room(
    devices: str,
    nodes: list[ClusterNode],
    cpus: float,
    before: Mapping[int, str],
    placed: Mapping[int, str],
) -> None:
    assert plan_placement(hosts(devices), nodes, cpus=cpus, before=before) == placed


@pytest.mark.parametrize(
    ("placed", "unit", "kept"),
    [
        ([1, 0, 3], 1, [0, 1, 3]),
        ([0, 1, 3], 2, [0, 1]),
        ([2], 2, []),
        ([], 1, []),
        ([0, 2, 4, 5, 6], 4, [0, 2, 4, 5]),
    ],
)
def test_a_policy_continues_with_complete_replicas(
    placed: list[int], unit: int, kept: list[int]
) -> None:
    assert kept_ranks(placed, unit=unit) == kept


def test_hosts_keep_their_index_when_a_policy_loses_ranks() -> None:
    full = DeviceMap({"policy": parse_devices("cpu:0-2"), "generators": parse_devices("cpu:1-3")})
    fewer = full.with_ranks("policy", [1, 2])
    assert [(host.index, dict(host.roles)) for host in fewer.hosts()] == [
        (1, {"policy": 0, "generators": 0}),
        (2, {"policy": 1, "generators": 1}),
        (3, {"generators": 2}),
    ]
    smallest = fewer.with_ranks("policy", [1])
    assert [host.index for host in smallest.hosts()] == [1, 2, 3]
    assert smallest.host_of("policy", 0).index == 2


class FakeRay:
    """A cluster of the controller's machine and another, which replies to `beats` heartbeats."""

    def __init__(self, beats: int) -> None:
        self.beats_left = beats
        self.beat = SimpleNamespace(remote=self._beat)
        self.last_beat_at = 0.0

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: "controller")

    def kill(self, sentinel: object) -> None: ...

    async def _beat(self) -> None:
        self.beats_left -= 1
        if self.beats_left < 0:
            await asyncio.Event().wait()
        self.last_beat_at = time.time()


async def test_a_silent_machine_failed_when_it_last_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(beats=3)
    fakes = {"ray": ray, "_create_sentinel": lambda node: ray, "_read_nodes": lambda: ([], {})}
    for name, value in {**fakes, "BEAT_S": 0.01, "SILENT_S": 0.5}.items():
        monkeypatch.setattr(node_watch, name, value)
    watch = NodeWatch()
    watch.watch("other")
    with pytest.raises(NodeLost) as lost:
        async with watch.fail_if_silent("other"):
            await asyncio.sleep(30)
    watch.close()
    assert lost.value.failed_at == pytest.approx(ray.last_beat_at, abs=0.1)
    assert time.time() - ray.last_beat_at >= 0.5
