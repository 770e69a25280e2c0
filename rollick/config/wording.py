"""pydantic's errors in the words of a recipe: its paths, its places, its names.

    ErrorDetails(loc, type, ctx, input) + Node (what was said) -> Problem

A loc runs through the schema (it carries the tags of unions); a path runs through the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import Tag
from pydantic_core import ErrorDetails

from rollick.config.names import names_of
from rollick.config.problems import KeyPath, Problem, did_you_mean, dotted, show
from rollick.config.schema import Recipe
from rollick.config.section import Section
from rollick.config.source import Node

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "model": "a section (key: value lines)",
    "dict": "a section (key: value lines)",
    "tuple": "a list",
    "list": "a list",
}
"""The first word of pydantic's error types -> what a recipe should have there."""

BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}

PART_KINDS = {"advantage": "advantages", "loss": "losses", "correction": "corrections"}


def problem_of(error: ErrorDetails, source: Node) -> tuple[KeyPath, Problem]:
    """The path that an error is about, and the problem in words."""
    loc = error["loc"]
    if error["type"] == "missing":
        path = (*path_of(loc[:-1], source), loc[-1])
        return path, _missing(path, loc, source)
    path = path_of(loc, source)
    if error["type"] == "union_tag_not_found":
        return path, _unknown_part(error, path, source)
    node = source.nearest(path)
    if error["type"] == "extra_forbidden":
        message, fix = f"unknown key {path[-1]!r}", advise_key(loc)
        return path, Problem(node.key_place, dotted(path), message, fix)
    message, fix = _words(error, path)
    return path, Problem(node.place, dotted(path), message, fix)


def path_of(loc: Sequence[str | int], source: Node) -> KeyPath:
    """A loc without what only the schema knows: tags of unions, and `name` of a short form."""
    node, path = source, ()
    for part in loc:
        child = node.child(part)
        if child is not None:
            node, path = child, (*path, part)
    return path


def _unknown_part(error: ErrorDetails, path: KeyPath, source: Node) -> Problem:
    """A part of the algorithm with a name that nobody knows."""
    where = (*path, "name") if source.find((*path, "name")) else path
    message, fix = unknown_name(PART_KINDS[str(path[-1])], error["input"]["name"], own=True)
    return Problem(source.nearest(where).place, dotted(where), message, fix)


def _missing(path: KeyPath, loc: Sequence[str | int], source: Node) -> Problem:
    section = source.nearest(path[:-1])
    if isinstance(loc[-1], int):
        wanted = len(get_args(section_at(loc[:-2]).model_fields[str(loc[-2])].annotation))
        message = f"must have {wanted} elements, but has {loc[-1]}"
        return Problem(section.place, dotted(path[:-1]), message)
    about = section_at(loc[:-1]).model_fields[loc[-1]].description or ""
    what = re.split(r"[.;](?:\s|$)", about)[0]
    fix = f"give: {what[:1].lower()}{what[1:]}"
    return Problem(section.key_place, dotted(path), "is needed, but missing", fix)


def _words(error: ErrorDetails, path: KeyPath) -> tuple[str, str]:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if path[-2:-1] == ("options",):
        return f"must be a single value (text, a number, true or false), but is {show(value)}", ""
    if kind in BOUNDS:
        word, key = BOUNDS[kind]
        return f"must be {word} {context[key]:g}, but is {show(value)}", ""
    if kind == "literal_error":
        known = [text.strip("'") for text in context["expected"].replace(" or ", ", ").split(", ")]
        return f"{show(value)} is not one of {', '.join(known)}", did_you_mean(value, known)
    if kind == "unknown_preset":
        return unknown_name("presets", value, own=False)
    if kind == "too_long":
        return f"must have {context['max_length']} elements, but has {len(value)}", ""
    if expected := EXPECTED.get(kind) or EXPECTED.get(kind.split("_")[0]):
        quote = kind == "string_type" and isinstance(value, int | float)
        fix = f'put quotes around it: "{value}"' if quote and not isinstance(value, bool) else ""
        return f"must be {expected}, but is {show(value)}", fix
    return f"{show(value)} is refused: {error['msg']}", ""


def unknown_name(kind: str, name: object, *, own: bool) -> tuple[str, str]:
    """Message and advice for a name that is not in the table of its kind."""
    known = names_of(kind)
    message = f"{show(name)} is not one of the {kind.replace('_', ' ')} ({', '.join(known)})"
    return message, did_you_mean(name, known) or ("or your own as file.py:name" if own else "")


def advise_key(loc: Sequence[str | int]) -> str:
    """What an unknown key was probably meant to be."""
    key = str(loc[-1])
    found = [home for home, name in _all_keys(Recipe, ()) if name == key]
    # What a domain may overrule is in most cases meant for the whole recipe.
    homes = [home for home in found if ".NAME" not in home] or found
    if homes and key != "name":
        return f"it belongs in {' or '.join(home or 'the top level' for home in homes[:3])}"
    known = list(section_at(loc[:-1]).model_fields)
    return did_you_mean(key, known) or f"the keys here are {', '.join(known)}"


def nearest_key(loc: Sequence[str | int]) -> str:
    """The known key that an unknown one most likely stands for, or nothing."""
    advice = did_you_mean(loc[-1], list(section_at(loc[:-1]).model_fields))
    return advice.split("'")[1] if advice else ""


def section_at(loc: Sequence[str | int]) -> type[Section]:
    """The section of the schema that a loc leads to."""
    kind: Any = Recipe
    for part in loc:
        kind = _without_none(_step(kind, part))
    return kind


def _step(kind: Any, part: str | int) -> Any:
    if isinstance(kind, type) and issubclass(kind, Section):
        kind = kind.model_fields[str(part)].annotation
    elif get_origin(kind) is dict:
        kind = get_args(kind)[1]
    elif get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    else:
        kind = next(arg for arg in get_args(kind) if Tag(str(part)) in get_args(arg)[1:])
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _without_none(kind: Any) -> Any:
    """The section of `Section | None`."""
    if type(None) not in get_args(kind):
        return kind
    (section,) = (arg for arg in get_args(kind) if arg is not type(None))
    return get_args(section)[0] if get_origin(section) is Annotated else section


def _all_keys(section: type[Section], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every (section, key) of the schema that has one home."""
    for key, field in section.model_fields.items():
        yield ".".join(path), key
        kind = field.annotation
        if get_origin(kind) is dict:
            kind, key = get_args(kind)[1], f"{key}.NAME"
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _all_keys(kind, (*path, key))
