"""Rules that need more than one setting of a recipe.

    load.py -> Context(recipe, source, base) -> RULES (here and in name_rules.py) -> Problems

`check_recipe` runs them all on a recipe that is loaded; loading runs them too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rollick.config.corrections import clash
from rollick.config.devices import Device, parse_devices
from rollick.config.losses import WITHOUT_TRUST_REGION, GspoLoss, PpoLoss, SegmentLoss
from rollick.config.name_rules import import_everything
from rollick.config.problems import Problem
from rollick.config.rules import RULES, Context, Findings, rule
from rollick.config.schema import AlgorithmConfig, RolloutConfig, TrainConfig
from rollick.errors import ConfigError

if TYPE_CHECKING:
    from rollick.config.load import LoadedRecipe

GROUP_ADVANTAGES = {
    "dr_grpo",
    "grpo",
    "rloo",
    "reinforce++_baseline",
    "lite_ppo",
    "max_rl",
    "gdpo",
}
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


def check_recipe(
    loaded: LoadedRecipe, *, objects: Collection[str] = (), deep: bool = False
) -> list[Problem]:
    """Every problem that the rules find; with `deep`, also what only importing can tell."""
    context = Context(loaded.recipe, loaded.source, loaded.base, objects)
    problems = run_rules(context)
    if deep and not problems:
        problems = list(import_everything(context))
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


@rule("pipeline")
def _domains_suit_the_pipeline(context: Context) -> Findings:
    pipeline = context.recipe.pipeline
    if pipeline == "rlvr":
        for path, domain in context.domains():
            if not domain.rewards:
                fix = "add rewards: [NAME]; see `rollick list`"
                yield context.problem((*path, "rewards"), "pipeline rlvr needs a reward", fix)
    if pipeline == "sft":
        for path, domain in context.domains(validation=False):
            if domain.completion is None:
                fix = "name the column with the answer to imitate"
                yield context.problem((*path, "completion"), "pipeline sft needs it", fix)
        for name, domain in context.recipe.data.validation.items():
            if not domain.rewards:
                path = ("data", "validation", name, "rewards")
                fix = "add rewards: [NAME]; see `rollick list`"
                yield context.problem(path, "validation needs a reward", fix)


@rule("pipeline", "sampling")
def _training_samples_have_full_support(context: Context) -> Findings:
    if context.recipe.pipeline != "rlvr":
        return
    sampling = context.recipe.sampling
    reason = "cuts the support, so the learner's log-probs would not be those of the samples"
    if sampling.top_p < 1:
        message = f"{sampling.top_p:g} {reason}"
        yield context.problem("sampling.top_p", message, "use 1, or evaluate.top_p to validate")
    if sampling.top_k > 0:
        message = f"{sampling.top_k} {reason}"
        yield context.problem("sampling.top_k", message, "use 0, or evaluate.top_k to validate")
    if sampling.temperature == 0:
        message = "0 draws the same sample every time, so there is nothing to learn from"
        fix = "use 1, or evaluate.temperature to validate"
        yield context.problem("sampling.temperature", message, fix)


@rule("pipeline", "rollout.group_size", "algorithm.advantage")
def _group_advantages_need_a_group(context: Context) -> Findings:
    recipe = context.recipe
    name = recipe.algorithm.advantage.name
    if recipe.pipeline == "rlvr" and name in GROUP_ADVANTAGES and recipe.rollout.group_size < 2:
        message = f"advantage {name} compares the samples of a group, and 1 gives it no other"
        yield context.problem("rollout.group_size", message, "use 2 or more")


@rule("algorithm.kl")
def _k1_is_no_loss(context: Context) -> Findings:
    kl = context.recipe.algorithm.kl
    if kl.form == "k1" and kl.coefficient > 0:
        message = "k1 in the loss has an expected gradient of zero"
        yield context.problem("algorithm.kl.form", message, "use k2 or k3")


@rule("pipeline", "algorithm.loss", "algorithm.correction")
def _the_correction_suits_the_loss(context: Context) -> Findings:
    recipe = context.recipe
    loss, correction = recipe.algorithm.loss.name, recipe.algorithm.correction.name
    # The loss sft is a problem of its own here, whatever the correction.
    if recipe.pipeline == "rlvr" and loss != "sft" and (message := clash(loss, correction)):
        yield context.problem("algorithm.correction", message, "use bypass, or the loss ppo")


@rule("algorithm.loss")
def _dual_clip_is_off_or_above_one(context: Context) -> Findings:
    loss = context.recipe.algorithm.loss
    if isinstance(loss, PpoLoss | GspoLoss | SegmentLoss) and 0 < loss.dual_clip <= 1:
        message = f"{loss.dual_clip:g} would clip every negative advantage"
        fix = "use a number above 1, or 0 for off"
        yield context.problem("algorithm.loss.dual_clip", message, fix)


@rule("pipeline", "algorithm.loss", "rollout.max_staleness")
def _the_loss_suits_rl(context: Context) -> Findings:
    recipe = context.recipe
    loss = recipe.algorithm.loss.name
    if recipe.pipeline != "rlvr" or loss not in WITHOUT_TRUST_REGION:
        return
    staleness = recipe.rollout.max_staleness
    if staleness > 0:
        message = f"{staleness:g} needs a loss with a trust region, and {loss} has none"
        fix = "use 0, or the loss dppo_tv or ppo"
        yield context.problem("rollout.max_staleness", message, fix)
    elif loss == "sft":
        message = "sft looks at no score, so pipeline rlvr would learn nothing from its rewards"
        yield context.problem("algorithm.loss", message, "use dppo_tv or ppo")


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
    for key, value, off in (("top_p", evaluate.top_p, 1), ("top_k", evaluate.top_k, 0)):
        if evaluate.temperature == 0 and value != off:
            message = f"{value:g} has no effect at evaluate.temperature 0, which is greedy"
            fix = "set evaluate.temperature above 0, or remove it"
            yield context.problem(f"evaluate.{key}", message, fix)


@rule("devices", "train.strategy", "run.deterministic")
def _devices_suit_the_roles(context: Context) -> Findings:
    devices = context.recipe.devices
    for role, text in (
        ("policy", devices.policy),
        ("generators", devices.generators),
        ("reference", devices.reference),
    ):
        try:
            parsed = parse_devices(text) if text is not None else None
        except ConfigError as error:
            yield context.problem(f"devices.{role}", error.message, error.fix)
        else:
            yield from _check_devices(context, role, parsed) if parsed else ()


@rule("devices.reference", "algorithm.kl")
def _a_reference_is_used(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.devices.reference is not None and recipe.algorithm.kl.coefficient == 0:
        message = "has no effect: without a KL there is no reference"
        yield context.problem("devices.reference", message, "set algorithm.kl.coefficient")


@rule("run.deterministic", "infer.engine")
def _deterministic_mode_has_its_engine(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.run.deterministic and recipe.infer.engine != "native":
        message = f"deterministic mode needs the native engine, not {recipe.infer.engine}"
        yield context.problem("infer.engine", message, "use native")


def _check_devices(context: Context, role: str, devices: tuple[Device, ...]) -> Findings:
    recipe = context.recipe
    path = f"devices.{role}"
    kinds = {device.kind for device in devices}
    if len(kinds) > 1:
        message = "mixes CPU workers and GPUs in one role"
        yield context.problem(path, message, "use one kind for each role")
    elif recipe.run.deterministic and kinds != {"cpu"}:
        message = "run.deterministic is bit for bit on the CPU only"
        yield context.problem(path, message, "use cpu, or run.deterministic=false")
    if role == "policy" and recipe.train.strategy == "local" and len(devices) != 1:
        message = f"strategy local trains on one device, and this is {len(devices)}"
        yield context.problem(path, message, f"use one, such as {_spell(devices[0])}")


def _spell(device: Device) -> str:
    return str(device) if device.kind == "cpu" else str(device.index)


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


@rule("pipeline", "train.minibatches", "rollout.groups_per_step", "rollout.group_size")
def _every_minibatch_has_a_sample(context: Context) -> Findings:
    recipe = context.recipe
    samples = recipe.rollout.groups_per_step * recipe.rollout.group_size
    if recipe.pipeline == "rlvr" and recipe.train.minibatches > samples:
        message = f"{recipe.train.minibatches} is more than the {samples} samples of a step"
        fix = "lower it, or raise rollout.groups_per_step or rollout.group_size"
        yield context.problem("train.minibatches", message, fix)


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


@rule("pipeline", "rollout", "algorithm", "train.batch_size")
def _settings_belong_to_the_pipeline(context: Context) -> Findings:
    """Settings that the pipeline does not look at must keep their defaults."""
    recipe = context.recipe
    if recipe.pipeline == "rlvr" and recipe.train.batch_size != TrainConfig().batch_size:
        message = f"{recipe.train.batch_size} has no effect: it is for pipeline sft"
        fix = "use rollout.groups_per_step and rollout.group_size"
        yield context.problem("train.batch_size", message, fix)
    if recipe.pipeline != "sft":
        return
    for key in SAMPLING_ONLY:
        if getattr(recipe.rollout, key) != getattr(RolloutConfig(), key):
            message = "has no effect: pipeline sft draws no samples to train on"
            yield context.problem(f"rollout.{key}", message, "remove it")
    for key in ("advantage", "correction"):
        if getattr(recipe.algorithm, key) != getattr(AlgorithmConfig(), key):
            message = "has no effect: pipeline sft looks at no score and no other policy"
            yield context.problem(f"algorithm.{key}", message, "remove it")
    if recipe.algorithm.loss.name not in ("sft", AlgorithmConfig().loss.name):
        message = f"{recipe.algorithm.loss.name} has no effect: pipeline sft minimises sft"
        yield context.problem("algorithm.loss", message, "remove it")
    if recipe.algorithm.kl.coefficient > 0:
        message = "has no effect: pipeline sft has no reference"
        yield context.problem("algorithm.kl.coefficient", message, "remove it")
