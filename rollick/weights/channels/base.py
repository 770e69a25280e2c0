"""What a channel is: a sender in the learner's process, a receiver in each generator's.

    begin     Sender.offer     -> WeightManifest, which travels to the receivers
    transfer  Sender.send      and Receiver.open, side by side
    verify    by whoever called open, with the manifest's fingerprint
    commit    by the engine
    end       Sender.release   with how it went

Both ends are called from one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollick.types import PolicyVersion
from rollick.weights.manifest import Pairs, WeightManifest


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a publish ended. `committed` is None if some engines may have committed it."""

    committed: bool | None
    held: bool | None = False
    """Whether engines use the offered memory itself from now on; None if they use what they did."""


class Sender(Protocol):
    """The learner's end."""

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        """Make the tensors available to these generators; they stay as they are until release."""
        ...

    def send(self) -> None:
        """The sender's part of the transfer: returns when all receivers have the bytes. Channels
        whose receivers help themselves do nothing."""
        ...

    def release(self, outcome: Outcome) -> None:
        """The offer is over."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A generator's end."""

    @property
    def lasting(self) -> bool:
        """Whether what `open` gives stays until the next committed version replaces it."""
        ...

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        """The tensors of the manifest, as they arrived here; not yet verified."""
        ...

    def forget(self) -> None:
        """Drop what is kept from one offer to the next: what arrived was wrong."""
        ...
