"""The channel within one process: the receiver gets references to the learner's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from rollick.models.loading.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.manifest import Pairs, WeightManifest, plan_layout


@dataclass(frozen=True, slots=True, eq=False)
class DirectSource:
    """References to the tensors. Never sent to another process."""

    pairs: Pairs


class DirectSender:
    """Offers references to the tensors. Only the engine copies them."""

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        layout, _ = plan_layout(pairs)
        return WeightManifest(version, fingerprint(pairs), layout, DirectSource(tuple(pairs)))

    def send(self) -> None: ...

    def release(self, outcome: PublishOutcome) -> None: ...

    def close(self) -> None: ...


class DirectReceiver:
    """Returns the learner's tensors. The next optimizer step changes them."""

    persistent = False

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        return manifest.source.pairs

    def forget(self) -> None: ...
