"""Who was called how often, failed, and cost what: counts by reward, and their budgets.

Totals are of the whole run (or since its resume); means are of the calls since they were last
taken, that is of a step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from rollick.config.schema import RewardSpec
from rollick.errors import RewardError
from rollick.types import Score

RECENT = 100
"""Calls of a reward that its error budget looks at."""
FEWEST = 20
"""Calls before which no budget is held to be broken."""
COST = "cost"
"""The figure that max_cost limits."""


@dataclass(slots=True)
class _Count:
    calls: int = 0
    cached: int = 0
    failed: int = 0
    seconds: float = 0.0
    figures: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))


class RewardTally:
    """Counts of every reward of a pool."""

    def __init__(self) -> None:
        self._total: defaultdict[str, _Count] = defaultdict(_Count)
        self._step: defaultdict[str, _Count] = defaultdict(_Count)
        self._recent: defaultdict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._last_failure: dict[str, str] = {}

    def count(self, reward: str, score: Score) -> None:
        """A call has ended."""
        self._recent[reward].append(score.ok)
        if not score.ok:
            self._last_failure[reward] = score.detail
        for count in (self._total[reward], self._step[reward]):
            count.calls += 1
            count.failed += not score.ok
            count.seconds += score.seconds
            for figure, amount in score.figures.items():
                count.figures[figure] += amount

    def count_cached(self, reward: str) -> None:
        """A call was not needed."""
        for count in (self._total[reward], self._step[reward]):
            count.cached += 1

    def cost(self, reward: str) -> float:
        """What it cost so far."""
        return self._total[reward].figures[COST]

    def refuse_failures(self, spec: RewardSpec) -> None:
        """RewardError if more of the recent calls failed than the reward's budget allows."""
        recent = self._recent[spec.name]
        if spec.error_budget is None or len(recent) < FEWEST:
            return
        failed = recent.count(False)
        if failed > spec.error_budget * len(recent):
            raise RewardError(
                f"{failed} of the last {len(recent)} calls of the reward {spec.name!r} failed, its "
                f"error_budget allows {spec.error_budget:.0%}; the last: "
                f"{self._last_failure.get(spec.name, '')}",
                fix="mend the reward or what it asks, or raise its error_budget",
            )

    def take_metrics(self) -> dict[str, float]:
        """Figures of the calls since the last time, and totals of what is spent."""
        found: dict[str, float] = {}
        for reward, count in self._step.items():
            calls = max(1, count.calls)
            judged = max(1, count.calls - count.failed)
            found[f"reward/calls/{reward}"] = count.calls
            found[f"reward/cached/{reward}"] = count.cached
            found[f"reward/failed/{reward}"] = count.failed
            found[f"time/reward/{reward}"] = count.seconds / calls
            for figure, amount in count.figures.items():
                found[f"reward/mean/{reward}/{figure}"] = amount / judged
                found[f"reward/total/{reward}/{figure}"] = self._total[reward].figures[figure]
        self._step.clear()
        return found
