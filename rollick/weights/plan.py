"""Which generator gets new weights how. Pure: follows from where learner and generators live.

the learner's process, over its storage    shared      nothing to send
the learner's process, weights of its own  direct      the learner's tensors themselves
the same machine, both on GPUs             cuda_ipc    the learner's GPU memory, mapped
the same machine                           host        memory that both processes map
another machine                            broadcast   torch.distributed
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rollick.cluster.devices import DeviceMap
from rollick.config.schema import WeightsConfig
from rollick.errors import ConfigError

Channel = Literal["shared", "direct", "host", "cuda_ipc", "broadcast"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a role lives. Two processes of one machine can map each other's memory."""

    machine: str
    process: int
    shares: bool = False
    """Of a generator: whether its engine uses the learner's own parameters."""
    adapters: bool = False
    """Of a learner: whether it trains adapters. Of a generator: whether its engine adds them."""


@dataclass(frozen=True, slots=True)
class Route:
    """The generators that get their weights in one way."""

    channel: Channel
    ranks: tuple[int, ...]
    delta: bool = False
    """Send what changed since the version before, where that is possible."""
    adapters: bool = False
    """Send the adapters alone."""

    @property
    def whole(self) -> Route:
        """The same way for the whole weights, which always fit."""
        return replace(self, delta=False, adapters=False)


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """The channel of each generator that is published to, by rank."""

    channels: Mapping[int, Channel]
    delta: bool = False
    merging: frozenset[int] = frozenset()
    """Ranks that need the adapters only."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Ranks that share the learner's parameters."""
        return self._ranks("shared")

    @property
    def copied(self) -> tuple[int, ...]:
        """Ranks that need a copy."""
        return tuple(rank for rank, name in self.channels.items() if name != "shared")

    def routes(self) -> tuple[Route, ...]:
        """One for each channel that copies to somebody."""
        return tuple(self._route(name) for name in sorted(set(self.channels.values()) - {"shared"}))

    def _route(self, channel: Channel) -> Route:
        ranks = self._ranks(channel)
        adapters = self.merging.issuperset(ranks)
        # Adapters are small, so that what changed in them is not worth a copy at either end.
        delta = self.delta and channel in CARRIES_DELTAS and not adapters
        return Route(channel, ranks, delta, adapters)

    def _ranks(self, channel: Channel) -> tuple[int, ...]:
        return tuple(rank for rank, name in self.channels.items() if name == channel)


CARRIES_DELTAS: frozenset[Channel] = frozenset({"host", "broadcast"})
"""The others read the learner's own memory: there is nothing to be saved."""


def plan_publish(
    device_map: DeviceMap,
    *,
    policy: Place | None = None,
    generators: Mapping[int, Place] | None = None,
    config: WeightsConfig | None = None,
) -> PublishPlan:
    """The channel of each generator whose place is given, by rank.

    Without places: all, on one machine, with a process for each device.
    """
    config = config or WeightsConfig()
    policy = policy or Place("", 0)
    places = _usual_places(device_map) if generators is None else generators
    # A sharded learner has its whole weights nowhere: they pass through the host one by one.
    whole = device_map.ranks("policy") == 1
    channels: dict[int, Channel] = {}
    for rank in sorted(places):
        on_gpus = whole and _both_on_gpus(device_map, rank)
        channels[rank] = _channel(policy, places[rank], config, on_gpus=on_gpus)
        _demand_possible(channels[rank], rank, policy, places[rank], on_gpus=on_gpus)
    merging = frozenset(rank for rank in places if policy.adapters and places[rank].adapters)
    return PublishPlan(channels, config.changes_only, merging)


def _usual_places(device_map: DeviceMap) -> dict[int, Place]:
    shares = [device_map.shares_weights(r) for r in range(device_map.ranks("generators"))]
    return {rank: Place("", 0 if own else 1 + rank, own) for rank, own in enumerate(shares)}


def _channel(policy: Place, place: Place, config: WeightsConfig, *, on_gpus: bool) -> Channel:
    if place.shares:
        return "shared"
    if config.channel != "auto":
        return config.channel
    if place.machine != policy.machine:
        return "broadcast"
    if place.process == policy.process:
        return "direct"
    return "cuda_ipc" if on_gpus else "host"


def _both_on_gpus(device_map: DeviceMap, rank: int) -> bool:
    ends = (device_map.roles["policy"][0], device_map.roles["generators"][rank])
    return all(device.kind == "cuda" for device in ends)


def _demand_possible(
    channel: Channel, rank: int, policy: Place, place: Place, *, on_gpus: bool
) -> None:
    apart = place.machine != policy.machine
    if channel in ("host", "cuda_ipc") and apart:
        why = f"generator {rank} is on another machine than the policy"
    elif channel == "direct" and (apart or place.process != policy.process):
        why = f"generator {rank} is in another process than the policy"
    elif channel == "cuda_ipc" and (not on_gpus or place.process == policy.process):
        why = f"generator {rank} and the policy are not two processes on GPUs"
    else:
        return
    raise ConfigError(
        f"weights.channel={channel} cannot work: {why}", fix="use weights.channel=auto"
    )
