"""A generator's side of a publish: receives and verifies weights, and keeps them until commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollick.errors import WeightError
from rollick.infer.engine import VerifiedWeights
from rollick.models.loading.fingerprint import fingerprint
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import DirectReceiver, DirectSource, Receiver
from rollick.weights.channels.broadcast import BroadcastReceiver, BroadcastSource
from rollick.weights.channels.cuda_ipc import IpcReceiver, IpcSource
from rollick.weights.channels.host import HostReceiver, HostSource
from rollick.weights.channels.shards import ShardReceiver, ShardSource
from rollick.weights.delta import apply_changes
from rollick.weights.manifest import Pairs, WeightManifest


class PublishReceiver:
    """Receives one offer of weights at a time. The engine loads what `take` returns."""

    def __init__(
        self,
        rank: int = 0,
        adopts: bool = False,
        initial_fingerprint: Callable[[], Fingerprint] | None = None,
    ) -> None:
        """`adopts`: whether the engine can use received memory as its parameters (ADOPT_WEIGHTS).
        `initial_fingerprint` computes the fingerprint of the weights that the engine started with;
        None if the engine cannot merge adapters, the only updates that need it."""
        self.rank = rank
        self.adopts = adopts
        self.initial_fingerprint = initial_fingerprint
        self.receivers: dict[type, Receiver] = {}
        self.received: tuple[WeightManifest, VerifiedWeights] | None = None
        self.copy: dict[str, Tensor] = {}
        """CPU copy of the last base; deltas are applied to it. Empty before the first base."""
        self.base: tuple[PolicyVersion, Fingerprint] | None = None
        """Version and fingerprint of `copy`; None: the copy is not valid."""
        self.full_fingerprint: Fingerprint | None = None
        """Fingerprint of the full weights handed out last; partial updates must match it."""

    def receive(
        self, manifest: WeightManifest, targets: Sequence[Tensor] | None = None
    ) -> Fingerprint:
        """Transfer and verify. Returns the fingerprint of the received weights. Raises WeightError
        if fingerprints differ or the base is missing. `targets`: parameters of the engine to
        write."""
        self.received = None
        self._check_base(manifest)
        kind = type(manifest.source)
        receiver = self.receivers.get(kind) or self.receivers.setdefault(kind, _RECEIVERS[kind]())
        if targets is None:
            pairs = receiver.open(manifest, self.rank)
        else:
            assert isinstance(receiver, ShardReceiver), "other channels have no parameters to write"
            receiver.receive(manifest, self.rank, targets)
            pairs = [(t.name, target) for t, target in zip(manifest.layout, targets, strict=True)]
        try:
            digest = fingerprint(list(pairs))
            if manifest.fingerprint:  # Shards have fingerprints of their own.
                _check_fingerprint(manifest.version, digest, manifest.fingerprint)
        except WeightError:
            receiver.forget()
            raise
        if manifest.delta is None:
            # Adopt only full weights. After a base, deltas follow, and their results are copied.
            is_full = manifest.partial_of is None and not manifest.is_base
            persistent = receiver.persistent and self.adopts and is_full
            weights = VerifiedWeights(
                tuple(pairs),
                digest,
                persistent,
                manifest.partial_of,
                manifest.scale,
                in_place=targets is not None,
            )
        else:
            weights = self._apply_delta(manifest, pairs)
        self.received = (manifest, weights)
        return weights.fingerprint

    def take(self, version: PolicyVersion) -> VerifiedWeights:
        """Return the verified weights of this version. A second call raises WeightError."""
        received, self.received = self.received, None
        if received is None or received[0].version != version:
            raise WeightError(f"cannot commit version {version}: it was not received")
        manifest, weights = received
        if manifest.is_base:
            if manifest.delta is None:
                self._update_copy(weights)
            self.base = (version, weights.fingerprint)
        if manifest.partial_of is None:
            self.full_fingerprint = weights.fingerprint
        return weights

    def synchronize(self, weights: VerifiedWeights) -> None:
        """Wait for the GPU: the sender may reuse its memory after this call returns."""
        if any(tensor.is_cuda for _, tensor in weights.pairs):
            torch.cuda.synchronize()

    def _check_base(self, manifest: WeightManifest) -> None:
        base = manifest.partial_of
        if base is not None and self.full_fingerprint is None and self.initial_fingerprint:
            self.full_fingerprint = self.initial_fingerprint()
        if base is not None and base != self.full_fingerprint:
            current = self.full_fingerprint[:12] if self.full_fingerprint else "its initial weights"
            raise WeightError(
                f"version {manifest.version} updates weights {base[:12]}; the engine has {current}",
                fix="publish the full weights first",
            )
        delta = manifest.delta
        if delta is not None and self.base != (delta.base, delta.base_fingerprint):
            raise WeightError(
                f"version {manifest.version} is a delta to version {delta.base}, which this "
                "generator does not have",
                fix="publish the full weights",
            )

    def _apply_delta(self, manifest: WeightManifest, pairs: Pairs) -> VerifiedWeights:
        """Apply the delta to the copy. The copy is invalid until the result is verified."""
        assert manifest.delta is not None
        self.base = None
        apply_changes(pairs, self.copy)
        pairs = list(self.copy.items())
        _check_fingerprint(manifest.version, fingerprint(pairs), manifest.delta.result)
        return VerifiedWeights(tuple(pairs), manifest.delta.result)

    def _update_copy(self, weights: VerifiedWeights) -> None:
        copy = self.copy
        for name, tensor in weights.pairs:
            if name in copy and copy[name].shape == tensor.shape:
                copy[name].copy_(tensor)
            else:
                copy[name] = tensor.detach().cpu().clone()


def _check_fingerprint(version: PolicyVersion, actual: Fingerprint, sent: Fingerprint) -> None:
    if actual != sent:
        raise WeightError(
            f"version {version} arrived with fingerprint {actual[:12]}; sent was {sent[:12]}",
            fix="nothing was committed; publish again",
        )


_RECEIVERS: dict[type, Callable[[], Receiver]] = {
    DirectSource: DirectReceiver,
    HostSource: HostReceiver,
    IpcSource: IpcReceiver,
    BroadcastSource: BroadcastReceiver,
    ShardSource: ShardReceiver,
}
