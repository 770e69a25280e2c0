"""The ledger's sums: where everything that was ever submitted is now.

    submitted = trained + dropped (with a reason) + waiting + running

Kept by adding and subtracting at each transition, so that asking costs the same for a thousand and
for a million samples in flight. `check` counts again, from the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollick.rollout.groups import GroupState, LedgerError, LiveGroup, SampleState
from rollick.rollout.rules import SURPLUS


@dataclass(frozen=True, slots=True)
class Tally:
    """The conservation law of one kind: submitted = trained + dropped + waiting + running.

    Of samples, `running` are being generated or scored, and `waiting` wait for an engine or, being
    done, for their training. Of groups, `running` are open and `waiting` wait for their training or
    are parked.
    """

    submitted: int
    trained: int
    dropped: int
    waiting: int
    running: int

    @property
    def balanced(self) -> bool:
        return self.submitted == self.trained + self.dropped + self.waiting + self.running


@dataclass(frozen=True, slots=True)
class Counts:
    """Where everything that was ever submitted is now."""

    groups: Tally
    samples: Tally
    dropped_by_reason: Mapping[str, int]
    """Groups."""
    dropped_samples: Mapping[str, int]
    """Samples by reason: those of dropped groups, and spares that were not needed."""


class Totals:
    """Running sums over groups and samples; every change of a record is told here."""

    def __init__(self) -> None:
        self.submitted = 0
        self.groups: Counter[GroupState] = Counter()
        self._submitted_samples = 0
        self._trained = 0
        self._trained_samples = 0
        self._dropped: Counter[str] = Counter()
        self._dropped_samples: Counter[str] = Counter()
        # Of the groups in the ledger; a cancelled sample is dropped and so in none of them.
        self._samples: Counter[SampleState] = Counter()

    def started(self, group: LiveGroup) -> None:
        self.submitted += 1
        self._submitted_samples += len(group.samples)
        self.entered(group)

    def entered(self, group: LiveGroup) -> None:
        """A group is in the ledger, as it stands."""
        self.groups[group.state] += 1
        self._samples.update(_kept(group))

    def sample_moved(self, old: SampleState, new: SampleState) -> None:
        self._samples[old] -= 1
        if new is SampleState.CANCELLED:
            self._dropped_samples[SURPLUS] += 1
        else:
            self._samples[new] += 1

    def group_moved(self, old: GroupState, new: GroupState) -> None:
        self.groups[old] -= 1
        self.groups[new] += 1

    def dropped(self, group: LiveGroup, reason: str) -> None:
        self._dropped[reason] += 1
        self._dropped_samples[reason] += self._left(group)

    def trained(self, group: LiveGroup) -> None:
        self._trained += 1
        self._trained_samples += self._left(group)

    def counts(self) -> Counts:
        samples, groups = self._samples, self.groups
        running = samples[SampleState.RUNNING] + samples[SampleState.SCORING]
        waiting = samples[SampleState.WAITING] + samples[SampleState.DONE]
        open_groups = groups[GroupState.OPEN]
        held = groups[GroupState.COMPLETE] + groups[GroupState.TAKEN] + groups[GroupState.PARKED]
        dropped, dropped_samples = self._dropped.total(), self._dropped_samples.total()
        return Counts(
            Tally(self.submitted, self._trained, dropped, held, open_groups),
            Tally(
                self._submitted_samples, self._trained_samples, dropped_samples, waiting, running
            ),
            dict(self._dropped),
            dict(self._dropped_samples),
        )

    def check(self, groups: Iterable[LiveGroup]) -> None:
        """Assert the law, and that the sums agree with the records of the groups in the ledger."""
        counts = self.counts()
        if not (counts.groups.balanced and counts.samples.balanced):
            raise LedgerError(f"the law of conservation is broken: {counts}")
        counted = Totals()
        for group in groups:
            counted.entered(group)
        if counted.groups != self.groups or counted._samples != self._samples:
            raise LedgerError(
                f"the law of conservation is broken: the sums {self.groups}, {self._samples} "
                f"differ from the records {counted.groups}, {counted._samples}"
            )

    def state(self) -> dict[str, Any]:
        """What is known of the past, as JSON; the present is in the records."""
        return {
            "submitted_samples": self._submitted_samples,
            "trained": self._trained,
            "trained_samples": self._trained_samples,
            "dropped": dict(self._dropped),
            "dropped_samples": dict(self._dropped_samples),
        }

    def restore(self, saved: Mapping[str, Any], *, submitted: int) -> None:
        self.submitted = submitted
        self._submitted_samples = saved["submitted_samples"]
        self._trained = saved["trained"]
        self._trained_samples = saved["trained_samples"]
        self._dropped = Counter(saved["dropped"])
        self._dropped_samples = Counter(saved["dropped_samples"])

    def _left(self, group: LiveGroup) -> int:
        """A group leaves the ledger; returns its samples, without the cancelled."""
        self.groups[group.state] -= 1
        kept = _kept(group)
        self._samples.subtract(kept)
        return len(kept)


def _kept(group: LiveGroup) -> list[SampleState]:
    return [state for state in group.samples if state is not SampleState.CANCELLED]
