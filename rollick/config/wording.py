"""Turns pydantic's errors into messages about the recipe file.

    ErrorDetails(loc, type, ctx, input) + Node (the recipe as written) -> Problem

A loc is pydantic's path through the schema, with union tags; a path is one through the recipe file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import ErrorDetails

from rollick.config.foreign_names import FOREIGN_NAMES
from rollick.config.names import names_of
from rollick.config.problems import KeyPath, Problem, did_you_mean, dotted, show
from rollick.config.schema import RECIPES, Recipe
from rollick.config.schema.section import Section, union_tags
from rollick.config.source import Node

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "string_too_short": "text that is not empty",
    **dict.fromkeys(("model", "dict", "mapping"), "a section (key: value lines)"),
    **dict.fromkeys(("tuple", "list"), "a list"),
}
"""A pydantic error type, or its first word -> what a recipe should have there."""

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
    "data.*.*.prompt_format": "data.*.*.prompt, a text with columns in braces",
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
    """Explains the errors of one recipe. `recipe`: the class that validated it."""

    recipe: type[Recipe]
    source: Node

    def problem_of(self, error: ErrorDetails) -> tuple[KeyPath, Problem]:
        """The path of an error in the recipe file, and the problem to report."""
        loc, source = error["loc"], self.source
        if error["type"] == "missing":
            path = (*path_of(loc[:-1], source), loc[-1])
            return path, self._missing_key(path, loc)
        path = path_of(loc, source)
        if error["type"] == "union_tag_not_found":
            where = (*path, "name") if source.find((*path, "name")) else path
            kind, name = PART_KINDS[str(path[-1])], error["input"]["name"]
            message, fix = unknown_name(kind, name, allow_custom=True)
            return path, Problem(source.nearest(where).location, dotted(where), message, fix)
        node = source.nearest(path)
        if error["type"] == "extra_forbidden":
            message, fix = self._unknown_key(path, loc)
            return path, Problem(node.key_location, dotted(path), message, fix)
        message, fix = _wrong_value(error, path)
        return path, Problem(node.location, dotted(path), message, fix)

    def nearest_key(self, loc: Sequence[str | int]) -> str:
        """The known key that an unknown one was probably meant to be; empty if none is similar."""
        advice = did_you_mean(loc[-1], self._sibling_keys(loc))
        return advice.split("'")[1] if advice else ""

    def _missing_key(self, path: KeyPath, loc: Sequence[str | int]) -> Problem:
        section = self.source.nearest(path[:-1])
        if isinstance(loc[-1], int):
            field = _section_at(self.recipe, loc[:-2]).model_fields[str(loc[-2])]
            message = f"must have {len(get_args(field.annotation))} elements, but has {loc[-1]}"
            return Problem(section.location, dotted(path[:-1]), message)
        about = _section_at(self.recipe, loc[:-1]).model_fields[loc[-1]].description or ""
        what = re.split(r"[.;](?:\s|$)", about)[0]
        fix = f"give: {what[:1].lower()}{what[1:]}"
        return Problem(section.key_location, dotted(path), "is needed, but missing", fix)

    def _unknown_key(self, path: KeyPath, loc: Sequence[str | int]) -> tuple[str, str]:
        key = str(loc[-1])
        if new := new_key(path):
            return f"unknown key {key!r}", f"it is now {new}"
        if others := [name for name, recipe in RECIPES.items() if has_key(recipe, path)]:
            kind = "section" if len(path) == 1 else "key"
            fix = OTHER_PIPELINE_FIXES.get(key, f"only {' and '.join(others)} have it: remove it")
            node = self.source.child("pipeline")
            pipeline = node.value if node else "rlvr"
            return f"pipeline {pipeline} has no {kind} {key!r}", fix
        return f"unknown key {key!r}", self._advise(key, loc)

    def _advise(self, key: str, loc: Sequence[str | int]) -> str:
        """The fix for an unknown key: its section, our name for it, a similar key, or all keys."""
        homes = [home for home, name in _all_keys(self.recipe, ()) if name == key]
        # If a domain can override a key, the recipe's own key is usually meant.
        homes = [home for home in homes if ".NAME" not in home] or homes
        if homes and key != "name":
            return f"it belongs in {' or '.join(home or 'the top level' for home in homes[:3])}"
        for ours in FOREIGN_NAMES.get(key, ()):
            if has_key(self.recipe, tuple(ours.split("."))):
                return f"here it is {ours}"
        known = self._sibling_keys(loc)
        return did_you_mean(key, known) or f"the keys here are {', '.join(known)}"

    def _sibling_keys(self, loc: Sequence[str | int]) -> list[str]:
        return list(_section_at(self.recipe, loc[:-1]).model_fields)


def path_of(loc: Sequence[str | int], source: Node) -> KeyPath:
    """A loc without parts that are not in the file: union tags, `name` if written `loss: ppo`."""
    node, path = source, ()
    for part in loc:
        child = node.child(part)
        if child is not None:
            node, path = child, (*path, part)
    return path


def new_key(path: KeyPath) -> str:
    """The key that replaced an old one; empty if there is none."""
    for old, new in RENAMED_KEYS.items():
        if match := re.fullmatch(re.escape(old).replace(r"\*", r"([^.]+)"), dotted(path)):
            for name in match.groups():
                new = new.replace("*", name, 1)
            return new
    return ""


def unknown_name(kind: str, name: object, *, allow_custom: bool) -> tuple[str, str]:
    """Message and fix for a name that no plugin or built-in of its kind has."""
    known = names_of(kind)
    message = f"{show(name)} is not one of the {kind.replace('_', ' ')} ({', '.join(known)})"
    custom = "or your own as file.py:name" if allow_custom else ""
    return message, did_you_mean(name, known) or custom


def _wrong_value(error: ErrorDetails, path: KeyPath) -> tuple[str, str]:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if path[-2:-1] == ("options",):
        return f"must be a single value (text, a number, true or false), but is {show(value)}", ""
    if kind in BOUNDS:
        word, key = BOUNDS[kind]
        return f"must be {word} {context[key]:g}, but is {show(value)}", ""
    if kind == "literal_error":
        return _not_one_of(value, context["expected"].replace(" or ", ", "))
    if kind == "union_tag_invalid":
        return _not_one_of(context["tag"], context["expected_tags"])
    if kind == "unknown_preset":
        return unknown_name("presets", value, allow_custom=False)
    if kind == "too_long":
        return f"must have {context['max_length']} elements, but has {len(value)}", ""
    if expected := EXPECTED.get(kind) or EXPECTED.get(kind.split("_")[0]):
        quote = kind == "string_type" and isinstance(value, int | float)
        fix = f'put quotes around it: "{value}"' if quote and not isinstance(value, bool) else ""
        return f"must be {expected}, but is {show(value)}", fix
    return f"{show(value)} is refused: {error['msg']}", ""


def _not_one_of(value: object, quoted: str) -> tuple[str, str]:
    known = [text.strip("'") for text in quoted.split(", ")]
    return f"{show(value)} is not one of {', '.join(known)}", did_you_mean(value, known)


def has_key(recipe: type[Recipe], path: KeyPath) -> bool:
    """Whether the recipe of a pipeline has a key at this path."""
    try:
        return str(path[-1]) in _section_at(recipe, path[:-1]).model_fields
    except (KeyError, StopIteration, AttributeError):
        return False


def _section_at(recipe: type[Recipe], loc: Sequence[str | int]) -> type[Section]:
    """The section of the schema that a loc leads to."""
    kind: Any = recipe
    for part in loc:
        if isinstance(kind, type) and issubclass(kind, Section):
            kind = kind.model_fields[str(part)].annotation
        elif get_origin(kind) in (dict, Mapping):
            kind = get_args(kind)[1]
        elif get_origin(kind) is tuple:
            kind = get_args(kind)[0]
        else:
            kind = next(arg for arg in get_args(kind) if str(part) in union_tags(arg))
        kind = _unwrapped(kind)
    return kind


def _unwrapped(kind: Any) -> Any:
    """The type inside `Annotated[X, ...]` and `X | None`."""
    while get_origin(kind) is Annotated or type(None) in get_args(kind):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


def _all_keys(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every (section, key) of the schema, except those inside unions."""
    for key, field in section.model_fields.items():
        yield ".".join(path), key
        kind = field.annotation
        if get_origin(kind) in (dict, Mapping):
            kind, key = get_args(kind)[1], f"{key}.NAME"
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _all_keys(kind, (*path, key))
