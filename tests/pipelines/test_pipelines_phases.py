"""Which ranks sleep in a phase."""

from __future__ import annotations

from rollick.cluster.devices import DeviceMap, Phase, PhasePlan, RoleRank
from rollick.cluster.group import open_group
from rollick.cluster.worker import HostContext, RoleSpec
from rollick.config.devices import parse_devices
from rollick.config.schema import ClusterConfig
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
