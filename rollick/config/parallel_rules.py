"""Rules about strategy fsdp: whether its ranks can divide the work, and this model.

What the model's own config.json says is read by model_sizes.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollick.config.devices import Device, parse_devices
from rollick.config.model_sizes import ModelSizes, divisors
from rollick.config.rules import Context, Findings, rule
from rollick.config.schema import ParallelConfig
from rollick.errors import ConfigError


@rule("train.parallel", "train.strategy")
def _parallel_is_used(context: Context) -> Findings:
    train = context.recipe.train
    if train.strategy == "local" and train.parallel != ParallelConfig():
        message = "has no effect: strategy local trains on one device"
        fix = "set train.strategy=fsdp, or remove it"
        yield context.problem("train.parallel", message, fix)


@rule("train.parallel", "train.strategy", "devices")
def _the_ranks_are_the_devices(context: Context) -> Findings:
    train, policy = context.recipe.train, _policy(context)
    if train.strategy != "fsdp" or not policy:
        return
    parallel, ranks = train.parallel, len(policy)
    others = parallel.others
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
def _the_ranks_can_divide_the_model(context: Context) -> Findings:
    train = context.recipe.train
    sizes = ModelSizes.read(context.recipe.model.path)
    if train.strategy != "fsdp" or sizes is None:
        return
    tensor, expert = train.parallel.tensor, train.parallel.expert
    for name, size in (
        ("attention heads", sizes.heads),
        ("key-value heads", sizes.kv_heads),
        ("inner size", sizes.inner),
    ):
        if size % tensor:
            message = f"{tensor} does not divide the model's {name} of {size}"
            fix = f"use {divisors(sizes.cuttable)}, or shard with data or context, "
            fix += "which have no such rule"
            yield context.problem("train.parallel.tensor", message, fix)
            break
    if expert > 1 and not sizes.experts:
        message = f"{expert} has no experts to divide: the model is not a mixture of them"
        yield context.problem("train.parallel.expert", message, "use 1, and data for more ranks")
    elif sizes.experts % expert:
        message = f"{expert} does not divide the model's {sizes.experts} experts"
        fix = f"use {divisors(sizes.experts)}, and data for more ranks"
        yield context.problem("train.parallel.expert", message, fix)


@rule("train.expert_balance", "model.path")
def _there_are_experts_to_balance(context: Context) -> Findings:
    sizes = ModelSizes.read(context.recipe.model.path)
    balance = context.recipe.train.expert_balance
    if balance and sizes is not None and not sizes.experts:
        message = f"{balance:g} has no effect: the model has no experts"
        yield context.problem("train.expert_balance", message, "remove it")


@rule("train.strategy", "run.deterministic", "infer.zero_mismatch")
def _fsdp_promises_no_bits(context: Context) -> Findings:
    recipe = context.recipe
    if recipe.train.strategy != "fsdp":
        return
    reason = "ranks add up in an order of their own, so strategy fsdp cannot keep it"
    for path, is_asked in (
        ("run.deterministic", recipe.run.deterministic),
        ("infer.zero_mismatch", recipe.infer.zero_mismatch),
    ):
        if is_asked:
            yield context.problem(path, reason, "use train.strategy=local, or remove it")


@rule("train.strategy", "train.parallel", "devices", "cluster.backend", "weights.channel")
def _fsdp_has_its_surroundings(context: Context) -> Findings:
    recipe, policy = context.recipe, _policy(context)
    if recipe.train.strategy != "fsdp" or not policy:
        return
    if len(policy) > 1 and recipe.cluster.backend == "inline":
        message = f"the {len(policy)} ranks of devices.policy need processes of their own"
        fix = "use cluster.backend=ray, or one device"
        yield context.problem("cluster.backend", message, fix)
    if len(policy) > 1 and recipe.weights.channel == "cuda_ipc":
        message = "cuda_ipc maps whole weights, and no rank of a sharded learner has them"
        yield context.problem("weights.channel", message, "use auto")
    if recipe.train.parallel.offload and policy[0].kind == "cpu":
        message = "true has no effect: the policy is on the CPU already"
        yield context.problem("train.parallel.offload", message, "remove it")


@rule("train.strategy", "devices", "pipeline", "algorithm", "data.domains")
def _a_critic_has_one_device(context: Context) -> Findings:
    """It is not sharded; without devices of its own it would get all of the policy's."""
    recipe, policy = context.recipe, _policy(context)
    if recipe.train.strategy == "local" or recipe.devices.critic is not None:
        return
    if recipe.needs("values") and len(policy) > 1:
        message = f"a critic trains on one device, and the policy's {len(policy)} are its default"
        yield context.problem("devices.critic", message, f"give it one, such as {policy[0]}")


def _policy(context: Context) -> Sequence[Device]:
    try:
        return parse_devices(context.recipe.devices.policy)
    except ConfigError:
        return ()
