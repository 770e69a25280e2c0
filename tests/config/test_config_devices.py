"""Device lists: the grammar, and the errors for everything else."""

from __future__ import annotations

import pytest

from rollick.config.devices import Device, parse_devices
from rollick.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0", ["cuda:0"]),
        ("0-3,6", ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:6"]),
        ("6,0-1", ["cuda:6", "cuda:0", "cuda:1"]),
        ("3-3", ["cuda:3"]),
        (" 0 , 2 ", ["cuda:0", "cuda:2"]),
        ("cpu", ["cpu:0"]),
        ("cpu:2", ["cpu:2"]),
        ("cpu:0-1", ["cpu:0", "cpu:1"]),
        ("cpu,cpu:1,0", ["cpu:0", "cpu:1", "cuda:0"]),
    ],
)
def test_a_device_list_names_these_devices(text: str, devices: list[str]) -> None:
    assert [str(device) for device in parse_devices(text)] == devices


@pytest.mark.parametrize(
    "text", ["", "x", "0-", "-1", "0,", "cpu:", "cpu3", "cpu-1", "1.5", "0 1", "cpu:0-", "²", "٣"]
)
def test_an_invalid_device_list_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a device. write GPUs as 0, 0-3 or 0-3,6"):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "fix"), [("3-1", "1-3"), ("cpu:3-1", "cpu:1-3"), ("0,003-001", "1-3")]
)
def test_a_backward_range_is_refused_with_the_corrected_range(text: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text)
    assert caught.value.fix == f"write it as {fix}"


@pytest.mark.parametrize("text", ["0,0", "0-3,2", "cpu,cpu:0"])
def test_a_device_may_be_named_once(text: str) -> None:
    with pytest.raises(ConfigError, match="twice"):
        parse_devices(text)


def test_a_range_of_millions_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="at most 4096"):
        parse_devices("0-9999999")


def test_devices_have_an_order_and_can_be_keys() -> None:
    assert sorted({Device("cuda", 1), Device("cpu", 2), Device("cuda", 0)}) == [
        Device("cpu", 2),
        Device("cuda", 0),
        Device("cuda", 1),
    ]
