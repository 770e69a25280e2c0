"""Selection: which groups and prompts are worth a gradient. Pure; the rollout drops and refills.

Groups: one without signal is dropped. Prompts: a PromptBelief holds what is known of a prompt's
pass rate; prompts that are nearly always solved retire, and those near a pass rate of 1/2, where
the scores of a group differ most, are drawn more often.

Only scores that are a judgement are looked at: a failed reward is neither signal nor its absence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollick.types import Group

DropReason = Literal["no_scores", "no_signal"]
"""no_scores: every reward failed. no_signal: the scores do not differ, so every advantage is 0."""


def has_signal(group: Group, *, min_spread: float) -> bool:
    """Whether the judged scores differ by more than `min_spread`."""
    scores = [member.score.value for member in group.members if member.score.ok]
    return len(scores) > 1 and max(scores) - min(scores) > min_spread


def judge_group(
    group: Group, *, min_spread: float, drop_no_signal: bool = True
) -> DropReason | None:
    """Why the group is to be dropped, or None if it is to be trained on."""
    if not any(member.score.ok for member in group.members):
        return "no_scores"
    if drop_no_signal and not has_signal(group, min_spread=min_spread):
        return "no_signal"
    return None


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

    def updated(self, group: Group, *, pass_score: float, decay: float = 1.0) -> PromptBelief:
        """With the scores of a group of this prompt; a score >= pass_score passes.

        What was known before is worth `decay` of itself: the policy that earned it is not the
        policy of now.
        """
        passed = [member.score.value >= pass_score for member in group.members if member.score.ok]
        passes = sum(passed)
        return PromptBelief(decay * self.passes + passes, decay * self.fails + len(passed) - passes)

    def to_state(self) -> dict[str, float]:
        """As JSON can hold it."""
        return {"passes": self.passes, "fails": self.fails}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> PromptBelief:
        return cls(float(state["passes"]), float(state["fails"]))


def is_retired(belief: PromptBelief, *, pass_rate: float = 0.9, min_tries: float = 8) -> bool:
    """Whether the prompt is nearly always solved, over enough samples to say so."""
    return belief.tries >= min_tries and belief.pass_rate >= pass_rate


def signal_weight(belief: PromptBelief) -> float:
    """4 E[p (1 - p)] under the belief: 1 for a sure 1/2, 0 for a sure 0 or 1, 2/3 if unknown.

    p (1 - p) is the variance of a pass, and so the size of the gradient that a group can give.
    """
    alpha, beta = 1 + belief.passes, 1 + belief.fails
    return 4 * alpha * beta / ((alpha + beta) * (alpha + beta + 1))


def nearest_half(
    beliefs: Sequence[PromptBelief], count: int, *, generator: np.random.Generator
) -> list[int]:
    """Places of `count` prompts, without any twice, whose drawn pass rate is nearest to 1/2.

    The rate of each is drawn from its belief (Thompson sampling), so that a prompt of which little
    is known has its chance. The same generator state and beliefs give the same prompts.
    """
    alphas = np.array([1 + belief.passes for belief in beliefs])
    betas = np.array([1 + belief.fails for belief in beliefs])
    distance = np.abs(generator.beta(alphas, betas) - 0.5)
    return [int(place) for place in np.argsort(distance, kind="stable")[:count]]
