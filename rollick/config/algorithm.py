"""The algorithm section of a recipe: which parts, and which streams they look at."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rollick.config.advantages import AdvantagePart, DrGrpoAdvantage, ShapingConfig
from rollick.config.corrections import (
    OLD_IS_BEHAVIOUR,
    BypassCorrection,
    CorrectionPart,
    DecoupledCorrection,
)
from rollick.config.losses import PAIRWISE, DppoTvLoss, KlConfig, LossPart
from rollick.config.presets import PRESETS, by_preset, over_preset
from rollick.config.section import CustomPart, Section

Stream = Literal["old", "reference", "values", "teacher", "teacher_top"]
"""What a batch may have to carry of every token before it is trained on."""


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise PydanticCustomError("unknown_preset", "there is no such preset")
    return name


class AlgorithmConfig(Section):
    """How scores become a gradient."""

    preset: Annotated[str, AfterValidator(_known_preset)] | None = None
    """A method by name (see `rollick list`); the other settings here go over what it says."""
    advantage: AdvantagePart = DrGrpoAdvantage()
    """How a group's scores become advantages."""
    shaping: ShapingConfig = ShapingConfig()
    """What happens to the scores before that."""
    loss: LossPart = DppoTvLoss()
    """What is minimised, per token."""
    aggregation: str = "token_mean"
    """How token losses become one number; always over the global batch."""
    correction: CorrectionPart = BypassCorrection()
    """What stands for the old policy, and how engine/learner mismatch is weighted."""
    kl: KlConfig = KlConfig()
    """KL to a reference policy."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the whole loss, beside the algorithms of other domains."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, said: Any) -> Any:
        return over_preset(said) if isinstance(said, dict) else said  # pyright: ignore[reportUnknownArgumentType]

    @property
    def unnamed(self) -> AlgorithmConfig:
        """The settings alone, whatever preset they came from: equal ones are one algorithm."""
        return self.model_copy(update={"preset": None})

    @property
    def needs(self) -> frozenset[Stream]:
        """The streams that a batch must carry for this algorithm."""
        found: set[Stream] = set()
        for part in (self.advantage, self.loss, self.correction):
            if isinstance(part, CustomPart):
                found.update(part.needs)
        if self.needs_old_logprobs:
            found.add("old")
        if self.kl.coefficient > 0 or self.loss.name in PAIRWISE:
            found.add("reference")
        if self.advantage.name == "gae":
            found.add("values")
        if self.advantage.name == "opd":
            found.add("teacher")
        if self.loss.name == "distillation":
            found.add("teacher_top")
        return frozenset(found)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the learner computes log-probs before the step."""
        return self.correction.name != "bypass" and not self.interpolates_old

    @property
    def old_only_in_loss(self) -> bool:
        """Whether nothing but the loss looks at the learner's old policy. With one optimizer step a
        batch that is the policy which is trained, so that no forward is needed for it."""
        asked = any(
            isinstance(part, CustomPart) and "old" in part.needs
            for part in (self.advantage, self.loss, self.correction)
        )
        elsewhere = asked or self.kl.in_reward or self.advantage.name == "opd"
        return self.correction.name == "none" and not elsewhere

    @property
    def old_is_behaviour(self) -> bool:
        """Whether mu stands for pi_old in the loss."""
        return self.correction.name in OLD_IS_BEHAVIOUR

    @property
    def interpolates_old(self) -> bool:
        """Whether pi_old is a point between mu and pi, so that no forward is needed for it."""
        part = self.correction
        return isinstance(part, DecoupledCorrection) and part.old == "interpolated"


Algorithm = Annotated[
    AlgorithmConfig, BeforeValidator(by_preset, json_schema_input_type=str | AlgorithmConfig)
]
"""The section, or the name of a preset alone."""
