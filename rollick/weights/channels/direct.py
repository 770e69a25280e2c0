"""Weights inside one process: the learner's own tensors are the offer."""

from __future__ import annotations

from dataclasses import dataclass

from rollick.models.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.channels.base import Outcome
from rollick.weights.manifest import Pairs, WeightManifest, lay_out


@dataclass(frozen=True, slots=True, eq=False)
class DirectSource:
    """The tensors themselves; it never leaves the process."""

    pairs: Pairs


class DirectSender:
    """Nothing is copied here: the engine's own copy is the only one."""

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        places, _ = lay_out(pairs)
        return WeightManifest(version, fingerprint(pairs), places, DirectSource(tuple(pairs)))

    def send(self) -> None: ...

    def release(self, outcome: Outcome) -> None: ...

    def close(self) -> None: ...


class DirectReceiver:
    """The tensors change with the learner's next step, so that they do not last."""

    lasting = False

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        return manifest.source.pairs

    def forget(self) -> None: ...
