"""Rules about settings that nothing reads.

IgnoredWith in the schema marks a key that only some variants of its section read; one rule covers
all of them. The other rules here depend on devices, roles, data or several sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from rollick.config import schema
from rollick.config.model_sizes import ModelSizes
from rollick.config.problems import KeyPath, Problem, show
from rollick.config.rules.algorithm import changes_scores, describe_scoreless_part, reads_scores
from rollick.config.rules.context import Context, Problems, rule
from rollick.config.schema.section import IgnoredWith, Section


def _no_effect(
    context: Context, path: KeyPath | str, value: str, reason: str, fix: str = "remove it"
) -> Problem:
    return context.problem(path, f"{value} has no effect: {reason}".lstrip(), fix)


@rule()
def _check_ignored_keys(context: Context) -> Problems:
    for path, section in _iterate_sections(context.recipe, ()):
        fields = type(section).model_fields if context.is_valid(path) else {}
        for key, field in fields.items():
            value = getattr(section, key)
            marks = [item for item in field.metadata if isinstance(item, IgnoredWith)]
            mark = next((m for m in marks if getattr(section, m.key) in m.values), None)
            if mark is None or value == field.default:
                continue
            cause = getattr(section, mark.key)
            reason = f"{mark.key} is {cause if isinstance(cause, str) else f'{cause:g}'}"
            text = "" if isinstance(value, Section) else show(value)
            fix = f"{_describe_alternatives(type(section), mark)}, or remove it"
            yield _no_effect(context, (*path, key), text, reason, fix)


def _iterate_sections(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Section]]:
    """Every section of a recipe with its path."""
    if isinstance(value, Section):
        yield path, value
        value = dict(value)
    if isinstance(value, Mapping):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _iterate_sections(item, (*path, str(key)))  # pyright: ignore[reportUnknownArgumentType]


def _describe_alternatives(section: type[Section], mark: IgnoredWith) -> str:
    """The values of the other key with which the marked key is read."""
    annotation = section.model_fields[mark.key].annotation
    if get_origin(annotation) is Literal:
        values = [str(value) for value in get_args(annotation) if value not in mark.values]
        return f"set {mark.key} to {' or '.join(values)}"
    return f"change {mark.key}"


@rule("rollout", "infer.engine")
def _check_staleness_settings(context: Context) -> Problems:
    if context.rl is None or context.rl.rollout.max_staleness > 0:
        return
    rollout = context.rl.rollout
    if rollout.staleness_rule == "long_rounds" and not rollout.surplus_groups:
        reason = "with max_staleness 0 and no surplus no group is late"
        fix = "set rollout.surplus_groups, such as a quarter of groups_per_step"
        yield _no_effect(context, "rollout.staleness_rule", "long_rounds", reason, fix)
    if rollout.at_publish == "keep":
        reason = "with max_staleness 0 no sample runs at a publish"
        fix = "raise rollout.max_staleness, or remove it"
        yield _no_effect(context, "rollout.at_publish", "keep", reason, fix)


@rule("evaluate", "data.validation")
def _check_validation_data(context: Context) -> Problems:
    evaluate, fix = context.recipe.evaluate, "add a domain to data.validation, or remove it"
    for key, value in (("every", evaluate.every), ("at_start", evaluate.at_start)):
        if value and not context.recipe.data.validation:
            reason = "there is no validation data"
            yield _no_effect(context, f"evaluate.{key}", show(value), reason, fix)


@rule("evaluate")
def _check_greedy_sampling(context: Context) -> Problems:
    sampling, fix = context.recipe.evaluate.sampling, "set evaluate.sampling.temperature above 0"
    for key, off in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        value = getattr(sampling, key)
        if not sampling.temperature and value not in (None, off):
            message = f"{value:g} has no effect at temperature 0, which is greedy"
            yield context.problem(f"evaluate.sampling.{key}", message, f"{fix}, or remove it")


@rule("algorithm", "data.domains", "devices", "critic", "teacher", "judge", "reward_model")
def _check_unused_roles(context: Context) -> Problems:
    for path, reason, fix in _find_unused_roles(context):
        yield _no_effect(context, path, "", reason, f"{fix}, or remove it")


def _find_unused_roles(context: Context) -> Iterator[tuple[str, str, str]]:
    """Each role that is set but not used: its key, the reason, and the fix."""
    recipe, teacher = context.recipe, schema.teacher_of(context.recipe)
    has_critic = context.rl is not None and context.rl.critic != schema.CriticConfig()
    needs_teacher = recipe.needs("teacher") or recipe.needs("teacher_top")
    use_teacher = "use pipeline distill, the advantage opd or the loss distillation"
    no_values, no_reward = "no advantage reads values", "no reward uses it"
    use_model = "add the reward model to a domain"
    use_judge = "add the reward judge (without a url) to a domain"
    roles = (
        ("reference", False, recipe.needs("reference"), "nothing reads a reference", "add a KL"),
        ("critic", has_critic, recipe.needs("values"), no_values, "use advantage gae"),
        ("teacher", teacher, needs_teacher, "nothing is distilled", use_teacher),
        ("reward_model", recipe.reward_model, recipe.uses_reward_model, no_reward, use_model),
        ("judge", recipe.judge, recipe.uses_judge, no_reward, use_judge),
    )
    for role, section, is_used, reason, fix in roles:
        if section and not is_used:
            yield role, reason, fix
        if recipe.devices.of(role) is not None and not is_used:
            yield f"devices.{role}", reason, fix
    sets_top_k = teacher is not None and teacher.top_k != schema.TeacherConfig(path="").top_k
    if sets_top_k and recipe.needs("teacher") and not recipe.needs("teacher_top"):
        yield "teacher.top_k", "only the loss distillation reads it", "use that loss"


@rule("train", "infer", "devices")
def _check_gpu_settings(context: Context) -> Problems:
    train, infer = context.recipe.train, context.recipe.infer
    policy, generators = set(context.devices("policy")), set(context.devices("generators"))
    share = infer.vllm.gpu_memory_utilization
    has_share = infer.engine == "vllm" and share != schema.VllmConfig().gpu_memory_utilization
    offload = train.strategy != "local" and train.parallel.offload
    not_shared, on_cpu = "the policy shares no GPU with generators", "the policy is on the CPU"
    no_gpu = "the generators are on the CPU (use kv_cache_gb)"
    settings = (
        ("train.sleep", train.sleep, policy & generators, not_shared),
        ("train.parallel.offload", offload, policy, on_cpu),
        ("infer.vllm.gpu_memory_utilization", has_share and share, generators, no_gpu),
    )
    for path, value, devices, reason in settings:
        on_gpu = any(device.kind == "cuda" for device in devices)
        if value and policy and generators and not on_gpu:
            yield _no_effect(context, path, show(value), reason)


@rule("train.lora", "train.strategy", "devices", "infer.engine", "weights")
def _check_weight_settings(context: Context) -> Problems:
    recipe, weights = context.recipe, context.recipe.weights
    if recipe.train.lora is not None and weights.changes_only:
        reason = "adapters are always sent in full"
        yield _no_effect(context, "weights.changes_only", "true", reason)
    if weights.in_place and len(context.devices("policy")) < 2:
        reason = "only a sharded policy sends its shards"
        yield _no_effect(context, "weights.in_place", "true", reason)
    elif weights.in_place and recipe.infer.engine != "native":
        reason = f"the engine {recipe.infer.engine} receives a copy"
        yield _no_effect(context, "weights.in_place", "true", reason)


@rule("train.expert_balance", "model.path")
def _check_expert_balance(context: Context) -> Problems:
    sizes = ModelSizes.read(context.recipe.model.path)
    balance = context.recipe.train.expert_balance
    if balance and sizes is not None and not sizes.experts:
        yield _no_effect(
            context, "train.expert_balance", f"{balance:g}", "the model has no experts"
        )


@rule("pipeline")
def _check_shaped_scores(context: Context) -> Problems:
    for path, algorithm in context.algorithms("advantage", "loss", "shaping"):
        if changes_scores(algorithm) and not reads_scores(algorithm):
            reason = f"{describe_scoreless_part(algorithm)} reads no score"
            yield _no_effect(context, (*path, "shaping"), "", reason)


@rule("pipeline")
def _check_sft_summaries(context: Context) -> Problems:
    for path, domain in context.domains_of(schema.TrainingDomain):
        environment = schema.environment_of(domain)
        window = environment.window if environment else None
        if window and window.summary and isinstance(context.recipe, schema.SftRecipe):
            summary_path = (*path, "environment", "window", "summary")
            yield _no_effect(context, summary_path, "", "solvers write no summaries to imitate")
