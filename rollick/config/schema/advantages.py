"""The options of each advantage, and of the shaping of scores before it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from rollick.config.schema.section import CustomPart, IgnoredWith, NamedUnion, Section, Share

Epsilon = Annotated[float, Field(gt=0, description="Added to the standard deviation.")]


class BaselineAdvantage(Section):
    """dr_grpo: score minus the group's mean; no division by the standard deviation.
    rloo: score minus the mean of the group's other samples.
    max_rl: score minus the group's mean, over that mean; for scores that are never negative."""

    name: Literal["dr_grpo", "rloo", "max_rl"] = "dr_grpo"


class NormalisedAdvantage(Section):
    """grpo: score minus the group's mean, over the group's standard deviation.
    lite_ppo: score minus the group's mean, over the standard deviation of the batch's scores."""

    name: Literal["grpo", "lite_ppo"] = "grpo"
    epsilon: Epsilon = 1e-6


class ReinforceAdvantage(Section):
    """The discounted return of each token, without a group baseline."""

    name: Literal["reinforce"] = "reinforce"
    gamma: Share = 1.0
    """Discount of the return from token to token."""
    whiten: bool = False
    """Subtract the mean over the batch's trained tokens, and divide by their standard deviation."""
    epsilon: Epsilon = 1e-6


class ReinforcePpAdvantage(Section):
    """The return of each token, whitened over the batch's tokens; the reward may include a KL."""

    name: Literal["reinforce++"] = "reinforce++"
    gamma: Share = 1.0
    """Discount of the return from token to token."""
    epsilon: Epsilon = 1e-6


class ReinforcePpBaselineAdvantage(Section):
    """Score minus the group's mean, whitened over the batch."""

    name: Literal["reinforce++_baseline"] = "reinforce++_baseline"
    whiten_over: Literal["tokens", "samples"] = "tokens"
    """What counts in the batch's mean and standard deviation: every trained token, as in the
    authors' code, or every sample once, whatever its length."""
    epsilon: Epsilon = 1e-6


class GdpoAdvantage(Section):
    """The weighted sum of rewards, each normalised in its group, whitened over the batch."""

    name: Literal["gdpo"] = "gdpo"
    weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Weight by reward (or `reward/part`); others are left out. Empty: all rewards, weight 1."""
    epsilon: Epsilon = 1e-6


class GaeAdvantage(Section):
    """Generalised advantage estimation, over the values of a critic."""

    name: Literal["gae"] = "gae"
    gamma: Share = 1.0
    """Discount of the value from token to token."""
    lam: Share = 0.95
    """Decay of TD errors; 0 is the one-step TD error, 1 the full return."""
    bootstrap_truncated: bool = False
    """Bootstrap a truncated sample from the critic's value after its last token, instead of 0."""
    whiten: bool = True
    """Subtract the mean over the batch's trained tokens, and divide by their standard deviation."""
    epsilon: Epsilon = 1e-6


class StepReturnAdvantage(Section):
    """The return of each turn, discounted between turns but not within one."""

    name: Literal["step_return", "segment_return"] = "step_return"
    """Both names mean the same."""
    gamma: Share = 1.0
    """Discount of the return from turn to turn."""
    whiten: bool = True
    """Subtract the mean over the batch's turns, and divide by their standard deviation."""
    epsilon: Epsilon = 1e-6


class GigpoAdvantage(Section):
    """The episode's return relative to its group, and each step's return relative to equal states.

    Only states of one group are compared.
    """

    name: Literal["gigpo"] = "gigpo"
    gamma: Share = 0.95
    """Discount of the return from turn to turn."""
    episode_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the episode advantage."""
    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the step advantage."""
    epsilon: Epsilon = 1e-6


class OpdAdvantage(Section):
    """On-policy distillation: the teacher's minus the policy's log-prob of each sampled token."""

    name: Literal["opd"] = "opd"
    limit: Annotated[float, Field(gt=0)] = 20.0
    """Largest absolute value of an advantage, in nats."""


def _number_or_word(value: Any) -> str:
    return "word" if isinstance(value, str) else "number"


TokenLimit = Annotated[
    Annotated[int, Field(ge=0, strict=True), Tag("number")]
    | Annotated[Literal["max_tokens"], Tag("word")],
    Discriminator(_number_or_word),
]
"""A number of tokens, or sampling.max_tokens."""

NO_LIMIT = IgnoredWith("length_limit", (0,))


class ShapingConfig(Section):
    """Changes to scores before the advantage: length penalty, normalisation, clip."""

    mean: Literal["none", "group", "batch", "running"] = "none"
    """The mean to subtract from each score; running: over all scores so far."""
    std: Literal["none", "group", "batch", "running"] = "none"
    """The standard deviation to divide each score by, unless it is 0."""
    clip: Annotated[float, Field(ge=0)] = 0.0
    """Clip normalised scores to this absolute value; 0 is off."""
    length_limit: TokenLimit = 0
    """Response length with the full length penalty; 0 is no penalty, max_tokens is
    sampling.max_tokens."""
    length_buffer: Annotated[float, Field(gt=0, le=1), NO_LIMIT] = 0.2
    """Last fraction of length_limit, over which the penalty grows from 0."""
    length_weight: Annotated[float, Field(ge=0), NO_LIMIT] = 1.0
    """The full length penalty."""
    difficulty: tuple[float, float] | None = None
    """Train only on groups with a mean score in this range, both ends included."""


GROUP_RELATIVE = frozenset(
    {"dr_grpo", "grpo", "rloo", "lite_ppo", "max_rl", "reinforce++_baseline"}
)
"""Advantages without signal for a group with equal scores. gdpo is not one of them: it compares
each reward of the group, and their sums may be equal."""

SampleAdvantage = (
    BaselineAdvantage | NormalisedAdvantage | ReinforcePpBaselineAdvantage | GdpoAdvantage
)
TokenAdvantage = ReinforceAdvantage | ReinforcePpAdvantage | GaeAdvantage | OpdAdvantage
TurnAdvantage = StepReturnAdvantage | GigpoAdvantage
AdvantagePart = Annotated[
    SampleAdvantage | TokenAdvantage | TurnAdvantage | CustomPart,
    NamedUnion("advantages", default="dr_grpo"),
]
