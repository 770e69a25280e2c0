"""What engines did with their time, for reports: who counts is batching.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """What an engine, or several (see `total_usage`), did with its time."""

    elapsed_s: float = 0.0
    busy_s: float = 0.0
    """Seconds in which a step ran."""
    slot_s: float = 0.0
    """Each slot's seconds with a job in a running step, summed."""
    capacity_s: float = 0.0
    """Slots times elapsed seconds: what slot_s could be at most."""
    steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    """Prefilled tokens that had been in a cache before: thrown out, moved, or of an old version."""
    preempted: int = 0

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def slot_share(self) -> float:
        return self.slot_s / self.capacity_s if self.capacity_s else 0.0


def total_usage(usages: Iterable[Usage]) -> Usage:
    """The sum of several engines: shares are then means over engines and over slots."""
    names = Usage.__dataclass_fields__
    each = list(usages)
    return Usage(**{name: sum(getattr(usage, name) for usage in each) for name in names})
