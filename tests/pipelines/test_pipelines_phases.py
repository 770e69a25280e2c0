"""The ranks that are paused or asleep in a phase."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollick.cluster.devices import DeviceMap, Phase, PhasePlan, RoleRank
from rollick.cluster.group import open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
from rollick.errors import WorkerLost
from rollick.pipelines.phases import Residency
from rollick.roles.handles import Roles


class Sleeper:
    is_asleep = False

    def sleep(self) -> None:
        self.is_asleep = True

    def wake(self) -> None:
        self.is_asleep = False


RANKS: dict[int, Sleeper] = {}


def create(context: HostContext, rank: int) -> Sleeper:
    RANKS[rank] = Sleeper()
    return RANKS[rank]


async def test_a_policy_with_fewer_ranks_sleeps_and_wakes_with_these() -> None:
    sleeps = tuple(RoleRank("policy", rank) for rank in range(2))
    plans = {
        "generate": PhasePlan(Phase("generate", ()), sleeps=sleeps),
        "train": PhasePlan(Phase("train", ("policy",))),
    }
    devices = DeviceMap({"policy": parse_devices("cpu:0-1")})
    specs = [RoleSpec("policy", f"{__name__}:create")]
    cluster = ClusterConfig(backend="inline")
    async with open_group(devices, specs, cluster=cluster, threads=1) as group:
        residency = Residency(Roles(group), plans)
        await residency.enter("generate")
        assert [RANKS[rank].is_asleep for rank in range(2)] == [True, True]
        group.shrink("policy", [0])
        await residency.enter("train")
        assert not RANKS[0].is_asleep
        await residency.enter("generate")
        assert RANKS[0].is_asleep


class LostGenerators:
    """One engine, in a process with the policy, that has just been killed."""

    lost_ranks: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.engines = [self]

    async def pause(self, rank: int) -> None:
        raise WorkerLost("host 0 was lost")

    async def health_check(self) -> None:
        self.lost_ranks = frozenset({0})


async def test_an_engine_that_died_with_the_policy_does_not_end_the_phase_that_pauses_it() -> None:
    """The policy's next call repairs the host, and `restore_generator` pauses the new engine."""
    roles: Any = SimpleNamespace(generators=LostGenerators())
    residency = Residency(roles, {"train": PhasePlan(Phase("train", ("policy",)), pauses=(0,))})
    await residency.enter("train")
    assert residency.paused == {0}
