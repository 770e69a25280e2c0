"""Curriculum: the estimated pass rate of each prompt, and which prompts and domains to draw.

    record_group(group) -> outcomes of the step -> update() -> beliefs -> retired(), choose()

Prompts that are nearly always solved are retired. Among several candidates, `choose` prefers a pass
rate near 1/2, where the scores of a group differ most. prompts.py selects the candidates.

Outcomes take effect in `update`, in the order of group ids. So the draws of a step do not depend on
the order in which groups finish.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rollick.config.schema import PromptSelectionConfig, RetireConfig
from rollick.errors import CheckpointError
from rollick.types import Group

LOG = logging.getLogger("rollick")

SMOOTHING = 0.3
"""Weight of the latest step in the moving average of rates."""
LOWEST_RATE = 0.2
"""Lower bound of rates: a domain is drawn at most five times as often as its share, so that one
without any signal cannot take all draws."""


class GroupOutcome(NamedTuple):
    group: int
    prompt: str
    domain: str
    passes: int
    fails: int

    @classmethod
    def of(cls, group: Group, *, pass_score: float) -> GroupOutcome:
        """A score >= pass_score passes. A failed reward counts as neither."""
        passed = [member.score.value >= pass_score for member in group.members if member.score.ok]
        prompt = group.prompt
        return cls(group.uid, prompt.uid, prompt.domain, sum(passed), len(passed) - sum(passed))


@dataclass(frozen=True, slots=True)
class PromptBelief:
    """The posterior Beta(1 + passes, 1 + fails) of a prompt's pass rate.

    The counts are floats, because old ones decay.
    """

    passes: float = 0.0
    fails: float = 0.0

    @property
    def tries(self) -> float:
        return self.passes + self.fails

    @property
    def pass_rate(self) -> float:
        """Share of passes; 0 without any tries."""
        return self.passes / self.tries if self.tries else 0.0

    def add_samples(self, passes: int, fails: int, *, decay: float = 1.0) -> PromptBelief:
        """The belief with these samples added. `decay` multiplies the old counts, which are those
        of older policies. Without new samples nothing changes."""
        if not passes + fails:
            return self
        return PromptBelief(decay * self.passes + passes, decay * self.fails + fails)


def is_retired(belief: PromptBelief, limits: RetireConfig) -> bool:
    """Whether the pass rate is high enough, over at least `min_tries` samples."""
    return belief.tries >= limits.min_tries and belief.pass_rate >= limits.pass_rate


def nearest_half(beliefs: Sequence[PromptBelief], generator: np.random.Generator) -> int:
    """The index of the prompt whose sampled pass rate is nearest to 1/2.

    Thompson sampling: each rate is sampled from its belief, so that a prompt with few tries is
    sometimes chosen. Equal generator states and beliefs give equal results.
    """
    alphas = np.array([1 + belief.passes for belief in beliefs])
    betas = np.array([1 + belief.fails for belief in beliefs])
    return int(np.argmin(np.abs(generator.beta(alphas, betas) - 0.5)))


class Curriculum:
    """The beliefs of all prompts by domain. `sizes` is the number of prompts per domain."""

    def __init__(self, config: PromptSelectionConfig, sizes: Mapping[str, int]) -> None:
        self._config = config
        self._sizes = dict(sizes)
        self._beliefs: dict[str, dict[str, PromptBelief]] = {name: {} for name in sizes}
        # Derived from the beliefs; cached, because every draw reads it.
        self._retired: dict[str, set[str]] = {name: set() for name in sizes}
        self._outcomes: list[GroupOutcome] = []
        self._revived = 0
        self.in_flight: Counter[str] = Counter()
        """Draws of each prompt whose outcome `update` has not applied yet."""

    def retired(self, domain: str) -> Set[str]:
        """The retired prompts; never all. Changes only in `update` and `restore`."""
        return self._retired[domain]

    def choose(self, prompts: Sequence[str], *, domain: str, key: int) -> int:
        """The index of the prompt to draw, determined by `key` and the beliefs."""
        generator = np.random.Generator(np.random.Philox(key=key))
        beliefs = self._beliefs[domain]
        return nearest_half([beliefs.get(prompt, PromptBelief()) for prompt in prompts], generator)

    def record_group(self, group: Group) -> None:
        self._outcomes.append(GroupOutcome.of(group, pass_score=self._config.pass_score))

    def update(self) -> None:
        """Apply the outcomes since the last call. Call between steps."""
        updated_domains: set[str] = set()
        for outcome in sorted(self._outcomes):
            beliefs = self._beliefs[outcome.domain]
            old = beliefs.get(outcome.prompt, PromptBelief())
            new = old.add_samples(outcome.passes, outcome.fails, decay=self._config.decay)
            if new.tries:
                beliefs[outcome.prompt] = new
            self.in_flight[outcome.prompt] -= 1
            updated_domains.add(outcome.domain)
            self._retire(outcome.domain, [outcome.prompt])
        self._outcomes.clear()
        self.in_flight = +self.in_flight  # Keeps positive counts.
        for domain in sorted(updated_domains):
            self._revive(domain)

    def metrics(self) -> dict[str, float]:
        rates = [b.pass_rate for beliefs in self._beliefs.values() for b in beliefs.values()]
        retired = sum(map(len, self._retired.values()))
        metrics = {"data/retired": float(retired), "data/revived": float(self._revived)}
        # fsum: the result does not depend on the order of the prompts.
        return metrics | ({"data/pass_rate": math.fsum(rates) / len(rates)} if rates else {})

    def state(self) -> dict[str, Any]:
        counts = {
            name: {prompt: [belief.passes, belief.fails] for prompt, belief in beliefs.items()}
            for name, beliefs in self._beliefs.items()
        }
        return {
            "beliefs": counts,
            "outcomes": [list(outcome) for outcome in self._outcomes],
            "in_flight": dict(self.in_flight),
            "revived": self._revived,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state. Retired prompts follow from the present configuration."""
        if "verdicts" in state:
            raise CheckpointError(
                "the curriculum in the checkpoint has the key 'verdicts', which is now 'outcomes'",
                fix="start a new run",
            )
        self._outcomes = [GroupOutcome(*outcome) for outcome in state["outcomes"]]
        self.in_flight = Counter(state["in_flight"])
        self._revived = int(state["revived"])
        for name in self._sizes:
            saved: Mapping[str, Sequence[float]] = state["beliefs"][name]
            self._beliefs[name] = {uid: PromptBelief(*counts) for uid, counts in saved.items()}
            self._retired[name] = set()
            self._retire(name, saved)
            self._revive(name)

    def _retire(self, domain: str, prompts: Iterable[str]) -> None:
        """Retire solved prompts, and bring back those that later groups did not solve."""
        limits, retired = self._config.retire, self._retired[domain]
        for prompt in prompts:
            belief = self._beliefs[domain].get(prompt, PromptBelief())
            if limits is not None and is_retired(belief, limits):
                retired.add(prompt)
            else:
                retired.discard(prompt)

    def _revive(self, domain: str) -> None:
        """If all prompts of a domain are retired, reset their beliefs and use all again.

        An error would end a run whose other domains still learn. Solved prompts retire again.
        """
        if len(self._retired[domain]) < self._sizes[domain]:
            return
        LOG.warning(
            "all %d prompts of domain %r are retired (pass rate >= %g); using all again. Add "
            "harder prompts, lower the domain's share, or raise data.selection.retire.pass_rate",
            self._sizes[domain],
            domain,
            self._config.retire.pass_rate if self._config.retire else 0,
        )
        self._beliefs[domain].clear()
        self._retired[domain].clear()
        self._revived += 1


