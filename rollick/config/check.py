"""Rules that need more than one setting of a recipe.

    load.py -> Context(recipe, source, base) -> RULES (here and in RULE_MODULES) -> Problems

`check_recipe` runs them all on a recipe that is loaded; loading runs them too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rollick.config import (
    algorithm_rules,
    domain_rules,
    engine_rules,
    lora_rules,
    name_rules,
    parallel_rules,
    pipeline_rules,
    role_rules,
)
from rollick.config.names import NAMES
from rollick.config.problems import Problem
from rollick.config.rules import RULES, Context, Findings, rule
from rollick.config.schema import SAMPLED

if TYPE_CHECKING:
    from rollick.config.load import LoadedRecipe

KEEPS_CACHE = ("native",)
"""Engines of our table with the capability; one of another package is asked when the run opens."""

RULE_MODULES = (
    name_rules,
    pipeline_rules,
    domain_rules,
    algorithm_rules,
    role_rules,
    parallel_rules,
    engine_rules,
    lora_rules,
)
"""Modules that have rules besides this one: importing them registers those."""


def check_recipe(
    loaded: LoadedRecipe, *, objects: Collection[str] = (), deep: bool = False
) -> list[Problem]:
    """Every problem that the rules find; with `deep`, also what only importing can tell."""
    context = Context(loaded.recipe, loaded.source, loaded.base, objects)
    problems = run_rules(context)
    if deep and not problems:
        problems = list(name_rules.import_everything(context))
    return problems


def run_rules(context: Context) -> list[Problem]:
    """Every problem that the rules find in a recipe, sound or partly so."""
    return [
        problem
        for function, reads in RULES
        if context.is_sound(*reads)
        for problem in function(context)
    ]


@rule("data.domains")
def _there_is_a_domain(context: Context) -> Findings:
    if not context.recipe.data.domains:
        fix = "add one, such as data.domains.math with its source"
        yield context.problem("data.domains", "has no domain", fix)


@rule("pipeline", "sampling")
def _training_samples_have_full_support(context: Context) -> Findings:
    if context.recipe.pipeline not in SAMPLED:
        return
    sampling = context.recipe.sampling
    reason = "cuts the support, so the learner's log-probs would not be those of the samples"
    for key, off in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("min_tokens", 0)):
        value = getattr(sampling, key)
        if value != off:
            fix = f"use {off}, or evaluate.{key} to validate"
            yield context.problem(f"sampling.{key}", f"{value:g} {reason}", fix)
    if sampling.logit_bias:
        message = f"{len(sampling.logit_bias)} tokens with a bias: it {reason}"
        fix = "remove it, or use evaluate.logit_bias to validate"
        yield context.problem("sampling.logit_bias", message, fix)
    if sampling.temperature == 0:
        message = "0 draws the same sample every time, so there is nothing to learn from"
        fix = "use 1, or evaluate.temperature to validate"
        yield context.problem("sampling.temperature", message, fix)


@rule("rollout.surplus_groups", "rollout.staleness_rule", "rollout.max_staleness")
def _a_surplus_is_used(context: Context) -> Findings:
    rollout = context.recipe.rollout
    name, surplus = rollout.staleness_rule, rollout.surplus_groups
    if surplus and name not in ("first_finished", "long_rounds"):
        message = f"{surplus} has no effect: {name} waits for no surplus"
        fix = "use rollout.staleness_rule=long_rounds or first_finished, or remove it"
        yield context.problem("rollout.surplus_groups", message, fix)
    if name == "long_rounds" and not surplus and rollout.max_staleness == 0:
        message = "long_rounds has no effect: with max_staleness 0 and no surplus no group is late"
        fix = "set rollout.surplus_groups, such as a quarter of groups_per_step"
        yield context.problem("rollout.staleness_rule", message, fix)


@rule("evaluate.samples", "evaluate.pass_k", "evaluate.temperature")
def _validation_has_the_samples_it_reports_on(context: Context) -> Findings:
    evaluate = context.recipe.evaluate
    for k in evaluate.pass_k:
        if k > evaluate.samples:
            message = f"pass@{k} needs {k} samples, and evaluate.samples is {evaluate.samples}"
            yield context.problem("evaluate.pass_k", message, f"set evaluate.samples={k}")
    if evaluate.samples > 1 and evaluate.temperature == 0:
        message = f"{evaluate.samples} samples at temperature 0 are all alike"
        fix = "use 1, or set evaluate.temperature above 0"
        yield context.problem("evaluate.samples", message, fix)


@rule("evaluate", "data.validation")
def _validation_settings_are_used(context: Context) -> Findings:
    evaluate = context.recipe.evaluate
    if not context.recipe.data.validation:
        fix = "add a domain to data.validation, or remove it"
        if evaluate.every > 0:
            message = f"{evaluate.every} has no effect: there is no validation data"
            yield context.problem("evaluate.every", message, fix)
        if evaluate.at_start:
            message = "true has no effect: there is no validation data"
            yield context.problem("evaluate.at_start", message, fix)
    for key, off in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        value = getattr(evaluate, key)
        if evaluate.temperature == 0 and value != off:
            message = f"{value:g} has no effect at evaluate.temperature 0, which is greedy"
            fix = "set evaluate.temperature above 0, or remove it"
            yield context.problem(f"evaluate.{key}", message, fix)


@rule("run.deterministic", "infer.engine")
def _deterministic_mode_has_its_engine(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.run.deterministic and recipe.infer.engine != "native":
        message = f"deterministic mode needs the native engine, not {recipe.infer.engine}"
        yield context.problem("infer.engine", message, "use native")


@rule("infer.engine", "rollout.at_publish", "rollout.max_staleness")
def _caches_are_kept_by_an_engine_that_can(context: Context) -> Findings:
    recipe, path = context.recipe, "rollout.at_publish"
    if recipe.rollout.at_publish != "keep":
        return
    if recipe.infer.engine in NAMES["engines"] and recipe.infer.engine not in KEEPS_CACHE:
        message = f"the engine {recipe.infer.engine} cannot keep caches over a publish"
        yield context.problem(path, message, "use continue, or infer.engine=native")
    if recipe.rollout.max_staleness == 0:
        message = "keep has no effect: with max_staleness 0 no sample runs when one is published"
        yield context.problem(path, message, "raise rollout.max_staleness, or remove it")


@rule("infer.max_length", "sampling.max_tokens", "evaluate.max_tokens")
def _sequences_fit_the_cache(context: Context) -> Findings:
    recipe = context.recipe
    for path, tokens in (
        ("sampling.max_tokens", recipe.sampling.max_tokens),
        ("evaluate.max_tokens", recipe.evaluate.max_tokens),
    ):
        if tokens >= recipe.infer.max_length:
            message = f"{tokens} leaves no room for a prompt"
            fix = f"infer.max_length is {recipe.infer.max_length}: raise it, or use fewer tokens"
            yield context.problem(path, message, fix)


@rule("train.schedule", "train.minibatches", "train.epochs", "run.steps")
def _the_schedule_fits_the_run(context: Context) -> Findings:
    recipe = context.recipe
    schedule = recipe.train.schedule
    steps = recipe.optimizer_steps
    if schedule.warmup_steps > steps:
        message = f"{schedule.warmup_steps} is more than the run's {steps} optimizer steps"
        fix = "the peak would never be reached: lower it, or raise run.steps"
        yield context.problem("train.schedule.warmup_steps", message, fix)
    if schedule.shape == "constant" and schedule.final > 0:
        message = f"{schedule.final:g} has no effect on a constant schedule"
        yield context.problem("train.schedule.final", message, "use linear or cosine, or remove it")


@rule("cluster")
def _cluster_settings_are_used(context: Context) -> Findings:
    cluster = context.recipe.cluster
    if cluster.backend == "inline" and cluster.address is not None:
        message = f"{cluster.address!r} has no effect: backend inline runs in this process"
        yield context.problem("cluster.address", message, "use backend ray, or remove it")
