"""Rules about what a domain says of its own: its sampling and its filters."""

from __future__ import annotations

from rollick.config.domain import DomainFilters, DomainSampling
from rollick.config.rules import Context, Findings, rule
from rollick.config.schema import SUPERVISED_LOSSES


@rule("pipeline", "infer.max_length")
def _the_sampling_of_a_domain_works(context: Context) -> Findings:
    recipe = context.recipe
    for path, domain in context.domains():
        sampling = domain.sampling
        if sampling.max_tokens is not None and sampling.max_tokens >= recipe.infer.max_length:
            message = f"{sampling.max_tokens} leaves no room for a prompt"
            fix = f"infer.max_length is {recipe.infer.max_length}: raise it, or use fewer tokens"
            yield context.problem((*path, "sampling", "max_tokens"), message, fix)
        if path[1] == "domains" and sampling.temperature == 0 and recipe.pipeline == "rlvr":
            message = "0 draws the same sample every time, so there is nothing to learn from"
            fix = "use 1, or evaluate.temperature to validate"
            yield context.problem((*path, "sampling", "temperature"), message, fix)


@rule("pipeline", "data.shares_of")
def _the_shares_are_of_something(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    if pipeline in SUPERVISED_LOSSES and context.recipe.data.shares_of == "trained":
        message = f"trained has no effect: pipeline {pipeline} drops no group"
        yield context.problem("data.shares_of", message, "remove it")


@rule("pipeline")
def _the_settings_of_a_domain_are_used(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    for path, domain in context.domains():
        trains = path[1] == "domains"
        if trains and pipeline in SUPERVISED_LOSSES and domain.sampling != DomainSampling():
            message = f"has no effect: pipeline {pipeline} draws no samples to train on"
            yield context.problem((*path, "sampling"), message, "remove it")
        if trains and pipeline not in SUPERVISED_LOSSES:
            continue
        why = (
            f"pipeline {pipeline} draws no samples to train on"
            if trains
            else "nothing is dropped in validation"
        )
        for key in ("scores", "drop_no_signal", "min_spread", "drop_truncated"):
            if getattr(domain.filters, key) != getattr(DomainFilters(), key):
                message = f"has no effect: {why}"
                yield context.problem((*path, "filters", key), message, "remove it")
