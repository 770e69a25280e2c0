"""Rules about what each pipeline needs, and which settings it does not look at."""

from __future__ import annotations

from collections.abc import Mapping

from rollick.config.algorithm import AlgorithmConfig
from rollick.config.algorithm_rules import looks_at_scores
from rollick.config.problems import KeyPath
from rollick.config.rules import Context, Findings, rule
from rollick.config.schema import (
    SAMPLED,
    SUPERVISED_LOSSES,
    DomainConfig,
    EnvironmentSpec,
    ObserveConfig,
    PromptSelectionConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
)

ANSWERS: Mapping[str, str] = {
    "completion": "answer to imitate",
    "chosen": "better answer",
    "rejected": "worse answer",
}
"""Columns with given answers, and what is in them."""

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "rlvr": (),
    "agentic": (),
    "sft": ("completion",),
    "dpo": ("chosen", "rejected"),
    "distill": ("completion",),
}
"""Columns with given answers that each pipeline reads."""

SAMPLING_ONLY = (
    "groups_per_step",
    "group_size",
    "max_staleness",
    "drop_no_signal",
    "min_spread",
    "max_drops_per_step",
    "drop_truncated",
    "max_failed_scores",
)
"""Settings of the rollout that only training on samples looks at; rewards validate, too."""

NOT_SUPERVISED: Mapping[str, str] = {
    "advantage": "looks at no score",
    "shaping": "looks at no score",
    "correction": "has no policy that drew its answers",
    "kl": "adds no KL to its loss",
    "entropy": "adds no entropy to its loss",
    "weight": "has a single loss",
}
"""Settings of the algorithm that no pipeline of given answers looks at, and why."""

PLAYING = ("agentic", "sft")
"""Pipelines that do something with a training domain's environment."""

ADD_A_REWARD = "add rewards: [NAME]; see `rollick list`"


