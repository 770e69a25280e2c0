"""Which generator gets its weights how."""

from __future__ import annotations

import pytest

from rollick.cluster.devices import DeviceMap
from rollick.config.devices import parse_devices
from rollick.config.schema import WeightsConfig
from rollick.errors import ConfigError
from rollick.weights.plan import Place, PublishPlan, Route, plan_publish

HERE = Place("here", 1)


def devices(policy: str, generators: str) -> DeviceMap:
    return DeviceMap({"policy": parse_devices(policy), "generators": parse_devices(generators)})


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
    assert plan_publish(devices(policy, generators)).channels == dict(enumerate(channels))


@pytest.mark.parametrize(
    ("place", "channel"),
    [
        (Place("here", 1, shares=True), "shared"),
        (Place("here", 1), "direct"),
        (Place("here", 2), "host"),
        (Place("there", 1), "broadcast"),
    ],
)
def test_where_a_generator_lives_decides(place: Place, channel: str) -> None:
    plan = plan_publish(devices("cpu:0", "cpu:1"), policy=HERE, generators={0: place})
    assert plan.channels == {0: channel}


def test_the_recipe_may_choose_and_an_engine_that_shares_still_does() -> None:
    config = WeightsConfig(channel="broadcast")
    plan = plan_publish(devices("cpu:0", "cpu:0-1"), config=config)
    assert plan.channels == {0: "shared", 1: "broadcast"}


@pytest.mark.parametrize(
    ("channel", "place", "why"),
    [
        ("host", Place("there", 2), "another machine"),
        ("cuda_ipc", Place("here", 2), "not two processes on GPUs"),
        ("direct", Place("here", 2), "another process"),
    ],
)
def test_a_channel_that_cannot_work_is_refused(channel: str, place: Place, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_publish(
            devices("cpu:0", "cpu:1"),
            policy=HERE,
            generators={0: place},
            config=WeightsConfig.model_validate({"channel": channel}),
        )


def test_only_generators_whose_place_is_known_have_a_channel() -> None:
    plan = plan_publish(devices("cpu:0", "cpu:1-3"), policy=HERE, generators={2: Place("here", 4)})
    assert plan.channels == {2: "host"}
    assert plan_publish(devices("cpu:0", "cpu:1"), policy=HERE, generators={}).channels == {}


def test_routes_are_by_channel_and_deltas_go_where_they_save_something() -> None:
    plan = PublishPlan({0: "shared", 2: "direct", 3: "host", 5: "host"}, delta=True)
    assert (plan.shared, plan.copied) == ((0,), (2, 3, 5))
    assert plan.routes() == (
        Route("direct", (2,), delta=False),
        Route("host", (3, 5), delta=True),
    )
    assert PublishPlan({0: "shared"}).routes() == ()


def test_a_run_without_generators_publishes_to_nobody() -> None:
    assert plan_publish(DeviceMap({"policy": parse_devices("cpu")})) == PublishPlan({})
