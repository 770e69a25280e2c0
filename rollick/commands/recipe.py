"""Back end of `rollick check`, `rollick list` and `rollick config preset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rollick.cluster.devices import describe_plan
from rollick.cluster.machine import memory_bytes
from rollick.config.load import check_recipe, load_recipe
from rollick.config.names import find_plugins, names_of
from rollick.config.presets import PRESETS
from rollick.config.problems import raise_problems
from rollick.config.schema import Recipe, SupervisedRecipe, TrainingDomain, rl_recipe
from rollick.config.schema.algorithm import AlgorithmConfig
from rollick.config.source import dump_yaml
from rollick.config.validation_messages import describe_unknown_name
from rollick.errors import ConfigError
from rollick.pipelines.memory import (
    GB,
    MachineBounds,
    PhaseMemory,
    describe_bounds,
    describe_memory,
    machine_bounds,
    plan_memory,
    read_shapes,
)
from rollick.pipelines.preflight import check_machine, check_memory, check_rows


def check_and_describe(
    path: Path, overrides: Sequence[str], *, deep: bool, recipe_only: bool = False
) -> str:
    """Check a recipe and describe its run, devices and memory. Raises if it has problems.

    `recipe_only`: the recipe is for another machine; skip what depends on this one.
    """
    loaded = load_recipe(path, overrides)
    if deep:
        raise_problems(check_recipe(loaded, deep=True), origin=str(path))
    recipe, shapes = loaded.recipe, read_shapes(loaded.recipe)
    rows = plan_memory(recipe, shapes) if shapes else ()
    problems = check_rows(loaded, deep=deep)
    if not recipe_only:
        problems += [*check_machine(loaded), *check_memory(loaded, rows)]
    raise_problems(problems, origin=str(path))
    return "\n".join([_describe_run(recipe), describe_plan(recipe), "", _describe_memory(rows)])


def _describe_run(recipe: Recipe) -> str:
    if isinstance(recipe, SupervisedRecipe):
        noun = "pairs" if recipe.compares_pairs else "examples"
        size = f"{recipe.train.batch_size} {noun}"
    else:
        rollout = rl_recipe(recipe).rollout
        size = f"{rollout.groups_per_step} groups of {rollout.group_size} samples"
    rows = [
        ("pipeline", f"{recipe.pipeline}, {recipe.run.steps} steps of {size}"),
        ("model", f"{recipe.model.path} ({recipe.model.dtype})"),
        ("data", _describe_shares(recipe.data.domains)),
        ("validation", ", ".join(recipe.data.validation) or "none"),
    ]
    return "\n".join(f"  {name:<12}{text}" for name, text in rows)


def _describe_shares(domains: Mapping[str, TrainingDomain]) -> str:
    total = sum(domain.share for domain in domains.values())
    return ", ".join(f"{name} {domain.share / total:.0%}" for name, domain in domains.items())


def _describe_memory(rows: Sequence[PhaseMemory]) -> str:
    if not rows:
        return "memory    unknown until the run starts: not all models can be read on this machine"
    lines = [describe_memory(rows), ""]
    on_cpu, memory = machine_bounds(rows), memory_bytes()
    if on_cpu.most:
        lines.append(f"in total  {describe_bounds(on_cpu)}")
    if on_cpu.most and memory:
        lines.append(f"machine   {memory / GB:.3g} GB{_memory_advice(on_cpu, memory)}")
    return "\n".join(lines)


def _memory_advice(bounds: MachineBounds, memory: int) -> str:
    """Settings to change if the machine runs out of memory; empty if its memory suffices."""
    if bounds.most <= memory:
        return ""
    tips: list[str] = []
    if bounds.least < bounds.most:
        tips.append("lower train.tokens_per_microbatch, infer.slots or infer.max_length")
    if bounds.snapshots > 0.1 * memory:
        tips.append(f"set checkpoint.snapshot=false ({bounds.snapshots / GB:.3g} GB)")
    return f"; if it runs out, {' or '.join(tips)}" if tips else ""


def describe_names(kind: str) -> str:
    """The names of a kind that a recipe can use; plugins with their packages in brackets."""
    registered = find_plugins(kind).items()
    packages = {name: ", ".join(p.package for p in plugins) for name, plugins in registered}
    names = [f"{name} ({packages[name]})" if name in packages else name for name in names_of(kind)]
    return ", ".join(names) or "none"


def describe_preset(name: str) -> str:
    """The algorithm section of a preset as YAML, under a comment with its paper."""
    if name not in PRESETS:
        message, fix = describe_unknown_name("presets", name, allow_custom=False)
        raise ConfigError(message, fix=fix)
    preset = PRESETS[name]
    section = AlgorithmConfig(preset=name).model_dump(mode="json")
    return f"# {preset.about} (arXiv {preset.paper})\n{dump_yaml({'algorithm': section})}"
