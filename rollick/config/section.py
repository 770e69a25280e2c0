"""What the parts of the schema are made of: the frozen Section, bounded numbers, short forms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from rollick.config.names import NAMES, is_reference
from rollick.config.plugins import plugins

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str | None


def _number_or_word(value: Any) -> str:
    return "word" if isinstance(value, str) else "number"


TokenLimit = Annotated[
    Annotated[int, Field(ge=0, strict=True), Tag("number")]
    | Annotated[Literal["max_tokens"], Tag("word")],
    Discriminator(_number_or_word),
]
"""A number of tokens, or that of sampling.max_tokens."""


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
    """Picks a part by its name; options without a name are those of the default part.

    None for a name that nobody knows. A value that is no section goes to the custom part, which
    refuses it with a reason.
    """

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict):
            name = getattr(value, "name", None)
            return name if isinstance(name, str) and name in NAMES[kind] else "custom"
        name = value.get("name", default)  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(name, str):
            return "custom"
        if name in NAMES[kind]:
            return name
        return "custom" if is_reference(name) or name in plugins(kind) else None

    return Discriminator(tag)


class CustomPart(Section):
    """A function of the user's own, or of an installed package."""

    name: str
    """file.py:function (relative to the recipe), package.module:function, or the name that an
    installed package registered."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Handed to the function as its `options`."""
    needs: tuple[Literal["old", "reference", "values", "teacher"], ...] = ()
    """What the function looks at besides scores and tokens: log-probs of the learner's old policy,
    of the reference or of the teacher, values of the critic."""
