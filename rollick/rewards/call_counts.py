"""Calls, failures, time and costs of each reward, and its error budget.

Totals are of the run; means are of the calls since the last `take_metrics`, that is of a step. Both
are in the checkpoint: a resumed run neither spends its max_cost twice nor logs a step without the
calls that were made before it was stopped.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from rollick.config.schema import RewardSpec
from rollick.errors import UNAVAILABLE_FIX, RewardError, ServiceUnavailable
from rollick.types import Score, ScoreStatus

RECENT_CALLS = 100
"""Calls of a reward that its error budget looks at."""
MIN_CALLS = 20
"""Calls before an error budget is checked."""
COST = "cost"
"""The metric that max_cost limits."""


@dataclass(slots=True)
class _Count:
    calls: int = 0
    cached: int = 0
    failed: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Sum of each metric that the scores report."""


class RewardCallCounts:
    """Counts of every reward of a pool."""

    def __init__(self) -> None:
        self._step: defaultdict[str, _Count] = defaultdict(_Count)
        self._totals = defaultdict[tuple[str, str], float](float)
        """Of each reward and metric, over the run."""
        self._recent = defaultdict[str, deque[ScoreStatus]](lambda: deque(maxlen=RECENT_CALLS))
        self._last_failure: dict[str, str] = {}

    def count(self, reward: str, score: Score) -> None:
        self._recent[reward].append(score.status)
        if not score.ok:
            self._last_failure[reward] = score.detail
        count = self._step[reward]
        count.calls += 1
        count.failed += not score.ok
        count.seconds += score.seconds
        for name, amount in score.metrics.items():
            count.metrics[name] = count.metrics.get(name, 0.0) + amount
            self._totals[reward, name] += amount

    def count_cached(self, reward: str) -> None:
        self._step[reward].cached += 1

    def cost(self, reward: str) -> float:
        return self._totals[reward, COST]

    def check_error_budget(self, spec: RewardSpec) -> None:
        """RewardError, or ServiceUnavailable, if more of the recent calls failed than the reward's
        budget allows."""
        recent = self._recent[spec.name]
        if spec.error_budget is None or len(recent) < MIN_CALLS:
            return
        failed = len(recent) - recent.count(ScoreStatus.OK)
        allowed_calls = spec.error_budget * len(recent)
        if failed > allowed_calls:
            calls = f"{failed} of the last {len(recent)} calls of the reward {spec.name!r} failed"
            allowed = f"its error_budget allows {spec.error_budget:.0%}"
            last = f"the last failure: {self._last_failure.get(spec.name, '')}"
            fix = "fix the reward or the service that it calls, or raise its error_budget"
            message = f"{calls}; {allowed}; {last}"
            if failed - recent.count(ScoreStatus.UNAVAILABLE) <= allowed_calls:
                raise ServiceUnavailable(message, fix=UNAVAILABLE_FIX)
            raise RewardError(message, fix=fix)

    def take_metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for reward, count in self._step.items():
            scored = max(1, count.calls - count.failed)
            metrics[f"reward/calls/{reward}"] = count.calls
            metrics[f"reward/cached/{reward}"] = count.cached
            metrics[f"reward/failed/{reward}"] = count.failed
            metrics[f"time/reward/{reward}"] = count.seconds / max(1, count.calls)
            for name, amount in count.metrics.items():
                metrics[f"reward/mean/{reward}/{name}"] = amount / scored
                metrics[f"reward/total/{reward}/{name}"] = self._totals[reward, name]
        self._step.clear()
        return metrics

    def state(self) -> dict[str, Any]:
        """The counts of the current step and the totals, as JSON."""
        return {
            "step": {name: asdict(count) for name, count in self._step.items()},
            "totals": [[*key, amount] for key, amount in self._totals.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        for reward, saved in state["step"].items():
            self._step[reward] = _Count(**saved)
        for reward, name, amount in state["totals"]:
            self._totals[reward, name] = amount