@rule("pipeline")
def _training_domains_have_what_is_learned_from(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    for path, domain in context.domains(validation=False):
        for column in COLUMNS.get(pipeline, ()):
            shown = pipeline == "sft" and domain.environment is not None
            if getattr(domain, column) is None and not shown:
                fix = f"name the column with the {ANSWERS[column]}"
                yield context.problem((*path, column), f"pipeline {pipeline} needs it", fix)
        scored = bool(domain.rewards) or domain.environment is not None
        if pipeline in SAMPLED and not scored and _needs_rewards(context, path, domain):
            message = f"pipeline {pipeline} needs a reward"
            yield context.problem((*path, "rewards"), message, ADD_A_REWARD)


def _needs_rewards(context: Context, path: KeyPath, domain: DomainConfig) -> bool:
    own = domain.algorithm is not None
    is_sound = context.is_sound((*path, "algorithm") if own else ("algorithm",))
    return is_sound and looks_at_scores(domain.algorithm or context.recipe.algorithm)


@rule("pipeline")
def _validation_has_rewards(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    for path, domain in context.domains(validation=True):
        if pipeline in COLUMNS and not domain.rewards and domain.environment is None:
            yield context.problem((*path, "rewards"), "validation needs a reward", ADD_A_REWARD)


@rule("pipeline")
def _environments_are_played(context: Context) -> Findings:
    pipeline, playing = context.recipe.pipeline, 0
    for path, domain in context.domains(validation=False):
        playing += domain.environment is not None or domain.agent is not None
        if domain.agent is not None and pipeline != "agentic" and pipeline in COLUMNS:
            message = f"has no effect: pipeline {pipeline} runs no agents"
            yield context.problem((*path, "agent"), message, "use pipeline: agentic")
        if domain.environment is not None and pipeline in COLUMNS and pipeline not in PLAYING:
            message = f"has no effect: pipeline {pipeline} plays no environments"
            fix = "use pipeline: agentic, or sft to imitate its solver"
            yield context.problem((*path, "environment"), message, fix)
    if pipeline == "agentic" and not playing and context.is_sound(("data", "domains")):
        message = "agentic needs a domain with an environment or an agent"
        fix = "give one an environment: NAME, or use pipeline: rlvr"
        yield context.problem("pipeline", message, fix)


@rule()
def _tasks_come_from_somewhere(context: Context) -> Findings:
    for path, domain in context.domains():
        environment = domain.environment
        if not domain.source and environment is None:
            message = "there is neither a source of prompts nor an environment"
            yield context.problem((*path, "source"), message, "name a file, or an environment")
        if domain.agent is not None:
            yield from _check_agent(context, path, domain)
        if environment is None:
            continue
        if domain.source and environment.tasks != EnvironmentSpec.model_fields["tasks"].default:
            message = f"{environment.tasks} has no effect: the tasks are the rows of the source"
            fix = "remove it, or use limit"
            yield context.problem((*path, "environment", "tasks"), message, fix)
        if environment.columns and not domain.source:
            message = "there are no columns: the domain has no source of rows"
            yield context.problem((*path, "environment", "columns"), message, "remove it")
        if environment.carried and environment.carried >= environment.window:
            message = f"{environment.carried} turns leave no room in a window of "
            message += f"{environment.window}" if environment.window else "all turns"
            fix = "carry fewer turns than the window has"
            yield context.problem((*path, "environment", "carried"), message, fix)
        if environment.summary is not None:
            yield from _check_summary(context, (*path, "environment", "summary"), environment)


def _check_summary(context: Context, where: KeyPath, environment: EnvironmentSpec) -> Findings:
    if not environment.window:
        message = "has no effect: all turns are in sight"
        yield context.problem(where, message, "set window, or remove it")
    if context.recipe.pipeline == "sft":
        message = "has no effect: solvers write no summaries to imitate"
        fix = "remove it; the segments of pipeline sft begin with the newest turns alone"
        yield context.problem(where, message, fix)


def _check_agent(context: Context, path: KeyPath, domain: DomainConfig) -> Findings:
    where = (*path, "agent")
    if domain.environment is not None:
        fix = "keep one of the two; an agent can hold an environment of its own"
        yield context.problem(where, "the domain has an environment already", fix)
    if not (context.base / str(domain.agent)).is_file():
        fix = "give the path of a Python script relative to the recipe"
        yield context.problem(where, f"there is no file {domain.agent!r}", fix)


@rule("pipeline")
def _answers_are_read(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    if pipeline not in COLUMNS:
        return
    for path, domain in context.domains(validation=False):
        for column in ANSWERS:
            value = getattr(domain, column)
            if value is not None and column not in COLUMNS[pipeline]:
                message = f"{value!r} has no effect: pipeline {pipeline} reads no such column"
                yield context.problem((*path, column), message, "remove it")


@rule("pipeline", "data.selection", "rollout.group_size")
def _selection_of_prompts_is_used(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    selection, default = context.recipe.data.selection, PromptSelectionConfig()
    if pipeline in SUPERVISED_LOSSES:
        if selection != default:
            message = f"has no effect: pipeline {pipeline} draws no samples that could pass or fail"
            yield context.problem("data.selection", message, "remove it")
        return
    window, tries = selection.window, selection.min_tries
    if selection.order == "near_half" and window == 1:
        message = "1 leaves near_half nothing to choose from"
        yield context.problem("data.selection.window", message, "use 2 or more")
    if selection.order != "near_half" and window != default.window:
        message = f"{window} has no effect: only near_half chooses from a window"
        fix = "set data.selection.order=near_half, or remove it"
        yield context.problem("data.selection.window", message, fix)
    if selection.retire_above == 0 and tries != default.min_tries:
        message = f"{tries} has no effect: prompts do not retire"
        fix = "set data.selection.retire_above, such as 0.9, or remove it"
        yield context.problem("data.selection.min_tries", message, fix)
    # With groups of g samples, the tries of a prompt go to g + g d + g d^2 + ... = g / (1 - d).
    group_size, decay = context.recipe.rollout.group_size, selection.decay
    if selection.retire_above > 0 and group_size < tries * (1 - decay):
        most = group_size / (1 - decay)
        message = f"{decay:g} lets a prompt have {most:.3g} tries at the most, so that none retires"
        fix = f"data.selection.min_tries is {tries}: lower it, or raise this towards 1"
        yield context.problem("data.selection.decay", message, fix)


@rule("pipeline", "train.minibatches", "train.batch_size", "rollout")
def _every_minibatch_has_a_sample(context: Context) -> Findings:
    recipe, minibatches = context.recipe, context.recipe.train.minibatches
    samples = recipe.rollout.groups_per_step * recipe.rollout.group_size
    if recipe.pipeline in SAMPLED and minibatches > samples:
        message = f"{minibatches} is more than the {samples} samples of a step"
        fix = "lower it, or raise rollout.groups_per_step or rollout.group_size"
        yield context.problem("train.minibatches", message, fix)
    if recipe.pipeline in SUPERVISED_LOSSES and minibatches > recipe.train.batch_size:
        kind = "pairs" if recipe.pipeline == "dpo" else "examples"
        message = f"{minibatches} is more than the {recipe.train.batch_size} {kind} of a step"
        yield context.problem("train.minibatches", message, "lower it, or raise train.batch_size")


@rule("pipeline", "train.batch_size")
def _the_batch_size_is_used(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.pipeline in SAMPLED and recipe.train.batch_size != TrainConfig().batch_size:
        message = f"{recipe.train.batch_size} has no effect: it is for pipelines of given answers"
        fix = "use rollout.groups_per_step and rollout.group_size"
        yield context.problem("train.batch_size", message, fix)


@rule("pipeline", "rollout", "sampling", "observe")
def _settings_of_samples_are_used(context: Context) -> Findings:
    recipe, pipeline = context.recipe, context.recipe.pipeline
    if pipeline not in SUPERVISED_LOSSES:
        return
    message = f"has no effect: pipeline {pipeline} draws no samples to train on"
    for key in SAMPLING_ONLY:
        if getattr(recipe.rollout, key) != getattr(RolloutConfig(), key):
            yield context.problem(f"rollout.{key}", message, "remove it")
    for key in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "logit_bias"):
        if getattr(recipe.sampling, key) != getattr(SamplingConfig(), key):
            fix = f"remove it, or use evaluate.{key} to validate"
            yield context.problem(f"sampling.{key}", message, fix)
    for key in ("samples_per_step", "dump_steps"):
        if getattr(recipe.observe, key) != getattr(ObserveConfig(), key):
            yield context.problem(f"observe.{key}", message, "remove it")


@rule("pipeline", "algorithm")
def _the_algorithm_belongs_to_the_pipeline(context: Context) -> Findings:
    """A pipeline of given answers looks at the loss, if it is one of its own, and how it is
    aggregated; all else must keep its default."""
    pipeline, said = context.recipe.pipeline, context.recipe.algorithm
    if pipeline not in SUPERVISED_LOSSES:
        return
    default, fitting = AlgorithmConfig(), [part.name for part in SUPERVISED_LOSSES[pipeline]]
    minimises = f"pipeline {pipeline} minimises {' or '.join(fitting)}"
    if said.preset is not None:
        message = f"{said.preset} has no effect: {minimises}"
        yield context.problem("algorithm.preset", message, "remove it")
        return
    if said.loss.name not in fitting and said.loss != default.loss:
        message = f"{said.loss.name} has no effect: {minimises}"
        yield context.problem("algorithm.loss", message, "remove it")
    for key, reason in NOT_SUPERVISED.items():
        if getattr(said, key) != getattr(default, key):
            message = f"has no effect: pipeline {pipeline} {reason}"
            yield context.problem(f"algorithm.{key}", message, "remove it")
    if pipeline == "dpo" and said.aggregation not in (default.aggregation, "prompt_mean"):
        message = f"{said.aggregation} has no effect: pipeline dpo takes the mean over pairs"
        yield context.problem("algorithm.aggregation", message, "remove it")


@rule("pipeline")
def _a_pipeline_of_given_answers_has_one_algorithm(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    if pipeline not in SUPERVISED_LOSSES:
        return
    for path, domain in context.domains(validation=False):
        if domain.algorithm is not None:
            message = f"has no effect: pipeline {pipeline} has one algorithm, that of the recipe"
            yield context.problem((*path, "algorithm"), message, "remove it")
