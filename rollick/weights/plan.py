"""Plans a publish: the channel to each generator, from the locations of learner and generators.

generator's location                       channel     what is transferred
the learner's process, shared parameters   shared      nothing
the learner's process, its own weights     direct      references to the learner's tensors
the same machine, GPUs, unsharded learner  cuda_ipc    the learner's GPU memory, mapped
the same machine                           host        memory that both processes map
another machine                            broadcast   all bytes, by torch.distributed; each rank
                                                       of a sharded learner sends its shards
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
    pid: int
    shares_weights: bool = False
    """Whether a generator's engine uses the learner's parameters."""
    trains_adapters: bool = False
    merges_adapters: bool = False


def process_location(**properties: bool) -> ProcessLocation:
    """The location of this process; `properties` are the booleans of ProcessLocation."""
    return ProcessLocation(machine_id(), os.getpid(), **properties)


@dataclass(frozen=True, slots=True)
class Route:
    """The generators that get their weights on one channel."""

    channel: Channel
    ranks: tuple[int, ...]
    send_delta: bool = False
    """Send only the changes since the previous version, if possible."""
    adapters_only: bool = False
    in_place: bool = False
    """Write into the parameters of the engines."""

    @property
    def allows_shards(self) -> bool:
        """Whether the ranks of a sharded learner may send their own parts. Deltas and adapters are
        made of full weights."""
        return self.channel == "broadcast" and not (self.send_delta or self.adapters_only)

    def as_full(self) -> Route:
        """The same route with the full weights, which any receiver accepts."""
        return replace(self, send_delta=False, adapters_only=False)


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """The channel of each generator that is published to, by rank."""

    channels: Mapping[int, Channel]
    send_deltas: bool = False
    merging_ranks: frozenset[int] = frozenset()
    """Ranks whose engines merge adapters, so that they need nothing else."""
    in_place: bool = False

    @property
    def shared_ranks(self) -> tuple[int, ...]:
        """Ranks that share the learner's parameters."""
        return self._ranks("shared")

    def routes(self) -> tuple[Route, ...]:
        """One route for each channel that transfers weights."""
        routes: list[Route] = []
        for channel in sorted(set(self.channels.values()) - {"shared"}):
            ranks = self._ranks(channel)
            adapters_only = self.merging_ranks.issuperset(ranks)
            # Adapters are small: a delta is not worth a copy of the previous version at both ends.
            send_delta = self.send_deltas and channel in DELTA_CHANNELS and not adapters_only
            route = Route(channel, ranks, send_delta, adapters_only)
            routes.append(replace(route, in_place=self.in_place and route.allows_shards))
        return tuple(routes)

    def _ranks(self, channel: Channel) -> tuple[int, ...]:
        return tuple(rank for rank, used in self.channels.items() if used == channel)


DELTA_CHANNELS: frozenset[Channel] = frozenset({"host", "broadcast"})
"""The other channels read the learner's memory, so a delta would save nothing."""


def plan_publish(
    device_map: DeviceMap,
    *,
    learner: ProcessLocation,
    generators: Mapping[int, ProcessLocation],
    config: WeightsConfig,
) -> PublishPlan:
    """Choose a channel for each generator, by rank. Raises ConfigError if the channel that the
    recipe names cannot work."""
    # No single GPU has all weights of a sharded learner, so they pass through host memory.
    unsharded = device_map.ranks("policy") == 1
    channels: dict[int, Channel] = {}
    for rank, location in sorted(generators.items()):
        end_devices = device_map.roles["policy"][0], device_map.roles["generators"][rank]
        on_gpus = unsharded and all(device.kind == "cuda" for device in end_devices)
        channels[rank] = _choose_channel(learner, location, config, on_gpus=on_gpus)
        _check_possible(channels[rank], rank, learner, location, on_gpus=on_gpus)
    can_merge = (rank for rank, location in generators.items() if location.merges_adapters)
    merging_ranks = frozenset(can_merge if learner.trains_adapters else ())
    return PublishPlan(channels, config.changes_only, merging_ranks, config.in_place)


def _choose_channel(
    learner: ProcessLocation, location: ProcessLocation, config: WeightsConfig, *, on_gpus: bool
) -> Channel:
    if location.shares_weights:
        return "shared"
    if config.channel != "auto":
        return config.channel
    if location.machine != learner.machine:
        return "broadcast"
    if location.pid == learner.pid:
        return "direct"
    return "cuda_ipc" if on_gpus else "host"


def _check_possible(
    channel: Channel,
    rank: int,
    learner: ProcessLocation,
    location: ProcessLocation,
    *,
    on_gpus: bool,
) -> None:
    remote = location.machine != learner.machine
    if channel in ("host", "cuda_ipc") and remote:
        why = f"generator {rank} is on another machine than the learner"
    elif channel == "direct" and (remote or location.pid != learner.pid):
        why = f"generator {rank} is in another process than the learner"
    elif channel == "cuda_ipc" and (not on_gpus or location.pid == learner.pid):
        why = f"generator {rank} and the learner are not two processes on GPUs"
    else:
        return
    raise ConfigError(
        f"weights.channel={channel} cannot work: {why}", fix="use weights.channel=auto"
    )
