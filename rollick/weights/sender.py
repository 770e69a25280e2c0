"""The learner's side of a publish: one sender per channel, and the weights that deltas refer to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rollick.models.loading.fingerprint import fingerprint
from rollick.trainer.strategy import ShardedWeights
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import DirectSender, PublishOutcome, Sender
from rollick.weights.channels.broadcast import BroadcastSender
from rollick.weights.channels.cuda_ipc import IpcSender
from rollick.weights.channels.host import HostSender
from rollick.weights.channels.shards import ShardSender, ShardSource
from rollick.weights.delta import encode_changes
from rollick.weights.manifest import Pairs, WeightDelta, WeightManifest
from rollick.weights.plan import Channel, Route

MAX_DELTA_SHARE = 0.5
"""A delta larger than this share of the full weights is not sent as a delta."""


@dataclass(slots=True, eq=False)
class _Base:
    """The version that the receivers have, and their ranks."""

    version: PolicyVersion
    fingerprint: Fingerprint
    tensors: dict[str, Tensor]
    ranks: frozenset[int]


class WeightSender:
    """Offers the learner's weights, one version at a time. Not thread-safe."""

    def __init__(self) -> None:
        self.senders: dict[Channel, Sender] = {}
        self.bases: dict[Channel, _Base] = {}
        self.offered: dict[Channel, tuple[Route, Pairs, WeightManifest]] = {}
        self.shard_sender: ShardSender | None = None

    def offer(
        self,
        stream: Iterable[tuple[str, Any]],
        version: PolicyVersion,
        *,
        route: Route,
        partial_of: Fingerprint | None = None,
        scale: float | None = None,
    ) -> WeightManifest:
        """Make the weights available to the route's generators until `release`. `partial_of`: the
        stream has only some parameters, for engines whose last full weights have this fingerprint.
        `scale`: the stream has adapters, which the engines add to these weights."""
        sender, pairs, delta = self._get_sender(route.channel), (), None
        is_sharded = isinstance(stream, ShardedWeights)
        if is_sharded and isinstance(sender, HostSender) and not route.send_delta:
            # Written one by one into the shared buffer, which then holds the only full copy.
            manifest = sender.offer(stream, version, route.ranks)
        else:
            pairs = [(name, tensor.detach()) for name, tensor in stream]
            delta, sent_pairs = self._make_delta(pairs, route)
            manifest = sender.offer(sent_pairs, version, route.ranks)
        manifest = replace(
            manifest, delta=delta, is_base=route.send_delta, partial_of=partial_of, scale=scale
        )
        self.offered[route.channel] = (route, pairs, manifest)
        return manifest

    def offer_shards(
        self, weights: ShardedWeights, version: PolicyVersion, *, route: Route
    ) -> WeightManifest | None:
        """As `offer`, on each rank of a sharded learner; only rank 0 returns a manifest."""
        self.shard_sender = self.shard_sender or ShardSender()
        manifest = self.shard_sender.offer(weights, version, route.ranks)
        return manifest and replace(manifest, in_place=route.in_place)

    def send(self, channel: Channel, shards: ShardSource | None = None) -> None:
        """Send what was offered; `shards`: by all ranks of a sharded learner."""
        if shards is not None:
            assert self.shard_sender is not None, "call offer_shards before send"
            self.shard_sender.send(shards)
        else:
            self._get_sender(channel).send()

    def release(self, outcome: PublishOutcome) -> None:
        """End all offers of a version. The weights must not have changed since they were offered:
        they may become the base of the next delta."""
        for channel, (route, pairs, manifest) in self.offered.items():
            self._get_sender(channel).release(outcome)
            if outcome.committed and route.send_delta:
                self._store_base(route, pairs, manifest)
            else:
                self.bases.pop(channel, None)
        self.offered.clear()
        if self.shard_sender is not None:
            self.shard_sender.release(outcome)

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        self.senders.clear()
        if self.shard_sender is not None:
            self.shard_sender.close()

    def _get_sender(self, channel: Channel) -> Sender:
        if channel not in self.senders:
            self.senders[channel] = _SENDERS[channel]()
        return self.senders[channel]

    def _make_delta(self, pairs: Pairs, route: Route) -> tuple[WeightDelta | None, Pairs]:
        """The delta and its tensors, or None and all tensors if a delta does not pay off."""
        base = self.bases.get(route.channel) if route.send_delta else None
        if base is None or not base.ranks.issuperset(route.ranks):
            return None, pairs
        changes = encode_changes(pairs, base.tensors)
        if _count_bytes(changes) > MAX_DELTA_SHARE * _count_bytes(pairs):
            return None, pairs
        return WeightDelta(base.version, base.fingerprint, fingerprint(list(pairs))), changes

    def _store_base(self, route: Route, pairs: Pairs, manifest: WeightManifest) -> None:
        delta, base = manifest.delta, self.bases.get(route.channel)
        digest = manifest.fingerprint if delta is None else delta.result
        if base is None:
            tensors = {name: tensor.clone() for name, tensor in pairs}
        else:
            tensors = base.tensors
            for name, tensor in pairs:
                tensors[name].copy_(tensor)
        self.bases[route.channel] = _Base(manifest.version, digest, tensors, frozenset(route.ranks))


def _count_bytes(pairs: Pairs) -> int:
    return sum(tensor.nbytes for _, tensor in pairs)


_SENDERS: dict[Channel, Callable[[], Sender]] = {
    "direct": DirectSender,
    "host": HostSender,
    "cuda_ipc": IpcSender,
    "broadcast": BroadcastSender,
}
