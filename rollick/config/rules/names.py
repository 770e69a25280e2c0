"""Rules about the names in a recipe: built-ins, plugins, the user's functions, files, columns.

Nothing is imported: tables are static and files are parsed (references.py). `import_everything`,
for `check --deep`, is the exception.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

from rollick.config import schema
from rollick.config.names import NAMES, find_target, is_reference, resolve
from rollick.config.problems import KeyPath, did_you_mean, show
from rollick.config.references import Definition, read_reference
from rollick.config.rules.context import Context, Problems, rule
from rollick.config.validation_messages import describe_unknown_name
from rollick.errors import ConfigError

FILE_KINDS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
SAMPLE_ARGUMENTS = ("prompt", "completion", "sample", "row", "domain", "truncated")
"""Arguments of a reward that are always filled from the sample."""


@rule()
def _check_registry_names(context: Context) -> Problems:
    for path, kind, name in _registry_names(context.recipe):
        if context.is_valid(path):
            yield from _check_registered_name(context, path, kind, name)


def _check_registered_name(
    context: Context, path: KeyPath, kind: str, name: str, *, allow_custom: bool = False
) -> Problems:
    """Checks the name of a built-in or plugin; with `allow_custom`, it may be file.py:name."""
    try:
        target = find_target(kind, name)
    except ConfigError as error:
        yield context.problem(path, error.message, error.fix)
        return
    if target is None or (is_reference(name) and not allow_custom):
        yield context.problem(path, *describe_unknown_name(kind, name, allow_custom=allow_custom))


@rule()
def _check_algorithm_parts(context: Context) -> Problems:
    for path, kind, name in _algorithm_names(context):
        if not context.is_valid(path):
            continue
        name_path = context.name_path(path)
        if name.startswith("object:"):
            message = f"{name!r} is not possible here"
            fix = "put the function into a file and name it as file.py:name"
            yield context.problem(name_path, message, fix)
        elif is_reference(name):
            yield from _check_function(context, name_path, name)
        else:
            yield from _check_registered_name(context, name_path, kind, name, allow_custom=True)


def _registry_names(recipe: schema.Recipe) -> Iterator[tuple[KeyPath, str, str]]:
    yield ("pipeline",), "pipelines", recipe.pipeline
    yield ("infer", "engine"), "engines", recipe.infer.engine
    yield ("train", "strategy"), "train_strategies", recipe.train.strategy
    for index, name in enumerate(recipe.observe.sinks):
        yield ("observe", "sinks", index), "sinks", name


def _algorithm_names(context: Context) -> Iterator[tuple[KeyPath, str, str]]:
    recipe = context.recipe
    if isinstance(recipe, schema.SftRecipe | schema.DistillRecipe):
        yield ("algorithm", "aggregation"), "aggregations", recipe.algorithm.aggregation
    if isinstance(recipe, schema.RlRecipe):
        yield from _part_names(recipe.algorithm, ("algorithm",))
    for path, domain in context.domains_of(schema.RlvrDomain):
        if domain.algorithm is not None:
            yield from _part_names(domain.algorithm, (*path, "algorithm"))


def _part_names(
    algorithm: schema.AlgorithmConfig, path: KeyPath
) -> Iterator[tuple[KeyPath, str, str]]:
    yield (*path, "advantage"), "advantages", algorithm.advantage.name
    yield (*path, "loss"), "losses", algorithm.loss.name
    yield (*path, "correction"), "corrections", algorithm.correction.name
    yield (*path, "aggregation"), "aggregations", algorithm.aggregation


def _check_function(context: Context, path: KeyPath, name: str) -> Problems:
    definition = _read_definition(context, name)
    if isinstance(definition, ConfigError):
        yield context.problem(path, definition.message, definition.fix)
    elif definition.kind == "class":
        yield context.problem(path, f"{name} is a class", "a function is needed")


def _read_definition(context: Context, name: str) -> Definition | ConfigError:
    try:
        return read_reference(name, context.base_dir)
    except ConfigError as error:
        return error


@rule()
def _check_rewards(context: Context) -> Problems:
    for section, reward in context.rewards():
        yield from _check_reward(context, reward, section)
    for path, domain in context.domains():
        names = [reward.name for reward in schema.rewards_of(domain)]
        for index, name in enumerate(names):
            if name in names[:index]:
                message = f"{name!r} is already a reward of this domain"
                yield context.problem((*path, "rewards", index), message, "name each reward once")


def _check_reward(context: Context, reward: schema.RewardSpec, section: KeyPath) -> Problems:
    path = context.name_path(section)
    prefix, _, object_name = reward.name.partition(":")
    if prefix == "object":
        if object_name not in context.object_names:
            yield context.problem(path, *_describe_unknown_object(context, object_name))
        return
    if not is_reference(reward.name):
        problems = list(
            _check_registered_name(context, path, "rewards", reward.name, allow_custom=True)
        )
        yield from problems
        # Only the metadata of a package is read; the run checks its reward.
        if problems or reward.name not in NAMES["rewards"]:
            return
    target = NAMES["rewards"].get(reward.name, reward.name)
    definition = _read_definition(context, target)
    if isinstance(definition, ConfigError) or definition.kind == "class":
        yield from _check_function(context, path, target)
    else:
        yield from _check_parameters(context, reward, definition, section)


def _check_parameters(
    context: Context, reward: schema.RewardSpec, definition: Definition, section: KeyPath
) -> Problems:
    parameters = definition.parameters
    if parameters is None:
        return
    if names := parameters.required_positional_only:
        message = f"{reward.name} takes {', '.join(names)} by position only"
        fix = "rewards are called by name: remove the `/`"
        yield context.problem(context.name_path(section), message, fix)
    for option in reward.options:
        path = (*section, "options", option)
        if option in SAMPLE_ARGUMENTS:
            message = f"{option!r} is always filled from the sample"
            yield context.problem(path, message, "give the option another name")
        elif option not in parameters.names and not parameters.has_kwargs:
            options = [name for name in parameters.names if name not in SAMPLE_ARGUMENTS]
            fix = did_you_mean(option, options) or f"it takes {', '.join(options) or 'no option'}"
            yield context.problem(path, f"{reward.name} has no parameter {option!r}", fix)


def _describe_unknown_object(context: Context, name: str) -> tuple[str, str]:
    if context.object_names:
        known_names = ", ".join(f"object:{known}" for known in context.object_names)
        return f"there is no object:{name}", f"there are: {known_names}"
    fix = "in a recipe, name your own as file.py:name"
    return f"object:{name} only works for objects passed to rollick.train", fix


@rule()
def _check_sources(context: Context) -> Problems:
    for path, domain in context.domains():
        if not domain.source:
            continue
        prefix, _, name = domain.source.partition(":")
        source_path = (*path, "source")
        if prefix == "object":
            if name not in context.object_names:
                yield context.problem(source_path, *_describe_unknown_object(context, name))
        elif prefix == "hub":
            if not name:
                yield context.problem(source_path, "has no dataset name", "write it as hub:NAME")
        elif prefix == "reasoning_gym":
            task = name.partition("?")[0]
            if task not in NAMES["gym_tasks"]:
                advice = did_you_mean(task, list(NAMES["gym_tasks"])) or "see `rollick list`"
                message = f"reasoning-gym has no task {show(task)}"
                yield context.problem(source_path, message, advice)
        elif is_reference(domain.source):
            yield from _check_function(context, source_path, domain.source)
        else:
            yield from _check_file(context, source_path, domain.source)


@rule()
def _check_environment_names(context: Context) -> Problems:
    for path, environment in context.environments():
        name, kind, name_path = environment.name, "environments", context.name_path(path)
        if not is_reference(name):
            yield from _check_registered_name(context, name_path, kind, name, allow_custom=True)
        elif isinstance(error := _read_definition(context, name), ConfigError):
            yield context.problem(name_path, error.message, error.fix)


def _check_file(context: Context, path: KeyPath, source: str) -> Problems:
    if not source.endswith(FILE_KINDS):
        message = f"{show(source)} is not a source of prompts"
        fix = f"use a file ({', '.join(FILE_KINDS)}), hub:NAME or file.py:function"
        yield context.problem(path, message, fix)
    elif not any((folder / source).is_file() for folder in (context.base_dir, Path.cwd())):
        folder = (context.base_dir / source).parent
        siblings = [item.name for item in folder.glob("*") if item.name.endswith(FILE_KINDS)]
        advice = did_you_mean(Path(source).name, siblings)
        fix = advice or "paths are relative to the recipe, then to the working directory"
        yield context.problem(path, f"there is no file {source!r}", fix)


@rule()
def _check_prompt_formats(context: Context) -> Problems:
    for path, domain in context.domains():
        text = domain.prompt_format
        if text is not None and (message := _find_format_problem(text)):
            fix = 'name columns in braces, such as "What is {a} + {b}?"; a brace itself is {{'
            yield context.problem((*path, "prompt"), message, fix)


def _find_format_problem(text: str) -> str:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        return f"{show(text)} is not a format: {str(error).lower()}"
    if not fields:
        return f"{show(text)} names no column, so all prompts would be the same"
    invalid = [name for name in fields if not name or name.isdecimal() or set(".[") & set(name)]
    return f"{show('{' + invalid[0] + '}')} is not the name of a column" if invalid else ""


def import_everything(context: Context) -> Problems:
    """Imports everything that the recipe names; a problem for each import that fails."""
    for path, kind, name in _all_names(context):
        try:
            resolve(kind, name, base_dir=context.base_dir)
        except ConfigError as error:
            yield context.problem(path, error.message, error.fix)
        except Exception as error:  # Importing runs the user's code, which may raise anything.
            message = f"importing {name} failed: {type(error).__name__}: {error}"
            yield context.problem(path, message)


def _all_names(context: Context) -> Iterator[tuple[KeyPath, str, str]]:
    yield from _registry_names(context.recipe)
    yield from _algorithm_names(context)
    for path, domain in context.domains():
        prefix = domain.source.partition(":")[0]
        if is_reference(domain.source) and prefix not in ("hub", "object", "reasoning_gym"):
            # Sources have no kind of names. `resolve` ignores the kind of a reference.
            yield (*path, "source"), "rewards", domain.source
    for path, environment in context.environments():
        yield path, "environments", environment.name
    for path, reward in context.rewards():
        if not reward.name.startswith("object:"):
            yield path, "rewards", reward.name
