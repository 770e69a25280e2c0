"""Shares of the domains that hold among the groups that are trained on.

    judged(domain, kept) ... learn() -> how often its groups are kept -> weights of the draws

A domain whose groups mostly score alike is dropped more often than others, so that with fixed draws
the batch belongs to the others. Rates change between steps only, so that no clock shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

NEWS = 0.3
"""What the last step counts against all steps before."""
LOWEST_RATE = 0.2
"""A domain is drawn at most five times as often as its share says, however few groups are kept:
one that cannot be learned must not take all draws."""


class TrainedShares:
    """The rates at which the groups of each domain are kept."""

    def __init__(self, domains: Mapping[str, float]) -> None:
        self._shares = dict(domains)
        self._rates = dict.fromkeys(domains, 1.0)
        self._judged: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def judged(self, domain: str, *, kept: bool) -> None:
        """A group of the domain is trained on (`kept`) or dropped."""
        self._judged[domain] += 1
        self._kept[domain] += kept

    def learn(self) -> None:
        """Let what was judged since the last call count from now on."""
        for domain, judged in self._judged.items():
            now = self._kept[domain] / judged
            self._rates[domain] += NEWS * (now - self._rates[domain])
        self._judged.clear()
        self._kept.clear()

    @property
    def weights(self) -> dict[str, float]:
        """How the draws are split."""
        return {
            domain: share / max(self._rates[domain], LOWEST_RATE)
            for domain, share in self._shares.items()
        }

    def state(self) -> dict[str, Any]:
        return {
            "rates": dict(self._rates),
            "judged": dict(self._judged),
            "kept": dict(self._kept),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = dict(state["rates"])
        self._judged = Counter(state["judged"])
        self._kept = Counter(state["kept"])
