"""The options of each advantage, and of the shaping of scores before it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag

from rollick.config.section import CustomPart, Section, by_name, tag_of


class DrGrpoAdvantage(Section):
    """Score minus the group's mean; no division by the standard deviation."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """The name."""


class GrpoAdvantage(Section):
    """Score minus the group's mean, over the group's standard deviation."""

    name: Literal["grpo"] = "grpo"
    """The name."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the standard deviation."""


_Advantage = Annotated[
    Annotated[DrGrpoAdvantage, Tag("dr_grpo")]
    | Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[CustomPart, Tag("custom")],
    tag_of("advantages", default="dr_grpo"),
]
AdvantagePart = Annotated[
    _Advantage, BeforeValidator(by_name, json_schema_input_type=str | _Advantage)
]
