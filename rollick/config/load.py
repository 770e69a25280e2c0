"""Loads a Recipe from a YAML file and a.b=c overrides, or raises one error with every problem.

Combines source.py (reads files), schema/, validation_messages.py and rules/. Nothing changes a
Recipe after this.

    file + overrides -> Node -> Recipe -> rules -> LoadedRecipe
                          |        |        |
                          +--------+--------+--> problems -> ConfigError
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from rollick.config.interpolation import interpolate
from rollick.config.names import find_target
from rollick.config.problems import KeyPath, Location, Problem, format_path, raise_problems
from rollick.config.rules import algorithm, names, roles, run, unused
from rollick.config.rules.context import RULES, Context
from rollick.config.schema import RECIPES, Recipe, parse_recipe, recipe_type
from rollick.config.source import Node, apply_override, dump_yaml, node_from_plain, read_file
from rollick.config.validation_messages import (
    ErrorTranslator,
    describe_unknown_name,
    path_in_file,
)
from rollick.errors import ConfigError

RULE_MODULES = (names, run, algorithm, roles, unused)
"""Importing these modules registers their rules."""

PLACEHOLDERS: Mapping[str, Any] = {
    **{"model": {"path": "?"}, "teacher": {"path": "?"}, "data": {"domains": {}}, "domains": {}},
    **dict.fromkeys(("completion", "chosen", "rejected", "path", "source", "name"), "?"),
}
"""Values for required keys that are invalid or missing, so that rules about other keys can run."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, the folder of its relative paths, and its source."""

    recipe: Recipe
    base_dir: Path
    """The folder that `file.py:name` and data paths are relative to."""
    source: Node = field(repr=False)
    """The recipe as written, with locations, for messages."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    objects: Collection[str] = (),
    base_dir: Path | None = None,
    check: bool = True,
) -> LoadedRecipe:
    """The recipe in a file, with overrides such as `rollout.group_size=4` on top.

    objects: names that `object:NAME` may use. base_dir: the folder that paths are relative to;
    default: the recipe's. check=False skips the rules (for the recipe of a finished run).
    """
    path = Path(path)
    problems: list[Problem] = []
    source = read_file(path, problems)
    if source is None:
        raise_problems(problems, origin=str(path))
        raise AssertionError("read_file returned None without a problem")
    base_dir = base_dir or path.absolute().parent
    return _build(source, overrides, problems, base_dir=base_dir, objects=objects, check=check)


def recipe_from_dict(
    data: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    origin: str = "<train>",
    objects: Collection[str] = (),
    base_dir: Path | None = None,
) -> LoadedRecipe:
    """A recipe from Python values; messages show `origin` in place of a file."""
    source = node_from_plain(data, Location(origin))
    return _build(source, overrides, [], base_dir=base_dir or Path.cwd(), objects=objects)


def check_recipe(
    loaded: LoadedRecipe, *, objects: Collection[str] = (), deep: bool = False
) -> list[Problem]:
    """The problems that the rules find; if there are none and `deep`, those of all imports."""
    context = Context(loaded.recipe, loaded.source, loaded.base_dir, objects)
    problems = _run_rules(context)
    return list(names.import_everything(context)) if deep and not problems else problems


def _run_rules(context: Context) -> list[Problem]:
    """The problems that the rules find. Skips rules that read an invalid setting."""
    rules = [function for function, paths in RULES if context.is_valid(*paths)]
    return [problem for function in rules for problem in function(context)]


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file: one alternative for each pipeline, each with `extends`."""
    references, schema = models_json_schema([(recipe, "validation") for recipe in RECIPES.values()])
    description = "Another recipe, relative to this one, whose keys this one overrides."
    extends = {"extends": {"type": "string", "description": description}}
    for reference in references.values():
        recipe = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        recipe["properties"] = extends | recipe["properties"]
    return {"anyOf": list(references.values()), **schema}


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, with all defaults; loading it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _build(
    source: Node,
    overrides: Sequence[str],
    problems: list[Problem],
    *,
    base_dir: Path,
    objects: Collection[str],
    check: bool = True,
) -> LoadedRecipe:
    origin = source.location.origin
    for override in overrides:
        source = apply_override(source, override, problems)
    source = interpolate(source, problems)
    invalid_paths: set[KeyPath] = {tuple(item.path.split(".")) for item in problems if item.path}
    recipe = _validate(source, problems, invalid_paths)
    if recipe is not None and check:
        problems.extend(_run_rules(Context(recipe, source, base_dir, objects, invalid_paths)))
    raise_problems(problems, origin=origin)
    assert recipe is not None
    return LoadedRecipe(recipe, base_dir, source)


