"""The staleness rules: which complete groups form the batch of a version.

With C = ceil(max_staleness), B groups a step and v the version at the start of the step:

    must_take           the batch contains every group that started at a version <= v - C, and
                        waits for it. Nothing is dropped: the unbiased default.
    drop_stale          nothing waits for old groups; one that started before v - C is dropped
                        ("stale"). Biased towards fast, that is short, samples.
    mask_stale_tokens   nothing waits and nothing is dropped; an old group is taken when it is
                        complete, and the caller masks its tokens of versions before v - C.
                        Biased towards the ends of long samples.
    first_finished      `surplus` more groups are in flight; the batch is the first B that
                        completed. Groups that are too old for the next batch are dropped
                        ("surplus"). Biased towards short samples.
    long_rounds         `surplus` more groups are in flight; the batch is the oldest B when B are
                        complete. Groups too old for the next batch are deferred, not dropped: they
                        wait until B are deferred, then restart together, as a *long round* that
                        the batches wait for. Every prompt is trained on; only the order is biased.

A long round begins when B groups are deferred and the round before has ended. Its groups get the
next slots, before any new prompt. Until all of them are in a batch there is no surplus, and the
batch of version v contains each of them that started again at <= v - C: so none is deferred twice.
With max_staleness 0 a round is one batch, of these groups alone; above 0, other groups run beside
them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from math import ceil
from operator import add
from typing import NamedTuple

from rollick.rollout.ledger.group_record import GroupRecord, LedgerError
from rollick.types import PolicyVersion

STALE = "stale"
SURPLUS = "surplus"
FIRST_VERSION = PolicyVersion(0)
LAST_VERSION = PolicyVersion(sys.maxsize)


class StalenessRule(StrEnum):
    """What happens to groups that become too old; see above."""

    MUST_TAKE = "must_take"
    DROP_STALE = "drop_stale"
    MASK_STALE_TOKENS = "mask_stale_tokens"
    FIRST_FINISHED = "first_finished"
    LONG_ROUNDS = "long_rounds"


SURPLUS_RULES = frozenset({StalenessRule.FIRST_FINISHED, StalenessRule.LONG_ROUNDS})
"""Rules under which more groups are in flight than the batches have room for."""


class GroupCounts(NamedTuple):
    """How many groups have a slot and are not in a batch, and how many of them are complete. `long`
    and `long_complete` are those among them that were deferred before."""

    active: int = 0
    complete: int = 0
    long: int = 0
    long_complete: int = 0

    def plus(self, other: GroupCounts) -> GroupCounts:
        return GroupCounts(*map(add, self, other))


class CountsByVersion:
    """Group counts by start version, the oldest first, so that a check for a batch costs O(C)."""

    def __init__(self) -> None:
        self.total = GroupCounts()
        self._of: dict[PolicyVersion, GroupCounts] = {}

    def add(self, group: GroupRecord, *, active: int = 0, complete: int = 0) -> None:
        """Count a group that started, completed or (-1) was taken, dropped or deferred."""
        long = (active, complete) if group.was_deferred else (0, 0)
        change = GroupCounts(active, complete, *long)
        self.total = self.total.plus(change)
        version = group.start_version
        counts = self._of[version] = self._of.get(version, GroupCounts()).plus(change)
        if not counts.active:
            del self._of[version]

    def since(self, oldest: PolicyVersion) -> GroupCounts:
        """The sum over the start versions from `oldest` on."""
        recent = [counts for version, counts in self._of.items() if version >= oldest]
        return reduce(GroupCounts.plus, recent, GroupCounts())

    def until(self, latest: Iterable[PolicyVersion]) -> Iterator[GroupCounts]:
        """For each version of `latest`, in ascending order, the sum of the counts up to it."""
        remaining = deque(self._of.items())
        total = GroupCounts()
        for version in latest:
            while remaining and remaining[0][0] <= version:
                total = total.plus(remaining.popleft()[1])
            yield total


class BatchRequirement(NamedTuple):
    """The batch needs `needed` of the groups started by `latest`; `complete` are complete."""

    latest: PolicyVersion
    needed: int
    complete: int


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """A staleness rule and its parameters."""

    groups_per_step: int
    max_staleness: float = 0
    rule: StalenessRule = StalenessRule.MUST_TAKE
    surplus: int = 0
    horizon: int = field(init=False)
    """C: max_staleness, rounded up."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "horizon", ceil(self.max_staleness))
        if self.surplus and self.rule not in SURPLUS_RULES:
            raise LedgerError(f"the rule {self.rule} has no surplus, but it is {self.surplus}")

    @property
    def slots(self) -> int:
        """Groups that may be in flight at once: B * (1 + max_staleness), plus the surplus."""
        # Rounded, since 10 * (1 + 0.1) is a little more than 11 in floating point.
        return ceil(round(self.groups_per_step * (1 + self.max_staleness), 9)) + self.surplus

    def oldest_allowed(self, version: PolicyVersion) -> PolicyVersion:
        """The oldest token version that is not too old for the batch of `version`."""
        return PolicyVersion(version - self.horizon)

    def oldest_eligible(self, version: PolicyVersion) -> PolicyVersion:
        """The oldest start version of a group that may be in the batch of `version`."""
        if self.rule is StalenessRule.DROP_STALE:
            return self.oldest_allowed(version)
        return FIRST_VERSION

    def eligible(self, counts: CountsByVersion, version: PolicyVersion) -> GroupCounts:
        """The groups that may be in the batch of `version`, now or when they are complete."""
        if self.rule is StalenessRule.DROP_STALE:
            return counts.since(self.oldest_eligible(version))
        return counts.total

    def waits_until(
        self, counts: CountsByVersion, version: PolicyVersion, *, count: int
    ) -> PolicyVersion | None:
        """The batch waits for open groups started at or before this version; None: for none."""
        if self.eligible(counts, version).complete < count:
            return LAST_VERSION
        unmet = (r.latest for r in self._requirements(counts, version) if r.complete < r.needed)
        return next(unmet, None)

    def batch_size(self, counts: CountsByVersion, version: PolicyVersion, *, count: int) -> int:
        """`count`, or more where the rule requires more."""
        return max([count, *(r.needed for r in self._requirements(counts, version))])

    def late_before(self, version: PolicyVersion, *, taken: bool) -> PolicyVersion:
        """Groups that started before the returned version are removed when `version` is published,
        or when its batch is `taken`."""
        if self.rule in SURPLUS_RULES and taken:
            # Earlier groups would be too old for the next batch.
            return PolicyVersion(self.oldest_allowed(version) + 1)
        return self.oldest_eligible(version)

    def closed_slots(self, *, batch: int, left: int) -> int:
        """Slots that stay empty after a batch is taken, until the next version. With C = 0, a group
        that starts in between is immediately too old. With must_take, at most C * B groups may be
        left for the next C batches. `left`: groups in flight that are not in the batch."""
        if not self.horizon:
            return self.slots - batch - left
        if self.rule is StalenessRule.MUST_TAKE:
            return max(0, self.slots - batch - self.horizon * self.groups_per_step)
        return 0

    def _requirements(
        self, counts: CountsByVersion, version: PolicyVersion
    ) -> Iterator[BatchRequirement]:
        """What the rule requires of the batch of `version`, most urgent first. Under long_rounds:
        all groups that started again at <= v - C, never more than B. Under must_take: all groups
        that started at <= v - C. So that no later batch requires more than B, this one also needs
        N - j * B of the N groups that started at <= v - C + j."""
        if self.rule is StalenessRule.LONG_ROUNDS:
            due = self.oldest_allowed(version)
            until_due = next(counts.until([due]))
            yield BatchRequirement(due, until_due.long, until_due.long_complete)
        if self.rule is not StalenessRule.MUST_TAKE:
            return
        steps_ahead = min(self.horizon, counts.total.active // self.groups_per_step)
        latest = [PolicyVersion(version - self.horizon + j) for j in range(steps_ahead + 1)]
        for ahead, until in enumerate(counts.until(latest)):
            needed = until.active - ahead * self.groups_per_step
            if needed > 0:
                yield BatchRequirement(latest[ahead], needed, until.complete)
