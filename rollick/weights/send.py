"""The learner's side of a publish: one sender for each channel, and the copy that deltas need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rollick.models.fingerprint import fingerprint
from rollick.train.strategy import ShardedWeights
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import Outcome, Sender
from rollick.weights.channels.broadcast import BroadcastSender
from rollick.weights.channels.cuda_ipc import IpcSender
from rollick.weights.channels.direct import DirectSender
from rollick.weights.channels.host import HostSender
from rollick.weights.delta import encode_changes
from rollick.weights.manifest import Change, Pairs, WeightManifest
from rollick.weights.plan import Channel, Route

WORTH_IT = 0.5
"""Changes that take more than this part of the whole are not sent as changes."""


@dataclass(slots=True, eq=False)
class _Base:
    """What the receivers have, and who they are."""

    version: PolicyVersion
    fingerprint: Fingerprint
    tensors: dict[str, Tensor]
    ranks: frozenset[int]


class WeightSender:
    """Offers the learner's weights, one version at a time. Called from one thread."""

    def __init__(self) -> None:
        self.senders: dict[Channel, Sender] = {}
        self.bases: dict[Channel, _Base] = {}
        self.offered: dict[Channel, tuple[Route, Pairs, WeightManifest]] = {}

    def offer(
        self,
        stream: Iterable[tuple[str, Any]],
        version: PolicyVersion,
        *,
        route: Route,
        partial_of: Fingerprint | None = None,
        scale: float | None = None,
    ) -> WeightManifest:
        """Begin: the weights are there for the route's generators until `release`.

        With `partial_of` the stream has some of the parameters only, and goes to engines whose last
        whole weights had that fingerprint. With `scale` it has adapters, which those engines add to
        these weights.
        """
        if isinstance(stream, ShardedWeights) and route.channel == "host" and not route.delta:
            return self._offer_stream(stream, version, route)
        pairs = [(name, tensor.detach()) for name, tensor in stream]
        change, sent = self._changes(pairs, route) if route.delta else (None, pairs)
        offer = self._sender(route.channel).offer(sent, version, route.ranks)
        manifest = replace(
            offer, change=change, is_base=route.delta, partial_of=partial_of, scale=scale
        )
        self.offered[route.channel] = (route, pairs, manifest)
        return manifest

    def _offer_stream(
        self, stream: ShardedWeights, version: PolicyVersion, route: Route
    ) -> WeightManifest:
        """One parameter at a time into the memory that receivers map, so that the whole is in it
        and nowhere else."""
        sender = self._sender("host")
        assert isinstance(sender, HostSender)
        manifest = sender.offer(stream, version, route.ranks)
        self.offered[route.channel] = (route, (), manifest)
        return manifest

    def send(self, channel: Channel) -> None:
        """Transfer: what the sender has to do for it."""
        self._sender(channel).send()

    def release(self, outcome: Outcome) -> None:
        """End all offers of a version. The weights are still those that were offered."""
        for channel, (route, pairs, manifest) in self.offered.items():
            self._sender(channel).release(outcome)
            if outcome.committed and route.delta:
                self._remember(channel, route, pairs, manifest)
            else:
                self.bases.pop(channel, None)
        self.offered.clear()

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        self.senders.clear()

    def _sender(self, channel: Channel) -> Sender:
        if channel not in self.senders:
            self.senders[channel] = _SENDERS[channel]()
        return self.senders[channel]

    def _changes(self, pairs: Pairs, route: Route) -> tuple[Change | None, Pairs]:
        base = self.bases.get(route.channel)
        if base is None or not base.ranks.issuperset(route.ranks):
            return None, pairs
        sent = encode_changes(pairs, base.tensors)
        if _bytes(sent) > WORTH_IT * _bytes(pairs):
            return None, pairs
        return Change(base.version, base.fingerprint, fingerprint(list(pairs))), sent

    def _remember(
        self, channel: Channel, route: Route, pairs: Pairs, manifest: WeightManifest
    ) -> None:
        change = manifest.change
        found = manifest.fingerprint if change is None else change.result
        base = self.bases.get(channel)
        if base is None:
            held = {name: tensor.clone() for name, tensor in pairs}
        else:
            held = base.tensors
            for name, tensor in pairs:
                held[name].copy_(tensor)
        self.bases[channel] = _Base(manifest.version, found, held, frozenset(route.ranks))


def _bytes(pairs: Pairs) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in pairs)


_SENDERS: dict[Channel, Callable[[], Sender]] = {
    "direct": DirectSender,
    "host": HostSender,
    "cuda_ipc": IpcSender,
    "broadcast": BroadcastSender,
}
