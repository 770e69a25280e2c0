"""The channel by which each generator gets its weights."""

from __future__ import annotations

import pytest

from rollick.cluster.devices import DeviceMap
from rollick.config.devices import parse_devices
from rollick.config.schema import WeightsConfig
from rollick.errors import ConfigError
from rollick.weights.plan import ProcessLocation, PublishPlan, Route, plan_publish

HERE = ProcessLocation("here", 1)


def make_device_map(policy: str, generators: str) -> DeviceMap:
    return DeviceMap({"policy": parse_devices(policy), "generators": parse_devices(generators)})


def plan_on_one_machine(device_map: DeviceMap, *, channel: str = "auto") -> PublishPlan:
    """One process per device; generators on the policy's device share its parameters."""
    shares = [device_map.shares_weights(r) for r in range(device_map.ranks("generators"))]
    locations = {
        rank: ProcessLocation("", 0 if own else 1 + rank, own) for rank, own in enumerate(shares)
    }
    return make_plan(device_map, locations, learner=ProcessLocation("", 0), channel=channel)


def make_plan(
    device_map: DeviceMap,
    generators: dict[int, ProcessLocation],
    *,
    learner: ProcessLocation = HERE,
    channel: str = "auto",
) -> PublishPlan:
    config = WeightsConfig.model_validate({"channel": channel})
    return plan_publish(device_map, learner=learner, generators=generators, config=config)


@pytest.mark.parametrize(
    ("policy", "generators", "channels"),
    [
        ("cpu:0", "cpu:0", ("shared",)),
        ("cpu:0", "cpu:1", ("host",)),
        ("cpu:0", "cpu:0-2", ("shared", "host", "host")),
        ("cpu:1", "cpu:0-2", ("host", "shared", "host")),
        ("0", "0-1", ("shared", "cuda_ipc")),
        ("cpu:0", "0", ("host",)),
    ],
)
def test_on_one_machine_the_device_map_decides(
    policy: str, generators: str, channels: tuple[str, ...]
) -> None:
    channels_by_rank = dict(enumerate(channels))
    assert plan_on_one_machine(make_device_map(policy, generators)).channels == channels_by_rank


@pytest.mark.parametrize(
    ("place", "channel"),
    [
        (ProcessLocation("here", 1, shares_weights=True), "shared"),
        (ProcessLocation("here", 1), "direct"),
        (ProcessLocation("here", 2), "host"),
        (ProcessLocation("there", 1), "broadcast"),
    ],
)
def test_the_location_of_a_generator_decides_its_channel(
    place: ProcessLocation, channel: str
) -> None:
    assert make_plan(make_device_map("cpu:0", "cpu:1"), {0: place}).channels == {0: channel}


def test_the_recipe_may_choose_and_an_engine_that_shares_still_does() -> None:
    chosen = plan_on_one_machine(make_device_map("cpu:0", "cpu:0-1"), channel="broadcast")
    assert chosen.channels == {0: "shared", 1: "broadcast"}


@pytest.mark.parametrize(
    ("channel", "place", "why"),
    [
        ("host", ProcessLocation("there", 2), "another machine"),
        ("cuda_ipc", ProcessLocation("here", 2), "not two processes on GPUs"),
        ("direct", ProcessLocation("here", 2), "another process"),
    ],
)
def test_a_channel_that_cannot_work_is_refused(
    channel: str, place: ProcessLocation, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_plan(make_device_map("cpu:0", "cpu:1"), {0: place}, channel=channel)


def test_only_generators_with_a_known_location_have_a_channel() -> None:
    assert make_plan(
        make_device_map("cpu:0", "cpu:1-3"), {2: ProcessLocation("here", 4)}
    ).channels == {2: "host"}
    assert make_plan(make_device_map("cpu:0", "cpu:1"), {}).channels == {}


def test_routes_are_by_channel_and_deltas_go_where_they_save_something() -> None:
    mixed = PublishPlan({0: "shared", 2: "direct", 3: "host", 5: "host"}, send_deltas=True)
    assert mixed.shared_ranks == (0,)
    assert mixed.routes() == (
        Route("direct", (2,), send_delta=False),
        Route("host", (3, 5), send_delta=True),
    )
    assert PublishPlan({0: "shared"}).routes() == ()


def test_a_run_without_generators_publishes_nothing() -> None:
    assert plan_on_one_machine(DeviceMap({"policy": parse_devices("cpu")})) == PublishPlan({})