def _validate(source: Node, problems: list[Problem], invalid_paths: set[KeyPath]) -> Recipe | None:
    """Parse the recipe. Reports invalid values in `problems` and returns a recipe without them."""
    data = source.to_plain()
    pipeline = source.child("pipeline")
    if pipeline is not None and isinstance(pipeline.value, str):
        name = pipeline.value
        with suppress(ConfigError):  # Registered twice: a rule reports that.
            if name not in RECIPES and find_target("pipelines", name) is None:
                message, fix = describe_unknown_name("pipelines", name, allow_custom=False)
                problems.append(Problem(pipeline.location, "pipeline", message, fix))
                return None
    try:
        return parse_recipe(data)
    except ValidationError as error:
        translator = ErrorTranslator(recipe_type(data), source)
        dropped_paths = _collect_problems(error, translator, problems, invalid_paths)
        return _parse_valid_parts(data, dropped_paths | invalid_paths)


def _collect_problems(
    error: ValidationError,
    translator: ErrorTranslator,
    problems: list[Problem],
    invalid_paths: set[KeyPath],
) -> set[KeyPath]:
    """Adds pydantic's errors to `problems` and `invalid_paths`; returns the paths to drop."""
    reported = {problem.path for problem in problems}
    errors = error.errors(include_url=False)
    unknown_keys = [item["loc"] for item in errors if item["type"] == "extra_forbidden"]
    misspelt_keys = {(*loc[:-1], translator.find_similar_key(loc)) for loc in unknown_keys}
    dropped_paths: set[KeyPath] = set()
    for item in errors:
        path, problem = translator.translate(item)
        # Overrides of an unknown preset cannot be checked, so the whole section is invalid.
        is_preset = item["type"] == "unknown_preset"
        invalid_path = path_in_file(item["loc"][:-1], translator.source) if is_preset else path
        dropped_paths.add(invalid_path)
        if item["type"] == "extra_forbidden":
            if intended_key := translator.find_similar_key(item["loc"]):
                invalid_paths.add((*path[:-1], intended_key))
        else:
            invalid_paths.add(invalid_path)
        # A missing key may be misspelt, or in the recipe of `extends`, which could not be read.
        follows_from_other_problem = item["type"] == "missing" and (
            item["loc"] in misspelt_keys or "extends" in reported
        )
        if format_path(path) not in reported and not follows_from_other_problem:
            problems.append(problem)
    return dropped_paths


def _parse_valid_parts(data: dict[str, Any], dropped_paths: Collection[KeyPath]) -> Recipe | None:
    """A recipe of the valid parts of `data`, for rules that read only these; None if impossible."""
    for path in dropped_paths:
        _drop(data, path)
    for _ in range(len(PLACEHOLDERS)):
        try:
            return parse_recipe(data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                *parents, key = item["loc"]
                if item["type"] != "missing" or key not in PLACEHOLDERS:
                    return None
                _find_section(data, parents)[key] = copy.deepcopy(PLACEHOLDERS[str(key)])
    return None


def _drop(data: dict[str, Any], path: KeyPath) -> None:
    """Removes a key. Inside a list or a part of the algorithm, removes that list or part."""
    if "algorithm" in (path[0], *path[3:4]):
        path = path[: path.index("algorithm") + 2]
    lists = [index for index, part in enumerate(path) if isinstance(part, int)]
    path = path[: lists[0]] if lists else path
    section = _find_section(data, path[:-1])
    if isinstance(section, dict):
        section.pop(path[-1], None)


def _find_section(data: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType]
    return data
