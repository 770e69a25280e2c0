"""The algorithm section of a recipe: its parts, and the streams that they read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rollick.config.presets import PRESETS, apply_preset, expand_preset_name
from rollick.config.schema import corrections, losses
from rollick.config.schema.advantages import (
    GROUP_RELATIVE,
    AdvantagePart,
    BaselineAdvantage,
    ShapingConfig,
)
from rollick.config.schema.section import CustomPart, Section

Aggregation = Annotated[
    str, Field(description="How token losses are averaged, over the global batch.")
]
Stream = Literal["old", "reference", "values", "teacher", "teacher_top"]
"""Values per token that an algorithm can need in a batch."""


def _check_preset(name: str) -> str:
    if name not in PRESETS:
        raise PydanticCustomError("unknown_preset", "there is no such preset")
    return name


class AlgorithmConfig(Section):
    """How scores become a gradient."""

    preset: Annotated[str, AfterValidator(_check_preset)] | None = None
    """A method by name (see `rollick list`); the other keys here override its settings."""
    advantage: AdvantagePart = BaselineAdvantage()
    """How a group's scores become advantages."""
    shaping: ShapingConfig = ShapingConfig()
    """Changes to the scores before the advantage."""
    loss: losses.LossPart = losses.DppoTvLoss()
    """The loss per token."""
    aggregation: Aggregation = "token_mean"
    correction: corrections.CorrectionPart = corrections.NoCorrection()
    """Which policy is pi_old, and how the mismatch between engine and learner is corrected."""
    kl: losses.KlConfig = losses.KlConfig()
    """KL to a reference policy."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the loss, relative to the algorithms of other domains."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        return apply_preset(value) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]

    @property
    def without_preset_name(self) -> AlgorithmConfig:
        """The settings alone: two domains with equal settings have one algorithm."""
        return self.model_copy(update={"preset": None})

    @property
    def needs_different_scores(self) -> bool:
        """Whether a group with equal scores has no gradient. False for custom parts, where this is
        unknown."""
        reads_advantage = self.loss.name not in losses.WITHOUT_ADVANTAGE
        return reads_advantage and self.advantage.name in GROUP_RELATIVE

    @property
    def needs(self) -> frozenset[Stream]:
        """The streams that a batch must carry for this algorithm."""
        streams: set[Stream] = set()
        for part in (self.advantage, self.loss, self.correction):
            if isinstance(part, CustomPart):
                streams.update(part.needs)
        if self.needs_old_logprobs:
            streams.add("old")
        if self.kl.coefficient > 0 or self.loss.name in losses.PAIRWISE:
            streams.add("reference")
        if self.advantage.name == "gae":
            streams.add("values")
        if self.advantage.name == "opd":
            streams.add("teacher")
        if self.loss.name == "distillation":
            streams.add("teacher_top")
        return frozenset(streams)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the learner computes log-probs before the step."""
        return self.correction.name != "bypass" and not self.interpolates_old

    @property
    def old_only_in_loss(self) -> bool:
        """Whether only the loss reads the learner's old policy. With one optimizer step per batch
        this is the trained policy, so it needs no forward."""
        custom_reads_old = any(
            isinstance(part, CustomPart) and "old" in part.needs
            for part in (self.advantage, self.loss, self.correction)
        )
        is_read_elsewhere = custom_reads_old or self.kl.in_reward or self.advantage.name == "opd"
        return self.correction.name == "none" and not is_read_elsewhere

    @property
    def old_is_behaviour(self) -> bool:
        """Whether the loss uses mu as pi_old."""
        return self.correction.name in corrections.OLD_IS_BEHAVIOUR

    @property
    def interpolates_old(self) -> bool:
        """Whether pi_old is interpolated between mu and pi, so that it needs no forward."""
        part = self.correction
        return isinstance(part, corrections.DecoupledCorrection) and part.old == "interpolated"


Algorithm = Annotated[
    AlgorithmConfig,
    BeforeValidator(expand_preset_name, json_schema_input_type=str | AlgorithmConfig),
]
"""The section, or only the name of a preset."""


class SftAlgorithm(Section):
    """Negative log-likelihood of the answers."""

    aggregation: Aggregation = "token_mean"


class DpoAlgorithm(Section):
    """The loss of a pair of answers; the mean over pairs is minimised."""

    loss: losses.PairLossPart = losses.PairLoss()
    """dpo or ipo, with its options."""


class DistillAlgorithm(Section):
    """Divergence from the teacher."""

    loss: losses.DistillationPart = losses.DistillationLoss()
    """The loss distillation, with its options."""
    aggregation: Aggregation = "token_mean"
