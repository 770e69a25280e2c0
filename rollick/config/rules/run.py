"""Rules about pipelines, domains, sampling, validation, time limits and the schedule."""

from __future__ import annotations

from collections.abc import Mapping

from rollick.config import schema
from rollick.config.names import NAMES
from rollick.config.problems import KeyPath
from rollick.config.rules.algorithm import reads_scores
from rollick.config.rules.context import Context, Problems, rule

ADD_A_REWARD = "add rewards: [NAME]; see `rollick list`"
PROGRAM_SECONDS = {"timeout_s": 10.0, "program_s": 5.0}
"""Default of the option with which the reward `code` and the environment `tools` limit programs."""
SEQUENTIAL_PROGRAMS = 2
"""Programs of one call that run one after another: `code` takes 16 samples and runs 8 at once."""
SANDBOX_RESPONSE_S = 12.0
"""Time that a sandbox server has in addition to that of a program (HttpSandbox.response_s)."""


@rule("data.domains")
def _check_has_domain(context: Context) -> Problems:
    if not context.recipe.data.domains:
        fix = "add one, such as data.domains.math with its source"
        yield context.problem("data.domains", "has no domain", fix)


@rule("sampling")
def _check_sampled_distribution(context: Context) -> Problems:
    if context.rl is None:
        return
    yield from _check_distribution(context, ("sampling",), context.rl.sampling)
    for path, domain in context.domains_of(schema.RlvrDomain):
        yield from _check_distribution(context, (*path, "sampling"), domain.sampling)


def _check_distribution(
    context: Context, path: KeyPath, sampling: schema.SamplingConfig
) -> Problems:
    """The learner's log-probs account for the temperature only, so training allows nothing else."""
    reason = (
        "changes the distribution, so the learner's log-probs would not be those of the samples"
    )
    for key, off in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("min_tokens", 0)):
        value = getattr(sampling, key)
        if value not in (None, off):
            fix = f"use {off}, or evaluate.sampling.{key} to validate"
            yield context.problem((*path, key), f"{value:g} {reason}", fix)
    if sampling.logit_bias:
        message = f"a bias of {len(sampling.logit_bias)} tokens {reason}"
        fix = "remove it, or use evaluate.sampling.logit_bias to validate"
        yield context.problem((*path, "logit_bias"), message, fix)
    if sampling.temperature == 0:
        message = "0 gives the same sample every time, so there is nothing to learn from"
        fix = "use 1, or evaluate.sampling.temperature to validate"
        yield context.problem((*path, "temperature"), message, fix)


@rule("model.dtype", "critic")
def _check_gradient_dtype(context: Context) -> Problems:
    trained: list[tuple[str, schema.ModelConfig | None]] = [("model", context.recipe.model)]
    if context.rl is not None:
        trained.append(("critic.model", context.rl.critic.model))
    for path, model in trained:
        if model is not None and model.dtype == "float16":
            message = "float16 cannot be trained: gradients would underflow to zero"
            yield context.problem(f"{path}.dtype", message, "use bfloat16 or float32")


@rule("evaluate")
def _check_validation_samples(context: Context) -> Problems:
    evaluate = context.recipe.evaluate
    for k in evaluate.pass_k:
        if k > evaluate.samples:
            message = f"pass@{k} needs {k} samples, and evaluate.samples is {evaluate.samples}"
            yield context.problem("evaluate.pass_k", message, f"set evaluate.samples={k}")
    if evaluate.samples > 1 and not evaluate.sampling.temperature:
        message = f"{evaluate.samples} samples at temperature 0 are all the same"
        fix = "use 1, or set evaluate.sampling.temperature above 0"
        yield context.problem("evaluate.samples", message, fix)


@rule("run.deterministic", "infer.engine")
def _check_deterministic_engine(context: Context) -> Problems:
    recipe = context.recipe
    if recipe.run.deterministic and recipe.infer.engine != "native":
        message = f"deterministic mode needs the native engine, not {recipe.infer.engine}"
        yield context.problem("infer.engine", message, "use native")


