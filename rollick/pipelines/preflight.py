"""Whether a recipe can run on this machine, found before anything starts or loads.

    check_machine   models, datasets, packages, GPUs: before each run, and in `rollick check`
    check_rows      the first rows of each source, and the arguments of rewards: `rollick check`,
                    `rollick.train`
    check_memory    the memory of the machine: `rollick check`

Imports no torch and runs no code of the user's, unless `deep` allows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rollick.cluster.devices import DeviceMap, numbers_to_ranges
from rollick.cluster.machine import (
    count_gpus,
    memory_bytes,
    query_gpu_memory,
    torch_supports_cuda,
)
from rollick.config import schema
from rollick.config.devices import parse_devices
from rollick.config.extras import check_packages
from rollick.config.hub import find_hub_problem
from rollick.config.load import LoadedRecipe
from rollick.config.names import NAMES, is_reference
from rollick.config.problems import KeyPath, Problem, did_you_mean
from rollick.config.references import Parameters, parameters_of, read_reference
from rollick.config.rules.context import Context, Problems
from rollick.config.rules.names import SAMPLE_ARGUMENTS
from rollick.data.prompt_rows import TokenLimit, partition_rows
from rollick.data.sources import read_rows
from rollick.errors import ConfigError, DataError, MissingExtra, ModelError
from rollick.models.loading.locate import check_reachable, locate_model
from rollick.pipelines.memory import GB, PhaseMemory, machine_bounds
from rollick.types import Prompt

if TYPE_CHECKING:
    from rollick.pipelines.state import RunObjects

OBJECT = "object:"
ROWS_READ = 20
"""Rows of a source that are read. The run reads all of them and allows a few bad ones."""


def check_machine(loaded: LoadedRecipe) -> list[Problem]:
    """What this machine lacks to run the recipe."""
    context = Context(loaded.recipe, loaded.source, loaded.base_dir)
    packages = list(check_packages(context))
    hub = [*_check_models(context), *_check_datasets(context)]
    problems = [*hub, *packages, *_check_gpus(context), *_check_folder(context)]
    return list(dict.fromkeys(problems))


def check_rows(
    loaded: LoadedRecipe, *, deep: bool = False, objects: RunObjects | None = None
) -> list[Problem]:
    """Problems of the first rows of each source. `deep`: also of sources that are code. `objects`:
    what object:NAME names; its rows are read too, but no function is called."""
    context = Context(loaded.recipe, loaded.source, loaded.base_dir)
    problems: list[Problem] = []
    for path, domain in context.domains():
        if _can_be_read(domain, objects, deep=deep):
            problems += _check_domain(context, path, domain, objects)
    return problems


def check_memory(loaded: LoadedRecipe, rows: Sequence[PhaseMemory]) -> list[Problem]:
    """A problem if the run does not fit into this machine, however short its samples are."""
    context = Context(loaded.recipe, loaded.source, loaded.base_dir)
    bounds = machine_bounds(rows)
    needs: list[tuple[str, int, int | None]] = []
    needs.append(("CPU workers and snapshots need", bounds.least, memory_bytes()))
    if any(row.host.device.kind == "cuda" for row in rows):
        gpus = dict(enumerate(query_gpu_memory()))
        for host in {row.host.device: row.host for row in rows}.values():
            least = max(row.least for row in rows if row.host.device == host.device)
            if host.device.kind == "cuda":
                needs.append((f"{host.device} needs", least, gpus.get(host.device.index)))
    fix = "use a smaller model, train.lora, or more devices with train.strategy=fsdp"
    if bounds.snapshots:
        fix += f"; or checkpoint.snapshot=false, which saves {bounds.snapshots / GB:.3g} GB"
    return [
        context.problem(
            "model.path",
            f"{subject} at least {least / GB:.3g} GB, and there are {available / GB:.3g} GB",
            fix,
        )
        for subject, least, available in needs
        if available is not None and least > available
    ]


def _check_models(context: Context) -> Problems:
    for path, model in _models(context.recipe):
        for key in ("path", "tokenizer"):
            name = getattr(model, key)
            if name is None:
                continue
            try:
                check_reachable(locate_model(name))
            except (ModelError, MissingExtra) as error:
                yield context.problem((*path, key), error.message, error.fix)


def _check_datasets(context: Context) -> Problems:
    problem_of = cache(partial(find_hub_problem, kind="dataset"))
    for path, domain in context.domains():
        kind, _, name = domain.source.partition(":")
        name = name.partition("?")[0].partition(":")[0]
        if kind == "hub" and not Path(name).exists() and (problem := problem_of(name)):
            fix = "check its name, download it where the hub can be reached, or use a file"
            yield context.problem((*path, "source"), f"dataset {name!r}: {problem}", fix)


def _models(recipe: schema.Recipe) -> Iterator[tuple[KeyPath, schema.ModelConfig]]:
    """The models that the run loads, with their keys."""
    yield ("model",), recipe.model
    if recipe.needs("values") and isinstance(recipe, schema.RlRecipe) and recipe.critic.model:
        yield ("critic", "model"), recipe.critic.model
    teacher = schema.teacher_of(recipe)
    if teacher is not None:
        yield ("teacher",), teacher
    if recipe.reward_model is not None and recipe.uses_reward_model:
        yield ("reward_model",), recipe.reward_model
    if recipe.judge is not None and recipe.uses_judge:
        yield ("judge",), recipe.judge


def _check_gpus(context: Context) -> Problems:
    """A device list that needs more GPUs than there are, unless another cluster has them."""
    recipe = context.recipe
    is_remote = recipe.cluster.address is not None or "RAY_ADDRESS" in os.environ
    hosts = DeviceMap.of(recipe).hosts()
    needed = sorted(host.device.index for host in hosts if host.device.kind == "cuda")
    is_inline = recipe.cluster.backend == "inline"
    if not needed or (is_remote and not is_inline):
        return
    count = count_gpus() if torch_supports_cuda() else 0
    # Ray hands out any free GPU; in one process the number is the device itself.
    missing = [index for index in needed if index >= count] if is_inline else needed[count:]
    for role, text in recipe.devices.model_dump().items():
        devices = parse_devices(text) if text is not None else ()
        missing_here = [d.index for d in devices if d.kind == "cuda" and d.index in missing]
        if missing_here:
            yield context.problem(("devices", role), *_describe_missing_gpus(missing_here, count))


def _describe_missing_gpus(missing: Sequence[int], count: int) -> tuple[str, str]:
    names = f"GPU{'s' if len(missing) > 1 else ''} {numbers_to_ranges(missing)}"
    if not torch_supports_cuda():
        return f"{names}: the installed torch is built for CPUs only", "use cpu, or another torch"
    if count == 0:
        return f"{names}: this machine has no GPU", "use cpu"
    existing = "GPU 0" if count == 1 else f"GPUs 0-{count - 1}"
    return f"{names}: this machine has {existing} only", f"use {existing.split()[1]}, or cpu"


def _check_folder(context: Context) -> Problems:
    """Whether the folder for the run can be made and written."""
    folder = Path(context.recipe.run.folder).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield context.problem("run.folder", f"{existing} is a file", "choose a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        fix = "choose a folder that you may write to"
        yield context.problem("run.folder", f"{existing} is not writable", fix)


def _can_be_read(domain: schema.Domain, objects: RunObjects | None, *, deep: bool) -> bool:
    """Whether the rows can be read without the hub and without the user's code."""
    kind, _, name = domain.source.partition(":")
    if kind == "object":
        return objects is not None and not callable(objects.prompts.get(name, callable))
    if kind == "hub":
        return False
    return deep or not (kind == "reasoning_gym" or is_reference(domain.source))


