"""Rules about the roles of a run: their devices, models, engine and weight channel, how the ranks
of strategy fsdp split the batch and the model, and adapters."""

from __future__ import annotations

from rollick.config.devices import Device, parse_devices
from rollick.config.model_sizes import ModelSizes, list_divisors
from rollick.config.names import NAMES
from rollick.config.rules.context import Context, Problems, rule
from rollick.config.schema.section import CustomPart
from rollick.errors import ConfigError
from rollick.types import ROLES

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


@rule("train.parallel", "train.strategy", "devices")
def _check_rank_count(context: Context) -> Problems:
    train, policy = context.recipe.train, context.devices("policy")
    if train.strategy != "fsdp" or not policy:
        return
    parallel, ranks, non_data = train.parallel, len(policy), train.parallel.non_data_ranks
    product = parallel.data_of(ranks) * non_data
    if product == ranks:
        return
    if ranks % non_data == 0:
        fix = f"use data={ranks // non_data}, or give devices.policy {product} devices"
    else:
        fix = f"give devices.policy a multiple of {non_data} devices, or lower a factor"
    factors = f"data {parallel.data or '(the rest)'}, tensor {parallel.tensor}, "
    factors += f"context {parallel.context}, expert {parallel.expert}"
    message = f"the product of {factors} is not the {ranks} ranks of devices.policy"
    yield context.problem("train.parallel", message, fix)


@rule("train.parallel", "train.strategy", "model.path")
def _check_model_divisibility(context: Context) -> Problems:
    train = context.recipe.train
    sizes = ModelSizes.read(context.recipe.model.path)
    if train.strategy != "fsdp" or sizes is None:
        return
    tensor, expert = train.parallel.tensor, train.parallel.expert
    names = ("attention heads", "key-value heads", "intermediate size")
    tensor_sizes = (sizes.heads, sizes.kv_heads, sizes.intermediate)
    for name, size in zip(names, tensor_sizes, strict=True):
        if size % tensor:
            message = f"{tensor} does not divide the model's {name} of {size}"
            fix = f"use {list_divisors(sizes.tensor_divisible)}, or shard with data or context, "
            fix += "which need not divide it"
            yield context.problem("train.parallel.tensor", message, fix)
            break
    if expert > 1 and not sizes.experts:
        message = f"{expert} ranks have no experts to split: the model is not a mixture of experts"
        yield context.problem("train.parallel.expert", message, "use 1, and data for more ranks")
    elif sizes.experts % expert:
        message = f"{expert} does not divide the model's {sizes.experts} experts"
        fix = f"use {list_divisors(sizes.experts)}, and data for more ranks"
        yield context.problem("train.parallel.expert", message, fix)


@rule("train.strategy", "run.deterministic", "infer.zero_mismatch")
def _check_fsdp_determinism(context: Context) -> Problems:
    recipe = context.recipe
    if recipe.train.strategy != "fsdp":
        return
    reason = "strategy fsdp sums over ranks in no fixed order, so it cannot guarantee this"
    fix = "use train.strategy=local, or remove it"
    if recipe.run.deterministic:
        yield context.problem("run.deterministic", reason, fix)
    if recipe.infer.zero_mismatch:
        yield context.problem("infer.zero_mismatch", reason, fix)


@rule("train.strategy", "train.parallel", "devices", "cluster.backend", "weights.channel")
def _check_fsdp_backend_and_channel(context: Context) -> Problems:
    recipe, policy = context.recipe, context.devices("policy")
    if recipe.train.strategy != "fsdp" or len(policy) <= 1:
        return
    if recipe.cluster.backend == "inline":
        message = f"the {len(policy)} ranks of devices.policy need one process each"
        fix = "use cluster.backend=ray, or one device"
        yield context.problem("cluster.backend", message, fix)
    if recipe.weights.channel == "cuda_ipc":
        message = "cuda_ipc maps full weights, and no rank of a sharded learner has them"
        yield context.problem("weights.channel", message, "use auto")


@rule("train.strategy", "devices", "pipeline", "algorithm", "data.domains")
def _check_critic_device(context: Context) -> Problems:
    """A critic is not sharded, and its default devices are those of the policy."""
    recipe, policy = context.recipe, context.devices("policy")
    if recipe.train.strategy == "local" or recipe.devices.of("critic") is not None:
        return
    if recipe.needs("values") and len(policy) > 1:
        message = f"a critic trains on one device, and the policy's {len(policy)} are its default"
        yield context.problem("devices.critic", message, f"give it one, such as {policy[0]}")


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