@rule("infer.engine", "rollout.at_publish")
def _check_engine_keeps_cache(context: Context) -> Problems:
    if context.rl is None or context.rl.rollout.at_publish != "keep":
        return
    engine, fix = context.recipe.infer.engine, "use continue, or infer.engine=native"
    # Engines of other packages are checked when the run starts.
    if engine in NAMES["engines"] and engine != "native":
        message = f"the engine {engine} cannot keep caches over a publish"
        yield context.problem("rollout.at_publish", message, fix)


@rule("infer.max_length", "sampling", "evaluate.sampling")
def _check_sequence_lengths(context: Context) -> Problems:
    limit = context.recipe.evaluate.sampling.max_tokens
    yield from _check_prompt_room(context, ("evaluate", "sampling"), limit)
    if context.rl is not None:
        limit = context.rl.sampling.resolve(temperature=1).max_tokens
        yield from _check_prompt_room(context, ("sampling",), limit)


@rule("infer.max_length")
def _check_domain_lengths(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.ScoredDomain):
        yield from _check_prompt_room(context, (*path, "sampling"), domain.sampling.max_tokens)


def _check_prompt_room(context: Context, path: KeyPath, tokens: int | None) -> Problems:
    max_length = context.recipe.infer.max_length
    if tokens is not None and tokens >= max_length:
        fix = f"infer.max_length is {max_length}: raise it, or use fewer tokens"
        message = f"{tokens} leaves no room for a prompt"
        yield context.problem((*path, "max_tokens"), message, fix)


@rule("rewards.timeout_s", "environments.step_timeout_s")
def _check_program_time(context: Context) -> Problems:
    """A program that reaches its own time limit gets a score. If the pool's limit ended the call
    first, the sample would be masked, and a policy could learn to avoid low scores that way."""
    config = context.recipe
    for path, reward in context.rewards():
        if reward.name == "code":
            limit_s = config.rewards.timeout_s
            yield from _check_program_limit(context, path, "timeout_s", reward.options, limit_s)
    for path, environment in context.environments():
        options, limit_s = environment.options, config.environments.step_timeout_s
        if environment.name == "tools" and "python" in str(options.get("tools")):
            yield from _check_program_limit(context, path, "program_s", options, limit_s)


def _check_program_limit(
    context: Context, section: KeyPath, option: str, options: Mapping[str, object], limit_s: float
) -> Problems:
    value = options.get(option)
    seconds = PROGRAM_SECONDS[option] if value is None else value
    if not isinstance(seconds, int | float):
        return
    limit = "rewards.timeout_s" if option == "timeout_s" else "environments.step_timeout_s"
    path = context.name_path(section) if value is None else (*section, "options", option)
    message = f"{option}={seconds:g} is too long for {limit}={limit_s:g}"
    if SEQUENTIAL_PROGRAMS * seconds > limit_s:
        max_s, min_limit_s = limit_s / SEQUENTIAL_PROGRAMS, SEQUENTIAL_PROGRAMS * seconds
        fix = f"use at most {max_s:g}, or set {limit}={min_limit_s:g} or more"
        yield context.problem(path, message, fix)
    elif option == "timeout_s" and options.get("url") and seconds + SANDBOX_RESPONSE_S >= limit_s:
        message += f": the server has {SANDBOX_RESPONSE_S:g} s more to answer"
        fix = f"set {limit} above {seconds + SANDBOX_RESPONSE_S:g}"
        yield context.problem(path, message, fix)


@rule("train.schedule", "train.minibatches", "train.epochs", "run.steps")
def _check_warmup_steps(context: Context) -> Problems:
    steps, warmup = context.recipe.optimizer_steps, context.recipe.train.schedule.warmup_steps
    if warmup > steps:
        message = f"{warmup} is more than the run's {steps} optimizer steps"
        fix = "the peak would never be reached: lower it, or raise run.steps"
        yield context.problem("train.schedule.warmup_steps", message, fix)


@rule()
def _check_domain_tasks(context: Context) -> Problems:
    for path, domain in context.domains():
        environment, agent = schema.environment_of(domain), schema.agent_of(domain)
        if not domain.source and environment is None:
            message = "there is neither a source of prompts nor an environment"
            yield context.problem((*path, "source"), message, "name a file, or an environment")
        if environment is not None and environment.columns and not domain.source:
            message = "there are no columns: the domain has no source of rows"
            yield context.problem((*path, "environment", "columns"), message, "remove it")
        if agent is not None and environment is not None:
            fix = "keep one of the two; an agent can create its own environment"
            message = "the domain has an environment already"
            yield context.problem((*path, "agent"), message, fix)
        if agent is not None and not (context.base_dir / agent).is_file():
            fix = "write the path of a Python script relative to the recipe"
            yield context.problem((*path, "agent"), f"there is no file {agent!r}", fix)


