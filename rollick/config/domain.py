"""What a domain may say of its own: how its samples are drawn, which rows and groups count.

Everything here overrules a setting of the recipe for one domain; what is left out is the recipe's.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rollick.config.section import NonNegative, Positive, Scalar, Section


class DomainSampling(Section):
    """How the samples of one domain are drawn, where that is not the recipe's `sampling`."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """Divides the logits. In a validation domain it overrules evaluate.temperature."""
    max_tokens: Positive | None = None
    """New tokens of a sample at the most."""
    stop: tuple[str, ...] | None = None
    """Strings that end a sample."""
    stop_ids: tuple[NonNegative, ...] | None = None
    """Token ids that end a sample, besides the model's own."""


class DomainFilters(Section):
    """Which rows of a domain are used, and which of its groups are trained on."""

    where: dict[str, Scalar | tuple[Scalar, ...]] = Field(
        default_factory=dict[str, Scalar | tuple[Scalar, ...]]
    )
    """Columns and what they must hold: a value, or a list of which it must be one. Other rows are
    left out, and are not bad ones."""
    scores: tuple[float, float] | None = None
    """Groups whose mean score lies outside of this range are dropped and refilled (too_easy,
    too_hard)."""
    drop_no_signal: bool | None = None
    """Overrules rollout.drop_no_signal."""
    min_spread: Annotated[float, Field(ge=0)] | None = None
    """Overrules rollout.min_spread."""
    drop_truncated: bool | None = None
    """Overrules rollout.drop_truncated."""

    @field_validator("scores")
    @classmethod
    def _a_range_rises(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise PydanticCustomError("range", "the least is above the most")
        return value
