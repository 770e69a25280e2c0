"""Rules about strategy fsdp (how its ranks split the batch and the model) and adapters.

model_sizes.py reads the model's config.json.
"""

from __future__ import annotations

from rollick.config.model_sizes import ModelSizes, divisors
from rollick.config.names import NAMES
from rollick.config.rules.context import Context, Problems, rule


@rule("train.parallel", "train.strategy", "devices")
def _check_rank_count(context: Context) -> Problems:
    train, policy = context.recipe.train, context.devices("policy")
    if train.strategy != "fsdp" or not policy:
        return
    parallel, ranks, others = train.parallel, len(policy), train.parallel.others
    product = parallel.data_of(ranks) * others
    if product == ranks:
        return
    if ranks % others == 0:
        fix = f"use data={ranks // others}, or give devices.policy {product} devices"
    else:
        fix = f"give devices.policy a multiple of {others} devices, or lower a factor"
    factors = f"data {parallel.data or '(the rest)'}, tensor {parallel.tensor}, "
    factors += f"context {parallel.context}, expert {parallel.expert}"
    message = f"{factors} do not make the {ranks} ranks of devices.policy"
    yield context.problem("train.parallel", message, fix)


@rule("train.parallel", "train.strategy", "model.path")
def _check_model_divisibility(context: Context) -> Problems:
    train = context.recipe.train
    sizes = ModelSizes.read(context.recipe.model.path)
    if train.strategy != "fsdp" or sizes is None:
        return
    tensor, expert = train.parallel.tensor, train.parallel.expert
    names = ("attention heads", "key-value heads", "inner size")
    for name, size in zip(names, (sizes.heads, sizes.kv_heads, sizes.inner), strict=True):
        if size % tensor:
            message = f"{tensor} does not divide the model's {name} of {size}"
            fix = f"use {divisors(sizes.tensor_divisible)}, or shard with data or context, "
            fix += "which have no such rule"
            yield context.problem("train.parallel.tensor", message, fix)
            break
    if expert > 1 and not sizes.experts:
        message = f"{expert} has no experts to divide: the model is not a mixture of experts"
        yield context.problem("train.parallel.expert", message, "use 1, and data for more ranks")
    elif sizes.experts % expert:
        message = f"{expert} does not divide the model's {sizes.experts} experts"
        fix = f"use {divisors(sizes.experts)}, and data for more ranks"
        yield context.problem("train.parallel.expert", message, fix)


@rule("train.strategy", "run.deterministic", "infer.zero_mismatch")
def _check_fsdp_determinism(context: Context) -> Problems:
    recipe = context.recipe
    if recipe.train.strategy != "fsdp":
        return
    reason = "strategy fsdp sums over ranks in no fixed order, so it cannot guarantee it"
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
