"""The grammar of device lists, such as "0-3,6" or "cpu:0-1".

Pure text: nothing here asks whether a device exists. `rollick.cluster.devices` builds the device
map on top of it.

    list = item {"," item}        item = N | N-M        (GPUs)
                                       | cpu | cpu:N | cpu:N-M    (CPU workers; cpu is cpu:0)
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from rollick.errors import ConfigError

GRAMMAR = "write GPUs as 0, 0-3 or 0-3,6, and CPU workers as cpu, cpu:1 or cpu:0-1"

MAX_DEVICES = 4096
"""More than this in one list is a typing mistake, not a cluster."""

_ITEM = re.compile(r"(?P<prefix>cpu:)?(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One GPU of the cluster, or one CPU worker."""

    kind: Literal["cpu", "cuda"]
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices that `text` lists, in its order. Raises ConfigError for anything else."""
    devices = [device for item in text.split(",") for device in _parse_item(item.strip(), text)]
    repeated = [str(device) for device, count in Counter(devices).items() if count > 1]
    if repeated:
        message = f"the device list {text!r} names {', '.join(repeated)} twice"
        raise ConfigError(message, fix="name each device once")
    return tuple(devices)


def _parse_item(item: str, text: str) -> list[Device]:
    match = _ITEM.fullmatch("cpu:0" if item == "cpu" else item)
    if match is None:
        raise ConfigError(f"{item!r} in the device list {text!r} is not a device", fix=GRAMMAR)
    prefix, first = match["prefix"] or "", int(match["first"])
    last = int(match["last"] or first)
    where = f"the range {item!r} in the device list {text!r}"
    if last < first:
        raise ConfigError(f"{where} runs backwards", fix=f"write it as {prefix}{last}-{first}")
    if last - first >= MAX_DEVICES:
        message = f"{where} has {last - first + 1} devices"
        raise ConfigError(message, fix=f"at most {MAX_DEVICES} are allowed")
    return [Device("cpu" if prefix else "cuda", index) for index in range(first, last + 1)]
