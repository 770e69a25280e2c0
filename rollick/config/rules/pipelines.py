"""Rules about what each pipeline needs."""

from __future__ import annotations

from rollick.config import schema
from rollick.config.problems import KeyPath
from rollick.config.rules.algorithm import looks_at_scores
from rollick.config.rules.context import Context, Problems, rule

ADD_A_REWARD = "add rewards: [NAME]; see `rollick list`"


@rule("pipeline")
def _check_training_targets(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.TrainingDomain):
        if isinstance(domain, schema.SftDomain):
            if domain.completion is None and domain.environment is None:
                fix = "name the column with the answer to imitate, or an environment to solve"
                yield context.problem((*path, "completion"), "pipeline sft needs it", fix)
        elif isinstance(domain, schema.RlvrDomain):
            scored = bool(domain.rewards) or schema.environment_of(domain) is not None
            if not scored and _needs_rewards(context, path, domain):
                message = f"pipeline {context.recipe.pipeline} needs a reward"
                yield context.problem((*path, "rewards"), message, ADD_A_REWARD)


def _needs_rewards(context: Context, path: KeyPath, domain: schema.RlvrDomain) -> bool:
    own = domain.algorithm is not None
    is_sound = context.is_sound((*path, "algorithm") if own else ("algorithm",))
    assert context.rl is not None
    return is_sound and looks_at_scores(domain.algorithm or context.rl.algorithm)


@rule("pipeline")
def _check_validation_rewards(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.ValidationDomain):
        if not domain.rewards and domain.environment is None:
            yield context.problem((*path, "rewards"), "validation needs a reward", ADD_A_REWARD)


@rule("pipeline", "data.domains")
def _check_agentic_has_environment(context: Context) -> Problems:
    domains = [domain for _, domain in context.domains_of(schema.AgenticDomain)]
    acts = any(domain.environment or domain.agent is not None for domain in domains)
    if isinstance(context.recipe, schema.AgenticRecipe) and not acts:
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
        most = group_size / (1 - decay)
        message = f"{decay:g} lets a prompt have at most {most:.3g} tries, so none retires"
        fix = f"data.selection.retire.min_tries is {tries}: lower it, or raise this towards 1"
        yield context.problem("data.selection.decay", message, fix)


@rule("train.minibatches", "train.batch_size", "rollout")
def _check_minibatch_count(context: Context) -> Problems:
    recipe, minibatches = context.recipe, context.recipe.train.minibatches
    if isinstance(recipe, schema.RlRecipe):
        samples = recipe.rollout.groups_per_step * recipe.rollout.group_size
        kind, raised = "samples", "rollout.groups_per_step or rollout.group_size"
    elif isinstance(recipe, schema.SupervisedRecipe):
        samples, raised = recipe.train.batch_size, "train.batch_size"
        kind = "pairs" if recipe.pipeline == "dpo" else "examples"
    else:
        return
    if minibatches > samples:
        message = f"{minibatches} is more than the {samples} {kind} of a step"
        yield context.problem("train.minibatches", message, f"lower it, or raise {raised}")