class TrainedShares:
    """Draw weights that keep each domain's share among the trained groups, not among the draws.

    Domains whose groups often have equal scores lose more groups, so fixed draw shares would favour
    the others. Their weights follow a moving average of the rate at which groups are kept.
    """

    def __init__(self, domains: Mapping[str, float]) -> None:
        self._shares = dict(domains)
        self._rates = dict.fromkeys(domains, 1.0)
        self._scored: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()

    def record(self, domain: str, *, kept: bool) -> None:
        self._scored[domain] += 1
        self._kept[domain] += kept

    def update(self) -> None:
        """Apply what was recorded since the last call."""
        for domain, scored in self._scored.items():
            rate = self._kept[domain] / scored
            self._rates[domain] += SMOOTHING * (rate - self._rates[domain])
        self._scored.clear()
        self._kept.clear()

    @property
    def weights(self) -> dict[str, float]:
        """The relative frequency of draws by domain."""
        rates = {domain: max(rate, LOWEST_RATE) for domain, rate in self._rates.items()}
        return {domain: share / rates[domain] for domain, share in self._shares.items()}

    def state(self) -> dict[str, Any]:
        return {"rates": dict(self._rates), "scored": dict(self._scored), "kept": dict(self._kept)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rates = dict(state["rates"])
        self._scored = Counter(state["scored"])
        self._kept = Counter(state["kept"])
