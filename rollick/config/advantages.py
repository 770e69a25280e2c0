"""The options of each advantage, and of the shaping of scores before it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from rollick.config.section import CustomPart, Section, Share, TokenLimit, by_name, tag_of

Epsilon = Annotated[float, Field(gt=0)]


class DrGrpoAdvantage(Section):
    """Score minus the group's mean; no division by the standard deviation."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """The name."""


class GrpoAdvantage(Section):
    """Score minus the group's mean, over the group's standard deviation."""

    name: Literal["grpo"] = "grpo"
    """The name."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class RlooAdvantage(Section):
    """Score minus the mean of the group's other samples."""

    name: Literal["rloo"] = "rloo"
    """The name."""


class ReinforceAdvantage(Section):
    """The return of each token, discounted from the last one back; no group baseline."""

    name: Literal["reinforce"] = "reinforce"
    """The name."""
    gamma: Share = 1.0
    """What a token gets of the return of the next one."""
    whiten: bool = False
    """Take the mean over the batch's trained tokens away, and divide by their deviation."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class ReinforcePpAdvantage(Section):
    """The return of each token, whitened over the batch's tokens; a KL may be in the reward."""

    name: Literal["reinforce++"] = "reinforce++"
    """The name."""
    gamma: Share = 1.0
    """What a token gets of the return of the next one."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class ReinforcePpBaselineAdvantage(Section):
    """Score minus the group's mean, whitened over the batch."""

    name: Literal["reinforce++_baseline"] = "reinforce++_baseline"
    """The name."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class LitePpoAdvantage(Section):
    """Score minus the group's mean, over the standard deviation of the batch's scores."""

    name: Literal["lite_ppo"] = "lite_ppo"
    """The name."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class MaxRlAdvantage(Section):
    """Score minus the group's mean, over that mean; for scores that are never negative."""

    name: Literal["max_rl"] = "max_rl"
    """The name."""


class GdpoAdvantage(Section):
    """Each reward normalised in its group, weighed, added up, and whitened over the batch."""

    name: Literal["gdpo"] = "gdpo"
    """The name."""
    weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Weight by reward (or `reward/part`); only these count. Empty takes every reward, with 1."""
    epsilon: Epsilon = 1e-6
    """Added to each standard deviation."""


class GaeAdvantage(Section):
    """Generalised advantage estimation, over the values of a critic."""

    name: Literal["gae"] = "gae"
    """The name."""
    gamma: Share = 1.0
    """What a token gets of the value of the next one."""
    lam: Share = 0.95
    """How far TD errors reach back; 0 is one step, 1 the whole return."""
    bootstrap_truncated: bool = False
    """Count the critic's value after the last token of a truncated sample; else it counts as 0."""
    whiten: bool = True
    """Take the mean over the batch's trained tokens away, and divide by their deviation."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class StepReturnAdvantage(Section):
    """The return of each turn, discounted between turns and never inside one."""

    name: Literal["step_return", "segment_return"] = "step_return"
    """The name; both mean the same."""
    gamma: Share = 1.0
    """What a turn gets of the return of the next one."""
    whiten: bool = True
    """Take the mean over the batch's turns away, and divide by their deviation."""
    epsilon: Epsilon = 1e-6
    """Added to the standard deviation."""


class GigpoAdvantage(Section):
    """The episode's return compared in its group, and each step's return with that of equal states.

    Only states of one group are compared: equal keys of other tasks are other states.
    """

    name: Literal["gigpo"] = "gigpo"
    """The name."""
    gamma: Share = 0.95
    """What a turn gets of the return of the next one."""
    episode_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the comparison of whole episodes."""
    step_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the comparison of steps from equal states."""
    epsilon: Epsilon = 1e-6
    """Added to each standard deviation."""


class OpdAdvantage(Section):
    """On-policy distillation: how much likelier the teacher finds each drawn token."""

    name: Literal["opd"] = "opd"
    """The name."""
    limit: Annotated[float, Field(gt=0)] = 20.0
    """Largest size of an advantage, in nats."""


class ShapingConfig(Section):
    """What happens to scores before the advantage: length penalty, normalisation, clip."""

    mean: Literal["none", "group", "batch", "running"] = "none"
    """Whose mean is taken away from each score; running is of every score so far."""
    std: Literal["none", "group", "batch", "running"] = "none"
    """Whose standard deviation each score is divided by; scores without spread are not."""
    clip: Annotated[float, Field(ge=0)] = 0.0
    """Scores are cut to this size after that; 0 is off."""
    length_limit: TokenLimit = 0
    """Length of a response from which the whole length penalty holds; 0 is no penalty, max_tokens
    takes sampling.max_tokens."""
    length_buffer: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Last part of length_limit, over which the penalty grows from 0."""
    length_weight: Annotated[float, Field(ge=0)] = 1.0
    """What a response of length_limit or more loses."""
    difficulty: tuple[float, float] | None = None
    """Train only on groups whose mean score is within these two, ends included."""


_Advantage = Annotated[
    Annotated[DrGrpoAdvantage, Tag("dr_grpo")]
    | Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[RlooAdvantage, Tag("rloo")]
    | Annotated[ReinforceAdvantage, Tag("reinforce")]
    | Annotated[ReinforcePpAdvantage, Tag("reinforce++")]
    | Annotated[ReinforcePpBaselineAdvantage, Tag("reinforce++_baseline")]
    | Annotated[LitePpoAdvantage, Tag("lite_ppo")]
    | Annotated[MaxRlAdvantage, Tag("max_rl")]
    | Annotated[GdpoAdvantage, Tag("gdpo")]
    | Annotated[GaeAdvantage, Tag("gae")]
    | Annotated[StepReturnAdvantage, Tag("step_return")]
    | Annotated[StepReturnAdvantage, Tag("segment_return")]
    | Annotated[GigpoAdvantage, Tag("gigpo")]
    | Annotated[OpdAdvantage, Tag("opd")]
    | Annotated[CustomPart, Tag("custom")],
    tag_of("advantages", default="dr_grpo"),
]
AdvantagePart = Annotated[
    _Advantage, BeforeValidator(by_name, json_schema_input_type=str | _Advantage)
]
