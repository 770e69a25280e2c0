"""Group slots: how many groups may be in flight at once.

A group holds a slot from its start until it is trained, dropped or deferred. There are
groups_per_step * (1 + max_staleness) slots, plus the rule's surplus. Some may be unavailable:

    held        a slot freed by training is held until the new version is published: a group that
                started earlier would begin at the old version, and the staleness budget has
                room for it only at the new one
    closed      a slot that is empty when a batch is taken is held too, if a group that starts now
                would be too old for the next batch (see staleness.py)
    unreplaced  the slot of a drop beyond the step's allowance is not refilled in this step
    long round  the next `round_slots` slots are for deferred groups; while one of these is in
                flight the surplus stays empty, since batches wait for all of them
"""

from __future__ import annotations

from rollick.rollout.ledger.group_record import LedgerError
from rollick.types import PolicyVersion


class GroupSlots:
    """Counts slots. It knows how many groups hold one, not which."""

    def __init__(self, total: int, *, surplus: int, drops_allowed: int | None) -> None:
        """`total` includes the surplus. `drops_allowed` in a step; None: no limit."""
        self.total = total
        self.round_slots = 0
        self.drops_in_step = 0
        self.published = PolicyVersion(0)
        self._surplus = surplus
        self._drops_allowed = drops_allowed
        self._held = 0
        self._held_until = PolicyVersion(0)

    @property
    def held_until(self) -> PolicyVersion | None:
        """The version whose publication frees the held slots; None if none is held."""
        return self._held_until if self._held else None

    @property
    def unreplaced(self) -> int:
        """Slots of this step's drops that are not refilled, since the allowance is spent."""
        allowed = self._drops_allowed
        return 0 if allowed is None else max(0, self.drops_in_step - allowed)

    def has_free(self, active: int, *, in_long_round: bool) -> bool:
        """Whether a new group may start beside `active` others."""
        empty = self._surplus if in_long_round else 0
        return not self.round_slots and active + self._held + self.unreplaced + empty < self.total

    def has_free_for_deferred(self, active: int) -> bool:
        """Whether a deferred group may restart. It replaces no drop: their limit does not apply."""
        return active + self._held < self.total

    def hold(self, slots: int, until: PolicyVersion) -> None:
        self._held += slots
        self._held_until = until

    def end_step(self, version: PolicyVersion, *, closed: int) -> None:
        """A batch was taken: hold the unreplaced slots, at least `closed`, until the next one."""
        self.hold(max(closed, self.unreplaced), PolicyVersion(version + 1))
        self.drops_in_step = 0

    def publish(self, version: PolicyVersion) -> None:
        if version < self.published:
            raise LedgerError(f"version {version} comes after version {self.published}")
        self.published = version

    def release(self) -> None:
        """Free the held slots if their version is published. Do not call while a batch is taken."""
        if self._held_until <= self.published:
            self._held = 0
