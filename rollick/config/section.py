"""What the parts of the schema are made of: the frozen Section, bounded numbers, short forms."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from rollick.config.names import NAMES

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str | None


class Section(BaseModel):
    """A part of a recipe: frozen, unknown keys forbidden, every field documented."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1; in a recipe that is always a slip."""
        kind: Any = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is int:
            raise PydanticCustomError("int_type", "true is not a whole number")
        if isinstance(value, bool) and kind is float:
            raise PydanticCustomError("float_type", "true is not a number")
        return value


def by_name(value: Any) -> Any:
    """`loss: ppo` is short for `loss: {name: ppo}`."""
    return {"name": value} if isinstance(value, str) else value


def as_text(value: Any) -> Any:
    """`policy: 0` is short for `policy: "0"`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def tag_of(kind: str, default: str) -> Any:
    """Picks a part by its name; options without a name are those of the default part."""

    def tag(value: Any) -> str:
        if isinstance(value, dict):
            name = value.get("name", default)  # pyright: ignore[reportUnknownVariableType]
        else:
            name = getattr(value, "name", None)
        return name if isinstance(name, str) and name in NAMES[kind] else "custom"

    return Discriminator(tag)


class CustomPart(Section):
    """A function of the user's own."""

    name: Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")]
    """file.py:function (relative to the recipe) or package.module:function."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Handed to the function as its `options`."""
