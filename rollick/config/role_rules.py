"""Rules about the roles of a run: their devices, and what a reference, critic or teacher is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rollick.config.algorithm import AlgorithmConfig
from rollick.config.algorithm_rules import rl_algorithms
from rollick.config.devices import Device, parse_devices
from rollick.config.rules import Context, Findings, rule
from rollick.config.schema import CriticConfig, TeacherConfig
from rollick.config.section import CustomPart
from rollick.errors import ConfigError


@rule("devices", "train.strategy", "run.deterministic")
def _devices_suit_the_roles(context: Context) -> Findings:
    for role, text in context.recipe.devices.model_dump().items():
        try:
            parsed = parse_devices(text) if text is not None else None
        except ConfigError as error:
            yield context.problem(f"devices.{role}", error.message, error.fix)
        else:
            yield from _check_devices(context, role, parsed) if parsed else ()


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
    if len(devices) == 1:
        return
    fix = f"use one, such as {_spell(devices[0])}"
    if role == "critic":
        message = f"a critic trains on one device, and this is {len(devices)}"
        yield context.problem(path, message, fix)
    elif role == "policy" and recipe.train.strategy == "local":
        message = f"strategy local trains on one device, and this is {len(devices)}"
        yield context.problem(path, message, f"{fix}, or train.strategy=fsdp")


def _spell(device: Device) -> str:
    return str(device) if device.kind == "cpu" else str(device.index)


@rule("pipeline", "algorithm", "data.domains", "devices")
def _devices_are_of_roles_that_work(context: Context) -> Findings:
    recipe = context.recipe
    distils = recipe.needs("teacher") or recipe.needs("teacher_top")
    for role, is_needed, reason, fix in (
        ("reference", recipe.needs("reference"), "nothing looks at a reference", "add a KL"),
        ("critic", recipe.needs("values"), "no advantage asks for values", "use advantage gae"),
        ("teacher", distils, "nothing is distilled", "use pipeline distill"),
    ):
        if getattr(recipe.devices, role) is not None and not is_needed:
            yield context.problem(
                f"devices.{role}", f"has no effect: {reason}", f"{fix}, or remove it"
            )


@rule("pipeline", "algorithm", "data.domains", "critic", "run.steps")
def _the_critic_is_used(context: Context) -> Findings:
    recipe = context.recipe
    if not recipe.needs("values"):
        if recipe.critic != CriticConfig():
            message = "has no effect: no advantage asks for values"
            yield context.problem("critic", message, "use advantage gae, or remove it")
    elif recipe.critic.warmup_steps >= recipe.run.steps:
        message = f"{recipe.critic.warmup_steps} leaves no step of {recipe.run.steps} to the policy"
        yield context.problem("critic.warmup_steps", message, "lower it, or raise run.steps")


@rule("judge", "devices.judge", "data")
def _the_judge_is_used(context: Context) -> Findings:
    yield from _check_asked(
        context,
        "judge",
        reward="the reward judge (without a url)",
        nobody="it has no url, and the recipe has no judge",
        fix="set the options url and model, or give judge.path",
    )


@rule("reward_model", "devices.reward_model", "data")
def _the_reward_model_is_used(context: Context) -> Findings:
    yield from _check_asked(
        context,
        "reward_model",
        reward="the reward model",
        nobody="the recipe has no reward model",
        fix="give reward_model.path",
    )


def _check_asked(
    context: Context, role: Literal["judge", "reward_model"], *, reward: str, nobody: str, fix: str
) -> Findings:
    """A model that rewards ask is there if one does, and only then. `reward`: the one that asks;
    `nobody`, `fix`: what is said of it without the model."""
    recipe = context.recipe
    is_given = getattr(recipe, role) is not None
    if is_given and not getattr(recipe, f"asks_{role}"):
        message = "has no effect: no reward asks it"
        yield context.problem(role, message, f"add {reward} to a domain, or remove it")
    if is_given:
        return
    if getattr(recipe.devices, role) is not None:
        message = f"has no effect: the recipe has no {role.replace('_', ' ')}"
        yield context.problem(f"devices.{role}", message, f"give {role}.path, or remove it")
    for path, domain in context.domains():
        for place, spec in enumerate(domain.rewards):
            if getattr(spec, f"asks_{role}"):
                where = (*path, "rewards", str(place))
                yield context.problem(where, f"nobody to ask: {nobody}", fix)


@rule("pipeline", "teacher")
def _there_is_a_teacher_to_learn_from(context: Context) -> Findings:
    if context.recipe.teacher is not None:
        return
    fix = "give its folder or hub name as teacher.path"
    if context.recipe.pipeline == "distill":
        yield context.problem("teacher", "pipeline distill needs it", fix)
    for path, algorithm in rl_algorithms(context, "advantage", "loss", "correction"):
        for part, name in _taught_parts(algorithm):
            message = f"{name} needs a teacher, and the recipe has none"
            yield context.problem((*path, part), message, fix)


def _taught_parts(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """(part, name) of what looks at a teacher."""
    for part in ("advantage", "loss", "correction"):
        section = getattr(algorithm, part)
        asks = isinstance(section, CustomPart) and "teacher" in section.needs
        if asks or section.name in ("opd", "distillation"):
            yield part, section.name


@rule("pipeline", "algorithm", "data.domains", "teacher")
def _the_teacher_is_used(context: Context) -> Findings:
    recipe, teacher = context.recipe, context.recipe.teacher
    if teacher is None or recipe.needs("teacher_top"):
        return
    default = TeacherConfig(path=teacher.path)
    if not recipe.needs("teacher"):
        message = "has no effect: nothing is distilled"
        fix = "use pipeline distill, the advantage opd or the loss distillation, or remove it"
        yield context.problem("teacher", message, fix)
    elif teacher.top_k != default.top_k:
        message = f"{teacher.top_k} has no effect: only the loss distillation looks at them"
        yield context.problem("teacher.top_k", message, "remove it")


@rule("train.sleep", "devices")
def _the_policy_sleeps_where_that_frees_memory(context: Context) -> Findings:
    devices = context.recipe.devices
    try:
        common = set(parse_devices(devices.policy)) & set(parse_devices(devices.generators))
    except ConfigError:
        return
    if context.recipe.train.sleep and not any(device.kind == "cuda" for device in common):
        message = "true has no effect: the policy shares no GPU with generators"
        yield context.problem("train.sleep", message, "remove it")


@rule("weights", "devices", "cluster.backend")
def _the_channel_of_weights_can_work(context: Context) -> Findings:
    recipe, weights = context.recipe, context.recipe.weights
    try:
        ends = [parse_devices(recipe.devices.policy), parse_devices(recipe.devices.generators)]
    except ConfigError:
        return
    kinds = {device.kind for devices in ends for device in devices}
    if weights.channel == "cuda_ipc" and kinds != {"cuda"}:
        message = "cuda_ipc needs the policy and the generators on GPUs"
        yield context.problem("weights.channel", message, "use auto")
    if weights.channel == "direct" and recipe.cluster.backend != "inline":
        message = "direct needs learner and engines in one process"
        yield context.problem("weights.channel", message, "use auto, or cluster.backend=inline")
    if weights.changes_only and weights.channel in ("direct", "cuda_ipc"):
        message = f"true has no effect: {weights.channel} reads the learner's own memory"
        yield context.problem(
            "weights.changes_only", message, "use channel host or broadcast, or remove it"
        )
