"""Pacing: how many groups may have a place at once.

A *place* is what a group occupies from its start until it is trained, dropped or parked. There are
B * (1 + K) of them, and the surplus of the rules that have one. Not all can be had at all times:

    held        a place opened by training is held until the new version is published: a group that
                started in between would draw its first tokens from the old version and count as
                one of the new
    shut        so is one that is empty when a batch is taken, where a group that starts at the
                old version would come too late for the next batch (see rules.py)
    unreplaced  a drop beyond the step's allowance keeps its place until the step is over
    long round  the next places belong to `to_place` parked groups; while one of these is in flight
                the surplus stays empty, since everybody is waited for
"""

from __future__ import annotations

from rollick.rollout.groups import LedgerError
from rollick.types import PolicyVersion


class Pacing:
    """Counts places; knows nothing of the groups that have them but their number."""

    def __init__(self, places: int, *, surplus: int = 0, drops_allowed: int | None) -> None:
        """`surplus` are among the places."""
        self.places = places
        self.to_place = 0
        self._surplus = surplus
        self.drops_in_step = 0
        self.published = PolicyVersion(0)
        self._drops_allowed = drops_allowed
        # Places that open only when version `_held_until` is published.
        self._held = 0
        self._held_until = PolicyVersion(0)

    @property
    def held_until(self) -> PolicyVersion | None:
        return self._held_until if self.is_holding else None

    @property
    def is_holding(self) -> bool:
        return self._held > 0

    @property
    def unreplaced(self) -> int:
        """Places of this step's drops that are not refilled, since the allowance is spent."""
        if self._drops_allowed is None:
            return 0
        return max(0, self.drops_in_step - self._drops_allowed)

    def has_place(self, live: int, *, in_long_round: bool = False) -> bool:
        """Whether a new group may start beside `live` others."""
        empty = self._surplus if in_long_round else 0
        return not self.to_place and live + self._held + self.unreplaced + empty < self.places

    def has_place_again(self, live: int) -> bool:
        """Whether a parked group may start again: it replaces no drop, so no allowance counts."""
        return live + self._held < self.places

    def hold(self, places: int, until: PolicyVersion) -> None:
        self._held += places
        self._held_until = until

    def end_step(self, version: PolicyVersion, *, shut: int) -> None:
        """The batch of `version` was taken: what was not replaced, and at least `shut` places, open
        with the next version."""
        self.hold(max(shut, self.unreplaced), PolicyVersion(version + 1))
        self.drops_in_step = 0

    def publish(self, version: PolicyVersion) -> None:
        if version < self.published:
            raise LedgerError(f"version {version} comes after version {self.published}")
        self.published = version

    def release(self) -> None:
        """Open the held places if their version is out. Not to be called while a batch is taken:
        its version is still to come."""
        if self._held_until <= self.published:
            self._held = 0
