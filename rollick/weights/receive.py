"""A generator's side of a publish: open what was offered, verify it, keep it for the commit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollick.errors import WeightError
from rollick.infer.engine import VerifiedWeights
from rollick.models.fingerprint import fingerprint
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import Receiver
from rollick.weights.channels.broadcast import BroadcastReceiver, BroadcastSource
from rollick.weights.channels.cuda_ipc import IpcReceiver, IpcSource
from rollick.weights.channels.direct import DirectReceiver, DirectSource
from rollick.weights.channels.host import HostReceiver, HostSource
from rollick.weights.delta import apply_changes
from rollick.weights.manifest import Pairs, WeightManifest


class WeightReceiver:
    """Takes one offer at a time. An engine's weights change only after `take`."""

    def __init__(
        self,
        *,
        rank: int = 0,
        adopts: bool = False,
        loaded: Callable[[], Fingerprint] | None = None,
    ) -> None:
        """`adopts`: whether the engine may make lasting memory its own. `loaded` tells the
        fingerprint of the weights that it began with, where it can add adapters to them."""
        self.rank = rank
        self.adopts = adopts
        self.loaded = loaded
        self.receivers: dict[type, Receiver] = {}
        self.received: tuple[WeightManifest, VerifiedWeights] | None = None
        self.copy: dict[str, Tensor] = {}
        """All weights of `copied`, where changes to them may come."""
        self.copied: tuple[PolicyVersion, Fingerprint] | None = None
        self.whole: Fingerprint | None = None
        """Of the last whole weights that were committed."""

    def receive(self, manifest: WeightManifest) -> None:
        """Transfer and verify. WeightError if the bytes are not those that were sent."""
        self.received = None
        self._demand_base(manifest)
        receiver = self._receiver(manifest)
        pairs = receiver.open(manifest, self.rank)
        try:
            _demand_same(manifest.version, fingerprint(list(pairs)), manifest.fingerprint)
        except WeightError:
            receiver.forget()
            raise
        if manifest.change is None:
            # A base is changed in the copy of it, and an engine in its own memory.
            whole = manifest.partial_of is None and not manifest.is_base
            lasting = receiver.lasting and self.adopts and whole
            found = manifest.fingerprint
            weights = VerifiedWeights(
                tuple(pairs), found, lasting, manifest.partial_of, manifest.scale
            )
        else:
            weights = self._changed(manifest, pairs)
        self.received = (manifest, weights)

    def take(self, version: PolicyVersion) -> VerifiedWeights:
        """The verified weights of this version, once."""
        received, self.received = self.received, None
        if received is None or received[0].version != version:
            raise WeightError(f"asked to commit version {version}, which was not received")
        manifest, weights = received
        if manifest.is_base and manifest.change is None:
            self._keep_copy(weights)
        if manifest.is_base:
            self.copied = (version, weights.fingerprint)
        if manifest.partial_of is None:
            self.whole = weights.fingerprint
        return weights

    def committed(self, weights: VerifiedWeights) -> None:
        """The engine has them. Its copy from the memory of others must be over, not only begun."""
        if any(tensor.is_cuda for _, tensor in weights.pairs):
            torch.cuda.synchronize()

    def _receiver(self, manifest: WeightManifest) -> Receiver:
        kind = type(manifest.source)
        if kind not in self.receivers:
            self.receivers[kind] = _RECEIVERS[kind]()
        return self.receivers[kind]

    def _demand_base(self, manifest: WeightManifest) -> None:
        base = manifest.partial_of
        if base is not None and self.whole is None and self.loaded is not None:
            self.whole = self.loaded()
        if base is not None and base != self.whole:
            raise WeightError(
                f"version {manifest.version} is a part of weights {base[:12]}, and this engine has "
                f"{(self.whole or 'those it was loaded with')[:24]}",
                fix="publish the whole weights first",
            )
        change = manifest.change
        if change is not None and self.copied != (change.base, change.base_fingerprint):
            raise WeightError(
                f"version {manifest.version} is a change to version {change.base}, which this "
                "generator does not have",
                fix="publish the whole weights",
            )

    def _changed(self, manifest: WeightManifest, pairs: Pairs) -> VerifiedWeights:
        """The copy with the changes in it. Until it is verified there is no copy to change."""
        assert manifest.change is not None
        self.copied = None
        apply_changes(pairs, self.copy)
        changed = list(self.copy.items())
        _demand_same(manifest.version, fingerprint(changed), manifest.change.result)
        return VerifiedWeights(tuple(changed), manifest.change.result)

    def _keep_copy(self, weights: VerifiedWeights) -> None:
        held = self.copy
        for name, tensor in weights.pairs:
            if name in held and held[name].shape == tensor.shape:
                held[name].copy_(tensor)
            else:
                held[name] = tensor.detach().cpu().clone()


def _demand_same(version: PolicyVersion, seen: Fingerprint, sent: Fingerprint) -> None:
    if seen != sent:
        raise WeightError(
            f"weights of version {version} arrived with fingerprint {seen[:12]}, sent was "
            f"{sent[:12]}",
            fix="nothing was committed; publish again",
        )


_RECEIVERS: dict[type, Callable[[], Receiver]] = {
    DirectSource: DirectReceiver,
    HostSource: HostReceiver,
    IpcSource: IpcReceiver,
    BroadcastSource: BroadcastReceiver,
}
