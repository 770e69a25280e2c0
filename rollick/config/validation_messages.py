"""Turns pydantic's errors into messages about the recipe file.

    ErrorDetails(loc, type, ctx, input) + Node (the recipe as written) -> Problem

A loc is pydantic's path through the schema, with union tags; a path leads through the recipe file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import ErrorDetails

from rollick.config.foreign_names import FOREIGN_NAMES
from rollick.config.names import names_of
from rollick.config.problems import KeyPath, Problem, did_you_mean, format_path, show
from rollick.config.schema import RECIPES, Recipe
from rollick.config.schema.section import Section, union_tags
from rollick.config.source import Node

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a string",
    "string_too_short": "a non-empty string",
    **dict.fromkeys(("model", "dict", "mapping"), "a section (key: value lines)"),
    **dict.fromkeys(("tuple", "list"), "a list"),
}
"""A pydantic error type, or its first word -> the expected value."""

BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}

PART_KINDS = {"advantage": "advantages", "loss": "losses", "correction": "corrections"}

OTHER_PIPELINE_FIXES = {
    "sampling": "use evaluate.sampling to validate, or remove it",
    "batch_size": "use rollout.groups_per_step and rollout.group_size",
    "environment": "use pipeline: agentic, or sft to imitate its solver",
    "agent": "use pipeline: agentic",
}
"""A key that only some pipelines have -> the fix for a recipe of another pipeline."""

_ENVIRONMENTS = ("processes", "threads", "step_timeout_s", "episode_timeout_s")
_SAMPLING = ("temperature", "max_tokens", "min_tokens", "top_p", "top_k", "min_p", "logit_bias")

RENAMED_KEYS: Mapping[str, str] = {
    "rollout.reward_processes": "rewards.processes",
    "rollout.reward_timeout_s": "rewards.timeout_s",
    **{f"rollout.env_{key}": f"environments.{key}" for key in _ENVIRONMENTS},
    **{f"evaluate.{key}": f"evaluate.sampling.{key}" for key in _SAMPLING},
    "data.*.*.prompt_format": "data.*.*.prompt, a string with columns in braces",
    "data.*.*.split": "data.*.*.source, as hub:NAME?split=SPLIT",
    "data.*.*.filters.where": "data.*.*.where",
    "data.*.*.environment.tasks": "data.*.*.limit",
    "data.*.*.environment.carried": "data.*.*.environment.window.carried",
    "data.*.*.environment.summary": "data.*.*.environment.window.summary",
    "data.selection.order": "data.selection.near_half_window",
    "data.selection.window": "data.selection.near_half_window",
    "data.selection.retire_above": "data.selection.retire.pass_rate",
    "data.selection.min_tries": "data.selection.retire.min_tries",
}
"""Old key -> the key that replaced it. `*` is any name; the n-th `*` is the same on both sides."""


@dataclass(frozen=True)
class ErrorTranslator:
    """Translates the errors of one recipe. `recipe`: the class that validated it."""

    recipe: type[Recipe]
    source: Node

    def translate(self, error: ErrorDetails) -> tuple[KeyPath, Problem]:
        """The path of an error in the recipe file, and the problem to report."""
        loc, source = error["loc"], self.source
        if error["type"] == "missing":
            path = (*path_in_file(loc[:-1], source), loc[-1])
            return path, self._report_missing_key(path, loc)
        path = path_in_file(loc, source)
        if error["type"] == "union_tag_not_found":
            name_path = (*path, "name") if source.find((*path, "name")) else path
            kind, name = PART_KINDS[str(path[-1])], error["input"]["name"]
            message, fix = describe_unknown_name(kind, name, allow_custom=True)
            location = source.find_nearest(name_path).location
            return path, Problem(location, format_path(name_path), message, fix)
        node = source.find_nearest(path)
        if error["type"] == "extra_forbidden":
            message, fix = self._describe_unknown_key(path, loc)
            return path, Problem(node.key_location, format_path(path), message, fix)
        message, fix = _describe_invalid_value(error, path)
        return path, Problem(node.location, format_path(path), message, fix)

    def find_similar_key(self, loc: Sequence[str | int]) -> str:
        """The known key that is most similar to an unknown one; empty if none is similar."""
        question = did_you_mean(loc[-1], self._sibling_keys(loc))
        return question.split("'")[1] if question else ""

    def _report_missing_key(self, path: KeyPath, loc: Sequence[str | int]) -> Problem:
        section = self.source.find_nearest(path[:-1])
        if isinstance(loc[-1], int):
            field = _section_at(self.recipe, loc[:-2]).model_fields[str(loc[-2])]
            message = f"must have {len(get_args(field.annotation))} elements, but has {loc[-1]}"
            return Problem(section.location, format_path(path[:-1]), message)
        description = _section_at(self.recipe, loc[:-1]).model_fields[loc[-1]].description or ""
        summary = re.split(r"[.;](?:\s|$)", description)[0]
        fix = f"give: {summary[:1].lower()}{summary[1:]}"
        return Problem(section.key_location, format_path(path), "is required", fix)

    def _describe_unknown_key(self, path: KeyPath, loc: Sequence[str | int]) -> tuple[str, str]:
        key = str(loc[-1])
        if new := new_key(path):
            return f"unknown key {key!r}", f"it is now {new}"
        if pipelines := [name for name, recipe in RECIPES.items() if has_key(recipe, path)]:
            noun, owners = "section" if len(path) == 1 else "key", " and ".join(pipelines)
            fix = OTHER_PIPELINE_FIXES.get(key, f"only {owners} have it: remove it")
            node = self.source.child("pipeline")
            pipeline = node.value if node else "rlvr"
            return f"pipeline {pipeline} has no {noun} {key!r}", fix
        return f"unknown key {key!r}", self._advise(key, loc)

    def _advise(self, key: str, loc: Sequence[str | int]) -> str:
        """The fix for an unknown key: its section, rollick's key, a similar key, or all keys."""
        sections = [section for section, name in _all_keys(self.recipe, ()) if name == key]
        # If a domain can override a key, the key of the whole recipe is usually intended.
        sections = [section for section in sections if ".NAME" not in section] or sections
        if sections and key != "name":
            return f"it belongs in {' or '.join(name or 'the top level' for name in sections[:3])}"
        for rollick_key in FOREIGN_NAMES.get(key, ()):
            if has_key(self.recipe, tuple(rollick_key.split("."))):
                return f"rollick calls it {rollick_key}"
        siblings = self._sibling_keys(loc)
        return did_you_mean(key, siblings) or f"the keys here are {', '.join(siblings)}"

    def _sibling_keys(self, loc: Sequence[str | int]) -> list[str]:
        return list(_section_at(self.recipe, loc[:-1]).model_fields)


