"""The staleness rules: which complete groups make the batch of a version. Pure.

With C = ceil(max_staleness), B groups a step and v the version at the start of the step:

    must_take           the batch contains every group that started at a version <= v - C, and
                        waits for it. Nothing is dropped: the unbiased default.
    drop_stale          nothing waits for old groups; one that started before v - C is dropped
                        ("stale"). Biased towards what is fast, that is to say short.
    mask_stale_tokens   nothing waits and nothing is dropped; an old group is taken when it is
                        complete, and the caller masks its tokens of versions before v - C.
                        Biased towards the ends of long samples.
    first_finished      `surplus` groups more are in flight; the batch is the first B that
                        completed. What could not be in the next batch any more is dropped
                        ("surplus"). Biased towards what is short.
    long_rounds         there is a surplus and a batch when B groups are complete, of which the
                        oldest are taken; what is late then is deferred, not dropped: parked, and
                        started again with B - 1 others, as a long round that is waited for. Every
                        prompt is trained on; only the order favours what is short.

A long round begins when B groups are parked and the one before is over: they get the next places,
before any new prompt. Until all of them are in a batch there is no surplus, and the batch of
version v contains each of them that started again at <= v - C: so none is deferred twice. With
max_staleness 0 the round is one batch, of these groups alone; above it, others go on beside them.

Groups are counted by the version that they started at (a cohort), so that the question whether
there is a batch costs O(C), however many groups are in flight.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from rollick.types import PolicyVersion

STALE = "stale"
SURPLUS = "surplus"
FIRST_VERSION = PolicyVersion(0)
LAST_VERSION = PolicyVersion(sys.maxsize)


class Rule(StrEnum):
    """What happens to groups that lag; see above."""

    MUST_TAKE = "must_take"
    DROP_STALE = "drop_stale"
    MASK_STALE_TOKENS = "mask_stale_tokens"
    FIRST_FINISHED = "first_finished"
    LONG_ROUNDS = "long_rounds"


SURPLUS_RULES = frozenset({Rule.FIRST_FINISHED, Rule.LONG_ROUNDS})
"""Rules under which more groups are in flight than the batches have room for."""


def count_places(groups_per_step: int, max_staleness: float, *, surplus: int = 0) -> int:
    """B * (1 + K), and the surplus."""
    # Rounded, since 10 * (1 + 0.1) is a little more than 11 in floating point.
    return ceil(round(groups_per_step * (1 + max_staleness), 9)) + surplus


@dataclass(slots=True)
class Cohort:
    """Groups that have a place and are not in a batch, and how many of them are complete.

    `long` and `long_complete` are those among them that were parked before.
    """

    live: int = 0
    complete: int = 0
    long: int = 0
    long_complete: int = 0

    def count(self, live: int, complete: int, *, long: bool) -> None:
        """Add to the counts, or subtract."""
        self.live += live
        self.complete += complete
        if long:
            self.long += live
            self.long_complete += complete


class Cohorts:
    """Counts groups by start version, the oldest first. Groups start in the order of versions."""

    def __init__(self) -> None:
        self.total = Cohort()
        self._of: dict[PolicyVersion, Cohort] = {}

    def started(self, version: PolicyVersion, *, long: bool = False) -> None:
        self._of.setdefault(version, Cohort()).count(1, 0, long=long)
        self.total.count(1, 0, long=long)

    def completed(self, version: PolicyVersion, *, long: bool = False) -> None:
        self._of[version].count(0, 1, long=long)
        self.total.count(0, 1, long=long)

    def left(self, version: PolicyVersion, *, complete: bool, long: bool = False) -> None:
        """A group of that start version is in a batch, dropped or parked."""
        cohort = self._of[version]
        for counted in (cohort, self.total):
            counted.count(-1, -complete, long=long)
        if not cohort.live:
            del self._of[version]

    def since(self, oldest: PolicyVersion) -> Cohort:
        """The sum of the cohorts from that version on."""
        recent = [cohort for version, cohort in self._of.items() if version >= oldest]
        return Cohort(sum(c.live for c in recent), sum(c.complete for c in recent))

    def until(self, latest: Iterable[PolicyVersion]) -> Iterator[Cohort]:
        """For each of the versions, which must rise, the sum of the cohorts up to it."""
        cohorts = deque(self._of.items())
        live = complete = long = long_complete = 0
        for version in latest:
            while cohorts and cohorts[0][0] <= version:
                cohort = cohorts.popleft()[1]
                live += cohort.live
                complete += cohort.complete
                long += cohort.long
                long_complete += cohort.long_complete
            yield Cohort(live, complete, long, long_complete)


@dataclass(frozen=True, slots=True)
class Demand:
    """`needed` of the groups that started at `latest` or before must be in the batch."""

    latest: PolicyVersion
    needed: int
    complete: int


@dataclass(frozen=True, slots=True)
class Staleness:
    """A rule with its numbers: B = groups_per_step and C = horizon."""

    rule: Rule
    horizon: int
    groups_per_step: int

    def oldest_allowed(self, version: PolicyVersion) -> PolicyVersion:
        """A token of an earlier version is too old for the batch of `version`."""
        return PolicyVersion(version - self.horizon)

    def oldest_counted(self, version: PolicyVersion) -> PolicyVersion:
        """A group that started earlier is not for the batch of `version`, complete or not."""
        if self.rule is Rule.DROP_STALE:
            return self.oldest_allowed(version)
        return FIRST_VERSION

    def counted(self, cohorts: Cohorts, version: PolicyVersion) -> Cohort:
        """The groups that may be in the batch of `version`, now or when they are complete."""
        if self.rule is Rule.DROP_STALE:
            return cohorts.since(self.oldest_counted(version))
        return cohorts.total

    def waits_until(
        self, cohorts: Cohorts, version: PolicyVersion, *, count: int
    ) -> PolicyVersion | None:
        """A batch of `count` waits for open groups that started at this version or before.

        None if it waits for none.
        """
        if self.counted(cohorts, version).complete < count:
            return LAST_VERSION
        unmet = (d.latest for d in self._demands(cohorts, version) if d.complete < d.needed)
        return next(unmet, None)

    def batch_size(self, cohorts: Cohorts, version: PolicyVersion, *, count: int) -> int:
        """`count`, or more where the rule wants more."""
        return max([count, *(demand.needed for demand in self._demands(cohorts, version))])

    def late_before(self, version: PolicyVersion, *, taken: bool) -> PolicyVersion:
        """Groups that started earlier are dropped or deferred: when `version` is published, and
        when its batch is `taken`."""
        oldest = self.oldest_counted(version)
        if self.rule in SURPLUS_RULES and taken:
            # In the next batch they would be too old.
            oldest = PolicyVersion(self.oldest_allowed(version) + 1)
        return oldest

    def shut_places(self, places: int, *, batch: int, left: int) -> int:
        """Empty places that stay so from the taking of a batch to the next version.

        Without staleness a group that starts in between is too old at once. With must_take no more
        than C * B groups may be left for the C next batches. `left` are in flight beside the batch.
        """
        if not self.horizon:
            return places - batch - left
        if self.rule is Rule.MUST_TAKE:
            return max(0, places - batch - self.horizon * self.groups_per_step)
        return 0

    @property
    def drop_reason(self) -> str:
        return SURPLUS if self.rule is Rule.FIRST_FINISHED else STALE

    def _demands(self, cohorts: Cohorts, version: PolicyVersion) -> Iterator[Demand]:
        """What the rule wants of the batch of `version`, the most urgent first.

        Under long_rounds: all that started again at a version <= v - C, which are never more than
        B. Under must_take: all that started at a version <= v - C. So that this never asks for more
        than B groups, the batches before must leave at most j * B groups for the j next ones: of
        the N groups that started at <= v - C + j, at least N - j * B are in this batch. j = 0 is
        the rule itself.
        """
        if self.rule is Rule.LONG_ROUNDS:
            due = self.oldest_allowed(version)
            cohort = next(cohorts.until([due]))
            yield Demand(due, cohort.long, cohort.long_complete)
        if self.rule is not Rule.MUST_TAKE:
            return
        steps_ahead = min(self.horizon, cohorts.total.live // self.groups_per_step)
        latest = [PolicyVersion(version - self.horizon + j) for j in range(steps_ahead + 1)]
        for ahead, cohort in enumerate(cohorts.until(latest)):
            needed = cohort.live - ahead * self.groups_per_step
            if needed > 0:
                yield Demand(latest[ahead], needed, cohort.complete)