def _check_domain(
    context: Context, path: KeyPath, domain: schema.Domain, objects: RunObjects | None
) -> Problems:
    purpose = "held_out" if path[1] == "validation" else "train"
    sources = objects.prompts if objects else {}
    try:
        rows = read_rows(domain, base=context.base_dir, objects=sources, purpose=purpose)
        first = list(islice(rows, ROWS_READ))
    except (DataError, MissingExtra) as error:
        yield context.problem((*path, "source"), error.message, error.fix)
        return
    except Exception as error:  # With `deep`: the user's code, which may raise anything.
        message = f"reading its rows failed: {type(error).__name__}: {error}"
        yield context.problem((*path, "source"), message)
        return
    prompts, bad = partition_rows(str(path[2]), domain, first, None, TokenLimit(0, ""))
    if not first:
        yield context.problem((*path, "source"), "has no rows", "add rows")
    elif bad and not prompts:
        message = f"none of the first {len(first)} rows is usable: {bad[0]}"
        fix = "correct the rows, or the columns of the domain (prompt, completion, …)"
        yield context.problem((*path, "prompt"), message, fix)
    elif prompts:
        yield from _check_columns(context, path, domain, prompts, objects)


def _check_columns(
    context: Context,
    path: KeyPath,
    domain: schema.Domain,
    prompts: Sequence[Prompt],
    objects: RunObjects | None,
) -> Problems:
    """Columns that an environment or a reward needs, and no row has."""
    columns = list(dict.fromkeys(str(name) for prompt in prompts for name in prompt.row))
    environment = schema.environment_of(domain)
    for column in environment.columns if environment else ():
        if column not in columns:
            message = f"no column {column!r}; the rows have {', '.join(columns)}"
            where = (*path, "environment", "columns")
            yield context.problem(where, message, did_you_mean(column, columns))
    for index, reward in enumerate(schema.rewards_of(domain)):
        parameters = _parameters_of(context, reward.name, objects)
        filled = {*SAMPLE_ARGUMENTS, *reward.options, *columns}
        for name in parameters.required if parameters else ():
            if name not in filled:
                function = reward.name.removeprefix(OBJECT)
                message = f"{function} needs {name!r}, and the rows have {', '.join(columns)}"
                fix = did_you_mean(name, columns)
                fix = fix or f"add the column, set options.{name}, or give it a default"
                yield context.problem((*path, "rewards", index), message, fix)


def _parameters_of(context: Context, reward: str, objects: RunObjects | None) -> Parameters | None:
    """The parameters of a reward; None if they cannot be read from its file."""
    if reward.startswith(OBJECT):
        function = objects.rewards.get(reward.removeprefix(OBJECT)) if objects else None
        return None if function is None else parameters_of(function)
    target = NAMES["rewards"].get(reward, reward)
    if not is_reference(target):
        return None
    try:
        return read_reference(target, context.base_dir).parameters
    except ConfigError:  # A rule reports it.
        return None
