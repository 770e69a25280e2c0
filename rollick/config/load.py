"""From a YAML file and a.b=c overrides to a Recipe, or to one error with every problem in it.

Reading is in source.py, the schema in schema.py, the words in wording.py, the rules in check.py;
here they are put in order. Nothing rewrites a Recipe after this.

    file + overrides -> Node -> Recipe -> rules -> LoadedRecipe
                          |        |        |
                          +--------+--------+--> problems -> ConfigError
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollick.config.check import run_rules
from rollick.config.problems import KeyPath, Place, Problem, dotted, raise_problems
from rollick.config.rules import Context
from rollick.config.schema import Recipe
from rollick.config.source import (
    Node,
    apply_override,
    dump_yaml,
    from_plain,
    interpolate,
    read_file,
)
from rollick.config.wording import nearest_key, path_of, problem_of

PLACEHOLDERS: Mapping[str, Any] = {
    "model": {"path": "?"},
    "data": {"domains": {}},
    "path": "?",
    "domains": {},
    "source": "?",
    "name": "?",
}
"""Stand-ins for required keys that are wrong or missing, so that the other rules can still run."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, and where it came from."""

    recipe: Recipe
    path: Path | None
    """Its file; none for a recipe made in Python."""
    base: Path
    """The folder that `file.py:name` and data paths are relative to."""
    text: str
    """The whole recipe as YAML: defaults, overrides and interpolations filled in."""
    source: Node = field(default=Node({}, Place("recipe"), Place("recipe")), repr=False)
    """What was said where; for messages."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    objects: Collection[str] = (),
    base: Path | None = None,
    check: bool = True,
) -> LoadedRecipe:
    """The recipe in a file, with overrides such as `rollout.group_size=4` on top.

    objects: names that `object:NAME` may use. base: what paths are relative to, where that is not
    the recipe's folder. check=False leaves out the rules (for the recipe of a finished run).
    """
    path = Path(path)
    problems: list[Problem] = []
    source = read_file(path, problems)
    if source is None:
        raise_problems(problems, origin=str(path))
        raise AssertionError("a file that cannot be read has a problem")
    request = _Request(path, base or path.absolute().parent, objects, check)
    return _build(source, overrides, request, problems)


def recipe_from_dict(
    data: Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    origin: str = "<train>",
    objects: Collection[str] = (),
    base: Path | None = None,
) -> LoadedRecipe:
    """A recipe from Python values; `origin` stands for the file in messages."""
    source = from_plain(data, Place(origin))
    return _build(source, overrides, _Request(None, base or Path.cwd(), objects, True), [])


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file: the schema, and `extends`."""
    schema = Recipe.model_json_schema()
    about = "Another recipe, relative to this one, that this one is laid on top of."
    schema["properties"] = {
        "extends": {"type": "string", "description": about},
        **schema["properties"],
    }
    return schema


@dataclass(frozen=True)
class _Request:
    """How a recipe is to be loaded."""

    path: Path | None
    base: Path
    objects: Collection[str]
    check: bool


def dump_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML; loading it gives an equal recipe."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _build(
    source: Node, overrides: Sequence[str], request: _Request, problems: list[Problem]
) -> LoadedRecipe:
    origin = source.place.origin
    for override in overrides:
        source = apply_override(source, override, problems)
    source = interpolate(source, problems)
    unsound: set[KeyPath] = {tuple(problem.path.split(".")) for problem in problems if problem.path}
    recipe = _validate(source, problems, unsound)
    if recipe is not None and request.check:
        context = Context(recipe, source, request.base, request.objects, unsound)
        problems.extend(run_rules(context))
    raise_problems(problems, origin=origin)
    assert recipe is not None
    return LoadedRecipe(recipe, request.path, request.base, dump_recipe(recipe), source)


def _validate(source: Node, problems: list[Problem], unsound: set[KeyPath]) -> Recipe | None:
    """The recipe. Where parts are wrong they are reported, and a recipe without them returned."""
    try:
        return Recipe.model_validate(source.plain())
    except ValidationError as error:
        wrong = _report(error, source, problems, unsound)
        return _stand_in(source.plain(), wrong | unsound)


def _report(
    error: ValidationError, source: Node, problems: list[Problem], unsound: set[KeyPath]
) -> set[KeyPath]:
    """Adds what pydantic found to `problems` and `unsound`; returns the paths to leave out."""
    said = {problem.path for problem in problems}
    errors = error.errors(include_url=False)
    quiet = _consequences(errors, is_whole="extends" not in said)
    wrong: set[KeyPath] = set()
    for item in errors:
        path, problem = problem_of(item, source)
        # What goes over an unknown preset cannot be judged, so all of the section is wrong.
        bad = path_of(item["loc"][:-1], source) if item["type"] == "unknown_preset" else path
        wrong.add(bad)
        if item["type"] == "extra_forbidden":
            unsound.update({(*path[:-1], meant) for meant in [nearest_key(item["loc"])] if meant})
        else:
            unsound.add(bad)
        if dotted(path) not in said and item["loc"] not in quiet:
            problems.append(problem)
    return wrong


def _consequences(errors: Sequence[ErrorDetails], *, is_whole: bool) -> set[tuple[str | int, ...]]:
    """The locs of errors that will go away when another one is repaired.

    Those are a missing key that is there misspelt, and all missing keys if a recipe that this one
    extends is not there.
    """
    unknown = [item["loc"] for item in errors if item["type"] == "extra_forbidden"]
    misspelt = {(*loc[:-1], nearest_key(loc)) for loc in unknown}
    missing = [item["loc"] for item in errors if item["type"] == "missing"]
    return {loc for loc in missing if loc in misspelt or not is_whole}


def _stand_in(data: dict[str, Any], wrong: Collection[KeyPath]) -> Recipe | None:
    """A recipe of what is right in `data`, for the rules that do not touch what is wrong."""
    for path in wrong:
        _drop(data, path)
    for _ in range(len(PLACEHOLDERS)):
        try:
            return Recipe.model_validate(data)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                *parents, key = item["loc"]
                if item["type"] != "missing" or key not in PLACEHOLDERS:
                    return None
                _section(data, parents)[key] = copy.deepcopy(PLACEHOLDERS[str(key)])
    return None


def _drop(data: dict[str, Any], path: KeyPath) -> None:
    """Removes a key; a part of the algorithm or a list that holds it goes as a whole."""
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
