"""Plans a publish: the channel to each generator, from the locations of learner and generators.

generator's location                       channel     what is transferred
the learner's process, shared parameters   shared      nothing
the learner's process, its own weights     direct      references to the learner's tensors
the same machine, GPUs, unsharded learner  cuda_ipc    the learner's GPU memory, mapped
the same machine                           host        memory that both processes map
another machine                            broadcast   all bytes, by torch.distributed
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rollick.cluster.devices import DeviceMap
from rollick.cluster.machine import machine_id
from rollick.config.schema import WeightsConfig
from rollick.errors import ConfigError

Channel = Literal["shared", "direct", "host", "cuda_ipc", "broadcast"]


@dataclass(frozen=True, slots=True)
class ProcessLocation:
    """Where a role runs. Processes on one machine can map each other's memory."""

    machine: str
    process: int
    shares: bool = False
    """Of a generator: whether its engine shares the learner's parameters."""
    adapters: bool = False
    """Of a learner: whether it trains adapters. Of a generator: whether its engine merges them."""


def process_location(*, shares: bool = False, adapters: bool = False) -> ProcessLocation:
    """The location of this process."""
    return ProcessLocation(machine_id(), os.getpid(), shares, adapters)


@dataclass(frozen=True, slots=True)
class Route:
    """The generators that get their weights on one channel."""

    channel: Channel
    ranks: tuple[int, ...]
    delta: bool = False
    """Send only the changes since the previous version, if possible."""
    adapters: bool = False
    """Send only the adapters."""

    @property
    def full(self) -> Route:
        """The same route with the full weights, which any receiver accepts."""
        return replace(self, delta=False, adapters=False)


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """The channel of each generator that is published to, by rank."""

    channels: Mapping[int, Channel]
    delta: bool = False
    merging: frozenset[int] = frozenset()
    """Ranks whose engines merge adapters, so that they need nothing else."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Ranks that share the learner's parameters."""
        return self._ranks("shared")

    def routes(self) -> tuple[Route, ...]:
        """One for each channel that transfers weights."""
        routes: list[Route] = []
        for channel in sorted(set(self.channels.values()) - {"shared"}):
            ranks = self._ranks(channel)
            adapters = self.merging.issuperset(ranks)
            # Adapters are small: a delta is not worth a copy of the previous version at both ends.
            delta = self.delta and channel in CARRIES_DELTAS and not adapters
            routes.append(Route(channel, ranks, delta, adapters))
        return tuple(routes)

    def _ranks(self, channel: Channel) -> tuple[int, ...]:
        return tuple(rank for rank, name in self.channels.items() if name == channel)


CARRIES_DELTAS: frozenset[Channel] = frozenset({"host", "broadcast"})
"""The other channels read the learner's memory, so a delta would save nothing."""


def plan_publish(
    device_map: DeviceMap,
    *,
    policy: ProcessLocation,
    generators: Mapping[int, ProcessLocation],
    config: WeightsConfig,
) -> PublishPlan:
    """The channel of each generator in `generators`, by rank."""
    # No single GPU has all weights of a sharded learner, so they pass through host memory.
    unsharded = device_map.ranks("policy") == 1
    channels: dict[int, Channel] = {}
    for rank, location in sorted(generators.items()):
        ends = device_map.roles["policy"][0], device_map.roles["generators"][rank]
        on_gpus = unsharded and all(device.kind == "cuda" for device in ends)
        channels[rank] = _channel(policy, location, config, on_gpus=on_gpus)
        _check_possible(channels[rank], rank, policy, location, on_gpus=on_gpus)
    can_merge = (rank for rank, location in generators.items() if location.adapters)
    merging = frozenset(can_merge if policy.adapters else ())
    return PublishPlan(channels, config.changes_only, merging)


def _channel(
    policy: ProcessLocation, location: ProcessLocation, config: WeightsConfig, *, on_gpus: bool
) -> Channel:
    if location.shares:
        return "shared"
    if config.channel != "auto":
        return config.channel
    if location.machine != policy.machine:
        return "broadcast"
    if location.process == policy.process:
        return "direct"
    return "cuda_ipc" if on_gpus else "host"


def _check_possible(
    channel: Channel,
    rank: int,
    policy: ProcessLocation,
    location: ProcessLocation,
    *,
    on_gpus: bool,
) -> None:
    remote = location.machine != policy.machine
    if channel in ("host", "cuda_ipc") and remote:
        why = f"generator {rank} is on another machine than the policy"
    elif channel == "direct" and (remote or location.process != policy.process):
        why = f"generator {rank} is in another process than the policy"
    elif channel == "cuda_ipc" and (not on_gpus or location.process == policy.process):
        why = f"generator {rank} and the policy are not two processes on GPUs"
    else:
        return
    raise ConfigError(
        f"weights.channel={channel} cannot work: {why}", fix="use weights.channel=auto"
    )
