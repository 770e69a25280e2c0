"""Building blocks of the schema: Section, bounded numbers, parts selected by name."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache, reduce
from inspect import cleandoc
from itertools import pairwise
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from rollick.config.names import NAMES, find_plugins, is_reference

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class IgnoredWith:
    """Marks a key that is not read if another key of its section has one of these values."""

    key: str
    values: tuple[Any, ...]


class Section(BaseModel):
    """A section of a recipe: frozen, unknown keys forbidden, every field documented."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """The docstring below a field is its description, also where a subclass redefines the field
        without one. Replaces pydantic's use_attribute_docstrings, which reads the source once for
        each class and takes a quarter of the start-up time of a command."""
        for base in reversed(cls.__mro__[: cls.__mro__.index(Section)]):
            for name, text in _field_docstrings(base.__module__).get(base.__qualname__, {}).items():
                cls.model_fields[name].description = text

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Rejects true as a number; Python would treat it as 1."""
        types = _field_types(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in types:
            if int in types:
                raise PydanticCustomError("int_type", "true is not a whole number")
            if float in types:
                raise PydanticCustomError("float_type", "true is not a number")
        return value


@cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """The docstring below each field, by class and field."""
    docstrings: dict[str, dict[str, str]] = {}
    source = Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8")
    for section in ast.parse(source).body:
        if not isinstance(section, ast.ClassDef):
            continue
        texts = docstrings.setdefault(section.name, {})
        for statement, next_statement in pairwise(section.body):
            match (statement, next_statement):
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = cleandoc(text)
                case _:
                    pass
    return docstrings


def _field_types(annotation: Any) -> set[Any]:
    """The plain types of a field such as `int`, or `Positive | None`."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return {get_args(part)[0] if get_origin(part) is Annotated else part for part in parts}


def expand_short_form(value: Any) -> Any:
    """`loss: ppo` is short for `loss: {name: ppo}`."""
    return {"name": value} if isinstance(value, str) else value


class CustomPart(Section):
    """A part that is a user's function, or one that an installed package registered."""

    name: str
    """file.py:function (relative to the recipe), package.module:function, or the name that an
    installed package registered."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Passed to the function as `options`."""
    needs: tuple[Literal["old", "reference", "values", "teacher"], ...] = ()
    """Inputs of the function besides scores and tokens: log-probs of the learner's old policy, of
    the reference or of the teacher, values of the critic."""


def union_tags(part: type[Section]) -> tuple[str, ...]:
    """The union tags of a part: the names it allows, or `custom` if it allows any name."""
    return get_args(part.model_fields["name"].annotation) or ("custom",)


@dataclass(frozen=True)
class NamedUnion:
    """Validates a union of parts: `{name: ppo, ...}` selects one, and so does just `ppo`."""

    kind: str
    default: str
    """Name of the part if the section has no `name`."""

    def __get_pydantic_core_schema__(self, parts: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = [Annotated[part, Tag(tag)] for part in get_args(parts) for tag in union_tags(part)]
        union = Annotated[reduce(or_, tagged), Discriminator(self._tag)]
        short = BeforeValidator(expand_short_form, json_schema_input_type=str | union)
        return handler.generate_schema(Annotated[union, short])

    def _tag(self, value: Any) -> str | None:
        """None for an unknown name. A value that is not a section gets the tag `custom`, whose
        validation reports it."""
        if not isinstance(value, dict):
            name = getattr(value, "name", None)
            return name if isinstance(name, str) and name in NAMES[self.kind] else "custom"
        name = value.get("name", self.default)  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(name, str):
            return "custom"
        if name in NAMES[self.kind]:
            return name
        return "custom" if is_reference(name) or name in find_plugins(self.kind) else None
