"""Rules about domains, sampling, validation, the schedule and the cluster."""

from __future__ import annotations

from rollick.config import schema
from rollick.config.names import NAMES
from rollick.config.problems import KeyPath
from rollick.config.rules.context import Context, Problems, rule

PROGRAM_SECONDS = {"timeout_s": 10.0, "program_s": 5.0}
"""Default of the option with which the reward `code` and the environment `tools` limit programs."""
ROUNDS = 2
"""Programs of one call that run one after another: `code` takes 16 samples and runs 8 at once."""


@rule("data.domains")
def _check_has_domain(context: Context) -> Problems:
    if not context.recipe.data.domains:
        fix = "add one, such as data.domains.math with its source"
        yield context.problem("data.domains", "has no domain", fix)


@rule("sampling")
def _check_sampling_support(context: Context) -> Problems:
    if context.rl is None:
        return
    yield from _check_support(context, ("sampling",), context.rl.sampling)
    for path, domain in context.domains_of(schema.RlvrDomain):
        yield from _check_support(context, (*path, "sampling"), domain.sampling)


def _check_support(context: Context, path: KeyPath, sampling: schema.SamplingConfig) -> Problems:
    reason = "cuts the support, so the learner's log-probs would not be those of the samples"
    for key, off in (("top_p", 1), ("top_k", 0), ("min_p", 0), ("min_tokens", 0)):
        value = getattr(sampling, key)
        if value not in (None, off):
            fix = f"use {off}, or evaluate.sampling.{key} to validate"
            yield context.problem((*path, key), f"{value:g} {reason}", fix)
    if sampling.logit_bias:
        message = f"{len(sampling.logit_bias)} tokens with a bias: it {reason}"
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
    yield from _check_room(context, ("evaluate", "sampling"), limit)
    if context.rl is not None:
        limit = context.rl.sampling.resolve(temperature=1).max_tokens
        yield from _check_room(context, ("sampling",), limit)


@rule("infer.max_length")
def _check_domain_lengths(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.ScoredDomain):
        yield from _check_room(context, (*path, "sampling"), domain.sampling.max_tokens)


def _check_room(context: Context, path: KeyPath, tokens: int | None) -> Problems:
    room = context.recipe.infer.max_length
    if tokens is not None and tokens >= room:
        fix = f"infer.max_length is {room}: raise it, or use fewer tokens"
        message = f"{tokens} leaves no room for a prompt"
        yield context.problem((*path, "max_tokens"), message, fix)


@rule("rewards.timeout_s", "environments.step_timeout_s")
def _check_program_time(context: Context) -> Problems:
    """A program that runs to its time limit is judged. If the pool ended its call first, the sample
    would be masked, which a policy could choose."""
    config = context.recipe
    limits = {"rewards": config.rewards.timeout_s, "steps": config.environments.step_timeout_s}
    for path, domain in context.domains():
        for index, reward in enumerate(schema.rewards_of(domain)):
            if reward.name == "code":
                where, seconds = (*path, "rewards", index), reward.options.get("timeout_s")
                yield from _check_fits(context, where, "timeout_s", seconds, limits["rewards"])
        environment = schema.environment_of(domain)
        if environment is None or environment.name != "tools":
            continue
        if "python" in str(environment.options.get("tools")):
            where, seconds = (*path, "environment"), environment.options.get("program_s")
            yield from _check_fits(context, where, "program_s", seconds, limits["steps"])


def _check_fits(
    context: Context, section: KeyPath, option: str, given: object, limit_s: float
) -> Problems:
    seconds = PROGRAM_SECONDS[option] if given is None else given
    if isinstance(seconds, int | float) and ROUNDS * seconds > limit_s:
        kind = "rewards.timeout_s" if option == "timeout_s" else "environments.step_timeout_s"
        message = f"{option}={seconds:g} is too long for {kind}={limit_s:g}"
        fix = f"use at most {limit_s / ROUNDS:g}, or set {kind}={ROUNDS * seconds:g} or more"
        where = context.name_path(section) if given is None else (*section, "options", option)
        yield context.problem(where, message, fix)


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
        environment = schema.environment_of(domain)
        if not domain.source and environment is None:
            message = "there is neither a source of prompts nor an environment"
            yield context.problem((*path, "source"), message, "name a file, or an environment")
        if schema.agent_of(domain) is not None:
            yield from _check_agent(context, path, domain)
        if environment is not None:
            yield from _check_environment(context, path, domain, environment)


def _check_environment(
    context: Context, path: KeyPath, domain: schema.Domain, environment: schema.EnvironmentSpec
) -> Problems:
    if environment.columns and not domain.source:
        message = "there are no columns: the domain has no source of rows"
        yield context.problem((*path, "environment", "columns"), message, "remove it")
    window = environment.window
    if window and window.carried >= window.turns:
        message = f"{window.carried} turns leave no room in a window of {window.turns}"
        where = (*path, "environment", "window", "carried")
        yield context.problem(where, message, "carry fewer turns than the window has")


def _check_agent(context: Context, path: KeyPath, domain: schema.Domain) -> Problems:
    where, script = (*path, "agent"), schema.agent_of(domain)
    if schema.environment_of(domain) is not None:
        fix = "keep one of the two; an agent can hold an environment of its own"
        yield context.problem(where, "the domain has an environment already", fix)
    if not (context.base / str(script)).is_file():
        fix = "give the path of a Python script relative to the recipe"
        yield context.problem(where, f"there is no file {script!r}", fix)
