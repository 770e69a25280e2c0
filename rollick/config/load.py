"""Loads a Recipe from a YAML file and a.b=c overrides, or raises one error with every problem.

Combines source.py (reads files), schema/, wording.py (messages) and rules/. Nothing changes a
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
from rollick.config.names import find
from rollick.config.problems import KeyPath, Location, Problem, dotted, raise_problems
from rollick.config.rules import algorithm, names, roles, run, unused
from rollick.config.rules.context import RULES, Context
from rollick.config.schema import RECIPES, Recipe, parse_recipe, recipe_type
from rollick.config.source import Node, apply_override, dump_yaml, from_plain, read_file
from rollick.config.wording import ErrorTranslator, path_of, unknown_name
from rollick.errors import ConfigError

RULE_MODULES = (names, run, algorithm, roles, unused)
"""Importing these modules registers their rules."""

PLACEHOLDERS: Mapping[str, Any] = {
    **{"model": {"path": "?"}, "teacher": {"path": "?"}, "data": {"domains": {}}, "domains": {}},
    **dict.fromkeys(("completion", "chosen", "rejected", "path", "source", "name"), "?"),
}
"""Values for required keys that are wrong or missing, so that rules about other keys can run."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and where it came from."""

    recipe: Recipe
    base: Path
    """The folder that `file.py:name` and data paths are relative to."""
    source: Node = field(repr=False)
    """The recipe as written, with locations, for messages."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    objects: Collection[str] = (),
    base: Path | None = None,
    check: bool = True,
) -> LoadedRecipe:
    """The recipe in a file, with overrides such as `rollout.group_size=4` on top.

    objects: names that `object:NAME` may use. base: the folder that paths are relative to; default:
    the recipe's. check=False skips the rules (for the recipe of a finished run).
    """
    path = Path(path)
    problems: list[Problem] = []
    source = read_file(path, problems)
    if source is None:
        raise_problems(problems, origin=str(path))
        raise AssertionError("a file that cannot be read has a problem")
    base = base or path.absolute().parent
    return _build(source, overrides, problems, base=base, objects=objects, check=check)


def recipe_from_dict(
    data: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    origin: str = "<train>",
    objects: Collection[str] = (),
    base: Path | None = None,
) -> LoadedRecipe:
    """A recipe from Python values; `origin` stands for the file in messages."""
    source = from_plain(data, Location(origin))
    return _build(source, overrides, [], base=base or Path.cwd(), objects=objects)


def check_recipe(
    loaded: LoadedRecipe, *, objects: Collection[str] = (), deep: bool = False
) -> list[Problem]:
    """Every problem that the rules find; if there is none and `deep`, import all references too."""
    context = Context(loaded.recipe, loaded.source, loaded.base, objects)
    problems = _run_rules(context)
    return list(names.import_everything(context)) if deep and not problems else problems


def _run_rules(context: Context) -> list[Problem]:
    """Every problem that rules find; skips rules that read a setting known to be wrong."""
    rules = [function for function, reads in RULES if context.is_sound(*reads)]
    return [problem for function in rules for problem in function(context)]


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file: one alternative for each pipeline, each with `extends`."""
    references, schema = models_json_schema([(kind, "validation") for kind in RECIPES.values()])
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
    base: Path,
    objects: Collection[str],
    check: bool = True,
) -> LoadedRecipe:
    origin = source.location.origin
    for override in overrides:
        source = apply_override(source, override, problems)
    source = interpolate(source, problems)
    unsound: set[KeyPath] = {tuple(problem.path.split(".")) for problem in problems if problem.path}
    recipe = _validate(source, problems, unsound)
    if recipe is not None and check:
        problems.extend(_run_rules(Context(recipe, source, base, objects, unsound)))
    raise_problems(problems, origin=origin)
    assert recipe is not None
    return LoadedRecipe(recipe, base, source)


def _validate(source: Node, problems: list[Problem], unsound: set[KeyPath]) -> Recipe | None:
    """Parse the recipe. Reports invalid parts in `problems` and returns a recipe without them."""
    data = source.plain()
    pipeline = source.child("pipeline")
    if pipeline is not None and isinstance(pipeline.value, str):
        name = pipeline.value
        with suppress(ConfigError):  # Registered twice: a rule reports that.
            if name not in RECIPES and find("pipelines", name) is None:
                message, fix = unknown_name("pipelines", name, allow_custom=False)
                problems.append(Problem(pipeline.location, "pipeline", message, fix))
                return None
    try:
        return parse_recipe(data)
    except ValidationError as error:
        translator = ErrorTranslator(recipe_type(data), source)
        wrong = _report(error, translator, problems, unsound)
        return _parse_valid_parts(data, wrong | unsound)


def _report(
    error: ValidationError,
    translator: ErrorTranslator,
    problems: list[Problem],
    unsound: set[KeyPath],
) -> set[KeyPath]:
    """Adds pydantic's errors to `problems` and `unsound`; returns the paths to drop."""
    reported = {problem.path for problem in problems}
    errors = error.errors(include_url=False)
    unknown = [item["loc"] for item in errors if item["type"] == "extra_forbidden"]
    misspelt = {(*loc[:-1], translator.nearest_key(loc)) for loc in unknown}
    wrong: set[KeyPath] = set()
    for item in errors:
        path, problem = translator.problem_of(item)
        # Overrides of an unknown preset cannot be checked, so the whole section is wrong.
        unknown_preset = item["type"] == "unknown_preset"
        bad = path_of(item["loc"][:-1], translator.source) if unknown_preset else path
        wrong.add(bad)
        if item["type"] == "extra_forbidden":
            if meant := translator.nearest_key(item["loc"]):
                unsound.add((*path[:-1], meant))
        else:
            unsound.add(bad)
        # A missing key may be misspelt, or in the recipe of `extends`, which could not be read.
        is_caused = item["loc"] in misspelt or "extends" in reported
        if dotted(path) not in reported and not (item["type"] == "missing" and is_caused):
            problems.append(problem)
    return wrong


def _parse_valid_parts(data: dict[str, Any], wrong: Collection[KeyPath]) -> Recipe | None:
    """A recipe of the valid parts of `data`, for rules that read only these; None if impossible."""
    for path in wrong:
        _drop(data, path)
    for _ in range(len(PLACEHOLDERS)):
        try:
            return parse_recipe(data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                *parents, key = item["loc"]
                if item["type"] != "missing" or key not in PLACEHOLDERS:
                    return None
                _section(data, parents)[key] = copy.deepcopy(PLACEHOLDERS[str(key)])
    return None


def _drop(data: dict[str, Any], path: KeyPath) -> None:
    """Removes a key. Inside a list or a part of the algorithm, removes that list or part."""
    if "algorithm" in (path[0], *path[3:4]):
        path = path[: path.index("algorithm") + 2]
    lists = [index for index, part in enumerate(path) if isinstance(part, int)]
    path = path[: lists[0]] if lists else path
    section = _section(data, path[:-1])
    if isinstance(section, dict):
        section.pop(path[-1], None)


def _section(data: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType]
    return data
