"""Rules about the roles of a run: their devices, models, engine and weight channel, how the ranks
of strategy fsdp split the batch and the model, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rollick.config.devices import Device, parse_devices
from rollick.config.model_sizes import ModelSizes, list_divisors
from rollick.config.names import NAMES
from rollick.config.rules.context import Context, Problems, rule
from rollick.config.schema import ParallelConfig, model_of
from rollick.config.schema.section import CustomPart
from rollick.errors import ConfigError
from rollick.types import ROLES, SHARDABLE_ROLES, RoleName

SEPARATE_DEVICES = "give the generators separate devices, or use infer.engine=native"


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
        message = "run.deterministic works on the CPU only"
        yield context.problem(path, message, "use cpu, or run.deterministic=false")
    if len(devices) == 1:
        return
    first = devices[0]
    fix = f"use one, such as {first if first.kind == 'cpu' else first.index}"
    if role == "critic" and recipe.parallel_of("critic") is None:
        message = f"a critic that is not sharded trains on one device, but {len(devices)} are set"
        yield context.problem(path, message, f"{fix}, or set critic.parallel")
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
    for path, reward in context.rewards():
        if reward.uses_judge and context.recipe.judge is None:
            fix = "set the options url and model, or set judge.path"
            yield context.problem(path, "it has no url, and the recipe has no judge", fix)
        if reward.uses_reward_model and context.recipe.reward_model is None:
            fix = "set reward_model.path"
            yield context.problem(path, "the recipe has no reward model", fix)


@rule("pipeline", "teacher")
def _check_teacher_exists(context: Context) -> Problems:
    if context.rl is None or context.rl.teacher is not None:
        return
    fix = "set teacher.path to its folder or hub name"
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
    policy, generators = context.devices("policy"), context.devices("generators")
    if not policy or not generators:
        return
    kinds = {device.kind for device in policy + generators}
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
        shared = sorted(set(generators) & set(context.devices(role)))
        if role == "generators" or not shared:
            continue
        if role == "policy":
            message = f"vllm cannot share the parameters of the policy, which is on {shared[0]} too"
            yield context.problem("infer.engine", message, SEPARATE_DEVICES)
        elif shared[0].kind == "cpu":
            message = f"vllm cannot sleep on the CPU, and the {role} is on {shared[0]} too"
            yield context.problem("infer.engine", message, SEPARATE_DEVICES)


@rule("infer.engine", "infer.vllm", "devices")
def _check_vllm_options(context: Context) -> Problems:
    infer = context.recipe.infer
    on_cpu = any(device.kind == "cpu" for device in context.devices("generators"))
    if infer.engine == "vllm" and not on_cpu and infer.vllm.tensor_parallel > 1:
        message = f"{infer.vllm.tensor_parallel} needs more than the one GPU of a generator"
        fix = "use 1; a wider engine works with VllmEngine.create, outside of a recipe"
        yield context.problem("infer.vllm.tensor_parallel", message, fix)


SHARDING = ("train.parallel", "train.strategy", "devices", "critic", "teacher", "reward_model")
"""The settings that say how the models of roles are sharded."""


class _ShardedRole(NamedTuple):
    """A role whose model is divided over its devices, and the key of the setting that says how."""

    role: RoleName
    key: str
    parallel: ParallelConfig
    devices: tuple[Device, ...]


def _sharded_roles(context: Context) -> Iterator[_ShardedRole]:
    """The policy with strategy fsdp, and roles with devices or a sharding of their own. Strategies
    of other packages check themselves."""
    recipe = context.recipe
    if recipe.train.strategy == "fsdp":
        policy = context.devices("policy")
        yield _ShardedRole("policy", "train.parallel", recipe.train.parallel, policy)
    for role in SHARDABLE_ROLES:
        if role == "policy":
            continue
        own, parallel = recipe.own_parallel_of(role), recipe.parallel_of(role)
        devices = context.devices(role) or (context.devices("policy") if own else ())
        if parallel is not None and (own is not None or len(devices) > 1):
            key = "train.parallel" if own is None else f"{role}.parallel"
            yield _ShardedRole(role, key, parallel, devices)


@rule(*SHARDING)
def _check_rank_count(context: Context) -> Problems:
    for role, key, parallel, devices in _sharded_roles(context):
        ranks, non_data = len(devices), parallel.non_data_ranks
        product = parallel.data_of(ranks) * non_data
        if product == ranks or not ranks:
            continue
        if ranks % non_data == 0:
            fix = f"use data={ranks // non_data}, or give devices.{role} {product} devices"
        else:
            fix = f"give devices.{role} a multiple of {non_data} devices, or lower a factor"
        factors = f"data {parallel.data or '(the rest)'}, tensor {parallel.tensor}, "
        factors += f"context {parallel.context}, expert {parallel.expert}"
        message = f"the product of {factors} is not the {ranks} ranks of devices.{role}"
        yield context.problem(key, message, fix)


@rule(*SHARDING, "model.path")
def _check_model_divisibility(context: Context) -> Problems:
    for role, key, parallel, _ in _sharded_roles(context):
        sizes = ModelSizes.read(model_of(context.recipe, role).path)
        if sizes is not None:
            yield from _check_divisors(context, key, parallel, sizes)


def _check_divisors(
    context: Context, key: str, parallel: ParallelConfig, sizes: ModelSizes
) -> Problems:
    tensor, expert = parallel.tensor, parallel.expert
    names = ("attention heads", "key-value heads", "intermediate size")
    tensor_sizes = (sizes.heads, sizes.kv_heads, sizes.intermediate)
    for name, size in zip(names, tensor_sizes, strict=True):
        if size % tensor:
            message = f"{tensor} does not divide the model's {name} of {size}"
            fix = f"use {list_divisors(sizes.tensor_divisible)}, or shard with data or context, "
            fix += "which need not divide it"
            yield context.problem(f"{key}.tensor", message, fix)
            break
    if expert > 1 and not sizes.experts:
        message = f"{expert} ranks have no experts to split: the model is not a mixture of experts"
        yield context.problem(f"{key}.expert", message, "use 1, and data for more ranks")
    elif sizes.experts % expert:
        message = f"{expert} does not divide the model's {sizes.experts} experts"
        fix = f"use {list_divisors(sizes.experts)}, and data for more ranks"
        yield context.problem(f"{key}.expert", message, fix)


@rule(*SHARDING)
def _check_sharded_devices(context: Context) -> Problems:
    """The ranks of a process form one process group, whatever their role."""
    sharded = list(_sharded_roles(context))
    for index, later in enumerate(sharded):
        for earlier in sharded[:index]:
            devices = later.devices
            if devices != earlier.devices and set(devices) & set(earlier.devices):
                message = f"shares some devices with the {earlier.role}, and both are sharded"
                fix = f"use those of the {earlier.role} in the same order, or none of them"
                yield context.problem(f"devices.{later.role}", message, fix)
                break


@rule(*SHARDING, "pipeline", "algorithm", "data.domains")
def _check_critic_device(context: Context) -> Problems:
    """A strategy of another package does not say how a critic is sharded, and the default devices
    of the critic are those of the policy."""
    recipe, policy = context.recipe, context.devices("policy")
    if recipe.devices.of("critic") is not None or recipe.parallel_of("critic") is not None:
        return
    if recipe.train.strategy != "local" and recipe.needs("values") and len(policy) > 1:
        message = "a critic that is not sharded trains on one device, and the policy's "
        message += f"{len(policy)} are its default"
        fix = f"give it one, such as {policy[0]}, or set critic.parallel"
        yield context.problem("devices.critic", message, fix)


@rule(*SHARDING, "run.deterministic", "infer.zero_mismatch")
def _check_sharding_determinism(context: Context) -> Problems:
    recipe, roles = context.recipe, [sharded.role for sharded in _sharded_roles(context)]
    if not roles:
        return
    reason = f"the {roles[0]} is sharded, and ranks sum in no fixed order"
    fix = "do not shard it, or remove this"
    if recipe.run.deterministic:
        yield context.problem("run.deterministic", reason, fix)
    if recipe.infer.zero_mismatch and "policy" in roles:
        yield context.problem("infer.zero_mismatch", reason, fix)


@rule(*SHARDING, "cluster.backend", "weights.channel")
def _check_sharding_backend_and_channel(context: Context) -> Problems:
    recipe = context.recipe
    for role, _, _, devices in _sharded_roles(context):
        ranks = len(devices)
        if ranks > 1 and recipe.cluster.backend == "inline":
            message = f"the {ranks} ranks of devices.{role} need one process each"
            fix = "use cluster.backend=ray, or one device"
            yield context.problem("cluster.backend", message, fix)
            break
    if len(context.devices("policy")) > 1 and recipe.weights.channel == "cuda_ipc":
        message = "cuda_ipc maps full weights, and no rank of a sharded learner has them"
        yield context.problem("weights.channel", message, "use auto")


@rule("train.lora", "train.strategy", "infer.zero_mismatch")
def _check_lora_compatibility(context: Context) -> Problems:
    recipe = context.recipe
    if recipe.train.lora is None:
        return
    strategy = recipe.train.strategy
    # Strategies of other packages check this themselves.
    if strategy != "local" and strategy in NAMES["train_strategies"]:
        message = f"strategy {strategy} trains all parameters"
        yield context.problem("train.lora", message, "use train.strategy=local, or remove it")
    if recipe.infer.zero_mismatch:
        reason = "the engine adds adapters to its weights, and the learner computes them separately"
        yield context.problem("infer.zero_mismatch", reason, "remove it, or train.lora")
