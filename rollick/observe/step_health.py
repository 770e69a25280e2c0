"""Checks a training step for an exploding gradient and a collapsed policy.

    StepSignals of a step -> StepHealth.examine -> what is wrong, or "" -> pipelines/step_guard.py

A step is compared with the median of the last healthy ones. The limits are far outside of what
healthy runs show, and only several troubled steps in a row have a consequence. In the recorded runs
(docs/results) a gradient is at most 3.5 times the median, and the entropy at least 0.08 of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from statistics import median

WINDOW = 20
MIN_STEPS = 3
"""Healthy steps before a large gradient counts as an explosion: the first may be small."""
EXPLOSION_FACTOR = 30.0
"""A gradient above this multiple of the median explodes."""
VANISHED_SHARE = 1e-6
"""A gradient below this share of the median counts as 0: the model's outputs are saturated."""
COLLAPSED_ENTROPY = 1e-5
"""Mean entropy per token, in nats, below which a policy gives only one answer."""
COLLAPSED_SHARE = 1e-3
"""The entropy of a collapsed policy is also below this share of the median: learning lowers it more
slowly."""
MAX_MISMATCH = 3.0
"""KL divergence per token, in nats, of the policy from the one that sampled the tokens."""


@dataclass(frozen=True, slots=True)
class StepSignals:
    """What a training step shows. None: the role or the algorithm does not have it."""

    grad_norm: float
    loss: float
    has_signal: bool = True
    """Whether a token has an advantage. Without one, a gradient of 0 is expected."""
    changed: bool = True
    """Whether the optimizer stepped. False: it skipped a gradient that was not finite."""
    entropy: float | None = None
    mismatch_kl: float | None = None
    may_vanish: bool = False
    """Whether a gradient of 0 is expected even with a signal: a critic's values may be exact."""

    @property
    def is_evidence(self) -> bool:
        """Whether a step without trouble shows that the model is healthy: without a signal, a
        broken model looks the same."""
        return self.has_signal and self.changed


@dataclass(slots=True)
class StepHealth:
    """The recent healthy steps of one role."""

    gradients: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    entropies: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def examine(self, step: StepSignals) -> str:
        """What is wrong with the step; empty if nothing is."""
        trouble = self._describe_trouble(step)
        if not trouble:
            if step.has_signal:
                self.gradients.append(step.grad_norm)
            if step.entropy is not None:
                self.entropies.append(step.entropy)
        return trouble

    def examine_rows(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Examine the steps of a run before its resume, from their metrics."""
        for row in rows:
            if "train/grad_norm" in row:
                gradient, entropy = row["train/grad_norm"], row.get("train/mean/entropy")
                has_signal, mismatch = gradient > 0, row.get("train/mean/mismatch_kl")
                loss = row.get("train/loss", nan)  # A loss that is not finite has no metric.
                self.examine(StepSignals(gradient, loss, has_signal, True, entropy, mismatch))

    def _describe_trouble(self, step: StepSignals) -> str:
        if not step.changed:
            return "its gradient was not finite"
        if not (isfinite(step.loss) and isfinite(step.grad_norm)):
            return f"its loss was {step.loss:g}, its gradient {step.grad_norm:g}"
        usual = median(self.gradients) if self.gradients else 0.0
        if len(self.gradients) >= MIN_STEPS and step.grad_norm > EXPLOSION_FACTOR * usual > 0:
            times = f"{step.grad_norm / usual:.0f} times the usual one"
            return f"its gradient of {step.grad_norm:.3g} is {times}"
        if step.has_signal and not step.may_vanish and step.grad_norm < VANISHED_SHARE * usual:
            return f"its gradient fell from {usual:.3g} to {step.grad_norm:.3g}"
        return self._describe_collapse(step)

    def _describe_collapse(self, step: StepSignals) -> str:
        usual = median(self.entropies) if self.entropies else 0.0
        limit = min(COLLAPSED_ENTROPY, COLLAPSED_SHARE * usual)
        if step.entropy is not None and step.entropy < limit:
            return f"the policy's entropy fell from {usual:.3g} to {step.entropy:.3g}"
        if step.mismatch_kl is not None and step.mismatch_kl > MAX_MISMATCH:
            return (
                f"the policy is {step.mismatch_kl:.3g} nats per token away from the one that "
                "sampled the tokens"
            )
        return ""