@rule()
def _check_windows(context: Context) -> Problems:
    for path, environment in context.environments():
        window = environment.window
        if window and window.carried >= window.turns:
            message = f"{window.carried} turns leave no room in a window of {window.turns}"
            fix = "carry fewer turns than the window has"
            yield context.problem((*path, "window", "carried"), message, fix)


@rule("pipeline")
def _check_training_targets(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.TrainingDomain):
        if isinstance(domain, schema.SftDomain):
            if domain.completion is None and domain.environment is None:
                fix = "name the column with the answer to imitate, or an environment to solve"
                yield context.problem((*path, "completion"), "pipeline sft needs it", fix)
        elif isinstance(domain, schema.RlvrDomain):
            is_scored = bool(domain.rewards) or schema.environment_of(domain) is not None
            if not is_scored and _needs_rewards(context, path, domain):
                message = f"pipeline {context.recipe.pipeline} needs a reward"
                yield context.problem((*path, "rewards"), message, ADD_A_REWARD)


def _needs_rewards(context: Context, path: KeyPath, domain: schema.RlvrDomain) -> bool:
    assert context.rl is not None
    algorithm_path = (*path, "algorithm") if domain.algorithm else ("algorithm",)
    algorithm = domain.algorithm or context.rl.algorithm
    return context.is_valid(algorithm_path) and reads_scores(algorithm)


@rule("pipeline")
def _check_validation_rewards(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.ValidationDomain):
        if not domain.rewards and domain.environment is None:
            yield context.problem((*path, "rewards"), "validation needs a reward", ADD_A_REWARD)


@rule("pipeline", "data.domains")
def _check_agentic_has_environment(context: Context) -> Problems:
    domains = [domain for _, domain in context.domains_of(schema.AgenticDomain)]
    is_agentic = any(domain.environment or domain.agent is not None for domain in domains)
    if isinstance(context.recipe, schema.AgenticRecipe) and not is_agentic:
        message = "agentic needs a domain with an environment or an agent"
        fix = "give one an environment: NAME, or use pipeline: rlvr"
        yield context.problem("pipeline", message, fix)


@rule("data.selection", "rollout.group_size")
def _check_prompt_selection(context: Context) -> Problems:
    if context.rl is None:
        return
    selection = context.rl.data.selection
    if selection.near_half_window == 1:
        message = "1 leaves nothing to choose from"
        yield context.problem("data.selection.near_half_window", message, "use 2 or more, or 0")
    # With groups of g samples, the tries of a prompt tend to g + g d + g d^2 + ... = g / (1 - d).
    group_size, decay = context.rl.rollout.group_size, selection.decay
    tries = selection.retire.min_tries if selection.retire else 0
    if group_size < tries * (1 - decay):
        max_tries = group_size / (1 - decay)
        message = f"{decay:g} lets a prompt have at most {max_tries:.3g} tries, so none retires"
        fix = f"data.selection.retire.min_tries is {tries}: lower it, or raise this towards 1"
        yield context.problem("data.selection.decay", message, fix)


@rule("train.minibatches", "train.batch_size", "rollout")
def _check_minibatch_count(context: Context) -> Problems:
    recipe, minibatches = context.recipe, context.recipe.train.minibatches
    if isinstance(recipe, schema.RlRecipe):
        samples = recipe.rollout.groups_per_step * recipe.rollout.group_size
        noun, setting = "samples", "rollout.groups_per_step or rollout.group_size"
    elif isinstance(recipe, schema.SupervisedRecipe):
        samples, setting = recipe.train.batch_size, "train.batch_size"
        noun = "pairs" if recipe.pipeline == "dpo" else "examples"
    else:
        return
    if minibatches > samples:
        message = f"{minibatches} is more than the {samples} {noun} of a step"
        yield context.problem("train.minibatches", message, f"lower it, or raise {setting}")
