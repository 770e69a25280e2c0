"""Rules about the roles of a run: their devices, models, engine and weight channel."""

from __future__ import annotations

from rollick.config.devices import Device, parse_devices
from rollick.config.rules.context import Context, Problems, rule
from rollick.config.schema import rewards_of
from rollick.config.schema.section import CustomPart
from rollick.errors import ConfigError
from rollick.types import ROLES

OWN_DEVICES = "give the generators devices of their own, or use infer.engine=native"


@rule("devices", "train.strategy", "run.deterministic")
def _check_role_devices(context: Context) -> Problems:
    for role, text in context.recipe.devices.model_dump().items():
        try:
            devices = parse_devices(text) if text is not None else ()
        except ConfigError as error:
            yield context.problem(f"devices.{role}", error.message, error.fix)
        else:
            yield from _check_devices(context, role, devices) if devices else ()


def _check_devices(context: Context, role: str, devices: tuple[Device, ...]) -> Problems:
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
    first = devices[0]
    fix = f"use one, such as {first if first.kind == 'cpu' else first.index}"
    if role == "critic":
        message = f"a critic trains on one device, but {len(devices)} are set"
        yield context.problem(path, message, fix)
    elif role == "policy" and recipe.train.strategy == "local":
        message = f"strategy local trains on one device, but {len(devices)} are set"
        yield context.problem(path, message, f"{fix}, or train.strategy=fsdp")


@rule("algorithm", "data.domains", "critic", "run.steps")
def _check_critic_warmup(context: Context) -> Problems:
    recipe = context.rl
    if recipe and recipe.needs("values") and recipe.critic.warmup_steps >= recipe.run.steps:
        message = f"{recipe.critic.warmup_steps} leaves no step of {recipe.run.steps} to the policy"
        yield context.problem("critic.warmup_steps", message, "lower it, or raise run.steps")


@rule("judge", "reward_model", "data")
def _check_reward_models_exist(context: Context) -> Problems:
    recipe = context.recipe
    for path, domain in context.domains():
        for index, reward in enumerate(rewards_of(domain)):
            where = (*path, "rewards", index)
            if reward.asks_judge and recipe.judge is None:
                fix = "set the options url and model, or give judge.path"
                yield context.problem(where, "it has no url, and the recipe has no judge", fix)
            if reward.asks_reward_model and recipe.reward_model is None:
                fix = "give reward_model.path"
                yield context.problem(where, "the recipe has no reward model", fix)


@rule("pipeline", "teacher")
def _check_teacher_exists(context: Context) -> Problems:
    if context.rl is None or context.rl.teacher is not None:
        return
    fix = "give its folder or hub name as teacher.path"
    parts = ("advantage", "loss", "correction")
    for path, algorithm in context.algorithms(*parts):
        for part in parts:
            section = getattr(algorithm, part)
            needs_teacher = isinstance(section, CustomPart) and "teacher" in section.needs
            if needs_teacher or section.name in ("opd", "distillation"):
                message = f"{section.name} needs a teacher, and the recipe has none"
                yield context.problem((*path, part), message, fix)


@rule("weights", "devices", "cluster.backend")
def _check_weight_channel(context: Context) -> Problems:
    recipe, weights = context.recipe, context.recipe.weights
    ends = [context.devices("policy"), context.devices("generators")]
    if not all(ends):
        return
    kinds = {device.kind for devices in ends for device in devices}
    if weights.channel == "cuda_ipc" and kinds != {"cuda"}:
        message = "cuda_ipc needs the policy and the generators on GPUs"
        yield context.problem("weights.channel", message, "use auto")
    if weights.channel == "direct" and recipe.cluster.backend != "inline":
        message = "direct needs learner and engines in one process"
        yield context.problem("weights.channel", message, "use auto, or cluster.backend=inline")


@rule("infer.zero_mismatch", "infer.engine", "devices")
def _check_zero_mismatch(context: Context) -> Problems:
    infer, generators = context.recipe.infer, context.devices("generators")
    if not infer.zero_mismatch:
        return
    if infer.engine != "native":
        message = f"needs the native engine, not {infer.engine}"
        yield context.problem("infer.zero_mismatch", message, "use infer.engine=native")
    elif any(device.kind == "cpu" for device in context.devices("policy") + generators):
        message = "has kernels for GPUs only"
        yield context.problem("infer.zero_mismatch", message, "use run.deterministic on the CPU")


@rule("infer.engine", "devices")
def _check_vllm_has_dedicated_devices(context: Context) -> Problems:
    """vLLM runs in separate processes and cannot share the learner's parameters. On the CPU it
    cannot sleep, so it cannot share a device with any other role."""
    if context.recipe.infer.engine != "vllm":
        return
    generators = context.devices("generators")
    for role in ROLES:
        common = sorted(set(generators) & set(context.devices(role)))
        if role == "generators" or not common:
            continue
        if role == "policy":
            message = f"vllm cannot share the parameters of the policy, which is on {common[0]} too"
            yield context.problem("infer.engine", message, OWN_DEVICES)
        elif common[0].kind == "cpu":
            message = f"vllm cannot sleep on the CPU, and the {role} is on {common[0]} too"
            yield context.problem("infer.engine", message, OWN_DEVICES)


@rule("infer.engine", "infer.vllm", "devices")
def _check_vllm_options(context: Context) -> Problems:
    infer = context.recipe.infer
    on_cpu = any(device.kind == "cpu" for device in context.devices("generators"))
    if infer.engine == "vllm" and not on_cpu and infer.vllm.tensor_parallel > 1:
        message = f"{infer.vllm.tensor_parallel} needs more than the one GPU of a generator"
        fix = "use 1; a wider engine works with VllmEngine.create, outside of a recipe"
        yield context.problem("infer.vllm.tensor_parallel", message, fix)
