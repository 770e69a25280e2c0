"""What is known of each prompt's pass rate, and which prompts are worth a group for it.

    judged(group) -> verdicts of the step -> learn() -> beliefs -> retired(), choose()

A PromptBelief counts the passes and fails of a prompt. Prompts that are nearly always solved
retire; of several candidates the one near a pass rate of 1/2, where the scores of a group differ
most, is chosen. Which prompts are the candidates is the stream's business (prompts.py), and what
happens to a group without signal that of algorithms/selection.py.

Verdicts are put off until `learn`, and then taken in the order of ids: what is drawn within a step
does not depend on which of its groups was judged first.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rollick.config.schema import PromptSelectionConfig
from rollick.types import Group

LOG = logging.getLogger("rollick")


class Verdict(NamedTuple):
    """How the judged samples of one group did."""

    group: int
    prompt: str
    domain: str
    passes: int
    fails: int

    @classmethod
    def of(cls, group: Group, *, pass_score: float) -> Verdict:
        """A score >= pass_score passes; a failed reward is neither a pass nor a fail."""
        passed = [member.score.value >= pass_score for member in group.members if member.score.ok]
        prompt = group.prompt
        return cls(group.uid, prompt.uid, prompt.domain, sum(passed), len(passed) - sum(passed))


@dataclass(frozen=True, slots=True)
class PromptBelief:
    """Passes and fails of a prompt so far: Beta(1 + passes, 1 + fails) over its pass rate.

    The counts are floats, because old ones may be worth less than new ones.
    """

    passes: float = 0.0
    fails: float = 0.0

    @property
    def tries(self) -> float:
        return self.passes + self.fails

    @property
    def pass_rate(self) -> float:
        """Of the judged samples; 0 before there are any."""
        return self.passes / self.tries if self.tries else 0.0

    def updated(self, passes: int, fails: int, *, decay: float = 1.0) -> PromptBelief:
        """With more samples of this prompt.

        What was known before is worth `decay` of itself: the policy that earned it is not the
        policy of now. Without a judged sample nothing changes.
        """
        if not passes + fails:
            return self
        return PromptBelief(decay * self.passes + passes, decay * self.fails + fails)


def is_retired(belief: PromptBelief, *, pass_rate: float = 0.9, min_tries: float = 8) -> bool:
    """Whether the prompt is nearly always solved, over enough samples to say so."""
    return belief.tries >= min_tries and belief.pass_rate >= pass_rate


def nearest_half(
    beliefs: Sequence[PromptBelief], count: int, *, generator: np.random.Generator
) -> list[int]:
    """Places of `count` prompts, without any twice, whose drawn pass rate is nearest to 1/2.

    The rate of each is drawn from its belief (Thompson sampling), so that a prompt of which little
    is known has its chance: among many, that of each is in proportion to its belief's density at
    1/2. The same generator state and beliefs give the same prompts.
    """
    alphas = np.array([1 + belief.passes for belief in beliefs])
    betas = np.array([1 + belief.fails for belief in beliefs])
    distance = np.abs(generator.beta(alphas, betas) - 0.5)
    return [int(place) for place in np.argsort(distance, kind="stable")[:count]]


class Curriculum:
    """The beliefs of all prompts, by domain. `sizes` are the prompts that each domain has."""

    def __init__(self, config: PromptSelectionConfig, sizes: Mapping[str, int]) -> None:
        self._config = config
        self._sizes = dict(sizes)
        self._beliefs: dict[str, dict[str, PromptBelief]] = {name: {} for name in sizes}
        # Follows from the beliefs; kept because it is asked for at every draw.
        self._retired: dict[str, set[str]] = {name: set() for name in sizes}
        self._verdicts: list[Verdict] = []
        self._under_way: Counter[str] = Counter()
        self._revived = 0

    def retired(self, domain: str) -> Set[str]:
        """The prompts that are drawn no more; never all. Changes in `learn` and `restore` only."""
        return self._retired[domain]

    def is_under_way(self, prompt: str) -> bool:
        """Whether it was chosen and what came of it is not learned yet."""
        return self._under_way[prompt] > 0

    def choose(self, prompts: Sequence[str], *, domain: str, key: int) -> int:
        """The place of the prompt to draw; the same `key` and beliefs give the same one."""
        generator = np.random.Generator(np.random.Philox(key=key))
        known = self._beliefs[domain]
        beliefs = [known.get(prompt, PromptBelief()) for prompt in prompts]
        (place,) = nearest_half(beliefs, 1, generator=generator)
        return place

    def begin(self, prompt: str) -> None:
        """It was drawn: until `learn` has a verdict on it, it is under way."""
        self._under_way[prompt] += 1

    def judged(self, group: Group) -> None:
        """All samples of a group are scored, be it trained on or dropped; see `learn`."""
        self._verdicts.append(Verdict.of(group, pass_score=self._config.pass_score))

    def learn(self) -> None:
        """Take up the verdicts since the last call. Called between steps, when nothing is drawn."""
        touched: set[str] = set()
        for verdict in sorted(self._verdicts):
            beliefs = self._beliefs[verdict.domain]
            known = beliefs.get(verdict.prompt, PromptBelief())
            fresh = known.updated(verdict.passes, verdict.fails, decay=self._config.decay)
            if fresh.tries:
                beliefs[verdict.prompt] = fresh
            self._end(verdict.prompt)
            touched.add(verdict.domain)
            self._retire(verdict.domain, [verdict.prompt])
        self._verdicts.clear()
        for domain in sorted(touched):
            self._revive(domain)

    def metrics(self) -> dict[str, float]:
        """Figures of the beliefs. fsum: the order of the prompts must not show in the mean."""
        rates = [belief.pass_rate for belief in self._all_beliefs()]
        figures = {
            "data/retired": float(sum(len(retired) for retired in self._retired.values())),
            "data/revived": float(self._revived),
        }
        return figures | ({"data/pass_rate": math.fsum(rates) / len(rates)} if rates else {})

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON: beliefs of prompts with tries, and what is under way."""
        return {
            "beliefs": {
                name: {prompt: [belief.passes, belief.fails] for prompt, belief in beliefs.items()}
                for name, beliefs in self._beliefs.items()
            },
            "verdicts": [list(verdict) for verdict in self._verdicts],
            "under_way": dict(self._under_way),
            "revived": self._revived,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Who is retired follows from the settings of now."""
        self._verdicts = [Verdict(*verdict) for verdict in state["verdicts"]]
        self._under_way = Counter(state["under_way"])
        self._revived = int(state["revived"])
        for name in self._sizes:
            saved: Mapping[str, Sequence[float]] = state["beliefs"][name]
            self._beliefs[name] = {
                prompt: PromptBelief(passes, fails) for prompt, (passes, fails) in saved.items()
            }
            self._retired[name] = set()
            self._retire(name, saved)
            self._revive(name)

    def _all_beliefs(self) -> Iterator[PromptBelief]:
        return (belief for beliefs in self._beliefs.values() for belief in beliefs.values())

    def _end(self, prompt: str) -> None:
        self._under_way[prompt] -= 1
        if self._under_way[prompt] <= 0:
            del self._under_way[prompt]

    def _retire(self, domain: str, prompts: Iterable[str]) -> None:
        """Retire those that are solved; one whose late groups say otherwise comes back."""
        config, retired = self._config, self._retired[domain]
        for prompt in prompts:
            belief = self._beliefs[domain].get(prompt, PromptBelief())
            solved = config.retire_above > 0 and is_retired(
                belief, pass_rate=config.retire_above, min_tries=config.min_tries
            )
            if solved:
                retired.add(prompt)
            else:
                retired.discard(prompt)

    def _revive(self, domain: str) -> None:
        """Where all prompts of a domain have retired, all come back as if they were unknown.

        An error would end a run whose other domains still learn, and another split of the shares
        is not what the recipe says. If the domain is learned indeed, its prompts retire again.
        """
        if len(self._retired[domain]) < self._sizes[domain]:
            return
        LOG.warning(
            "all %d prompts of domain %r had retired (pass rate >= %g): they come back. Give the "
            "domain harder prompts or a smaller share, or raise data.selection.retire_above",
            self._sizes[domain],
            domain,
            self._config.retire_above,
        )
        self._beliefs[domain].clear()
        self._retired[domain].clear()
        self._revived += 1