def path_in_file(loc: Sequence[str | int], source: Node) -> KeyPath:
    """Convert a loc to a path in the file: drop union tags, and `name` for the short form
    `loss: ppo`."""
    node, path = source, ()
    for key in loc:
        child = node.child(key)
        if child is not None:
            node, path = child, (*path, key)
    return path


def new_key(path: KeyPath) -> str:
    """The key that replaced an old one; empty if there is none."""
    for old, new in RENAMED_KEYS.items():
        if match := re.fullmatch(re.escape(old).replace(r"\*", r"([^.]+)"), format_path(path)):
            for name in match.groups():
                new = new.replace("*", name, 1)
            return new
    return ""


def describe_unknown_name(kind: str, name: object, *, allow_custom: bool) -> tuple[str, str]:
    """Message and fix for a name that no plugin or built-in of its kind has."""
    known = names_of(kind)
    message = f"{show(name)} is not one of the {kind.replace('_', ' ')} ({', '.join(known)})"
    custom = "or your own as file.py:name" if allow_custom else ""
    return message, did_you_mean(name, known) or custom


def _describe_invalid_value(error: ErrorDetails, path: KeyPath) -> tuple[str, str]:
    error_type, value, context = error["type"], error["input"], error.get("ctx", {})
    if path[-2:-1] == ("options",):
        return (
            f"must be a string, a number, true or false, but is {show(value)}",
            "",
        )
    if error_type in BOUNDS:
        word, key = BOUNDS[error_type]
        return f"must be {word} {context[key]:g}, but is {show(value)}", ""
    if error_type == "literal_error":
        return _describe_choices(value, context["expected"].replace(" or ", ", "))
    if error_type == "union_tag_invalid":
        return _describe_choices(context["tag"], context["expected_tags"])
    if error_type == "unknown_preset":
        return describe_unknown_name("presets", value, allow_custom=False)
    if error_type == "too_long":
        return f"must have {context['max_length']} elements, but has {len(value)}", ""
    if expected := EXPECTED.get(error_type) or EXPECTED.get(error_type.split("_")[0]):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        needs_quotes = error_type == "string_type" and is_number
        fix = f'put quotes around it: "{value}"' if needs_quotes else ""
        return f"must be {expected}, but is {show(value)}", fix
    return f"{show(value)} is invalid: {error['msg']}", ""


def _describe_choices(value: object, quoted_choices: str) -> tuple[str, str]:
    choices = [choice.strip("'") for choice in quoted_choices.split(", ")]
    return f"{show(value)} is not one of {', '.join(choices)}", did_you_mean(value, choices)


def has_key(recipe: type[Recipe], path: KeyPath) -> bool:
    """Whether the recipe of a pipeline has a key at this path."""
    try:
        return str(path[-1]) in _section_at(recipe, path[:-1]).model_fields
    except (KeyError, StopIteration, AttributeError):
        return False


def _section_at(recipe: type[Recipe], loc: Sequence[str | int]) -> type[Section]:
    """The section of the schema that a loc leads to."""
    annotation: Any = recipe
    for key in loc:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            annotation = annotation.model_fields[str(key)].annotation
        elif get_origin(annotation) in (dict, Mapping):
            annotation = get_args(annotation)[1]
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        else:
            annotation = next(arg for arg in get_args(annotation) if str(key) in union_tags(arg))
        annotation = _unwrap(annotation)
    return annotation


def _unwrap(annotation: Any) -> Any:
    """The type inside `Annotated[X, ...]` and `X | None`."""
    while get_origin(annotation) is Annotated or type(None) in get_args(annotation):
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


def _all_keys(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every (section, key) of the schema, except those inside unions."""
    for key, field in section.model_fields.items():
        yield ".".join(path), key
        annotation = field.annotation
        if get_origin(annotation) in (dict, Mapping):
            annotation, key = get_args(annotation)[1], f"{key}.NAME"
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _all_keys(annotation, (*path, key))
