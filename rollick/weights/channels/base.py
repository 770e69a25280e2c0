"""The protocols of a weight channel: a sender in the learner, and a receiver in each generator.

Also the channel within one process: the receiver gets references to the learner's tensors.

    offer     Sender.offer     -> WeightManifest, sent to the receivers
    transfer  Sender.send      and Receiver.open, concurrently
    verify    by the caller of `open`, with the manifest's fingerprint
    commit    by the engine
    release   Sender.release   with the outcome

Call the sender, and each receiver, from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollick.models.loading.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.manifest import Pairs, WeightManifest, plan_layout


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """How a publish ended. `committed` is None if only some engines may have committed."""

    committed: bool | None
    adopted: Mapping[int, bool] = field(default_factory=dict[int, bool])
    """By rank: whether the engine now uses the offered memory itself. The engines of all other
    ranks use the memory that they used before the publish."""


class Sender(Protocol):
    """The learner's end of a channel."""

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        """Make the tensors available to these generators. They must not change until release."""
        ...

    def send(self) -> None:
        """Wait until all receivers have the bytes; no wait if they read the sender's memory."""
        ...

    def release(self, outcome: PublishOutcome) -> None: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A generator's end of a channel."""

    @property
    def persistent(self) -> bool:
        """Whether the tensors of `open` stay valid until the next commit."""
        ...

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        """The tensors of the manifest as they arrived, not yet verified."""
        ...

    def forget(self) -> None:
        """Drop all state that is kept between offers, after a failed verification."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DirectSource:
    """References to the tensors. Never sent to another process."""

    pairs: Pairs


class DirectSender:
    """Offers references to the tensors; the engine makes the only copy."""

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
