"""Rules about the engine that generates: what it cannot do, and whose options have no effect."""

from __future__ import annotations

from rollick.config.devices import Device, parse_devices
from rollick.config.rules import Context, Findings, rule
from rollick.config.schema import InferConfig, VllmConfig
from rollick.errors import ConfigError
from rollick.types import ROLES

OWN_DEVICES = "give the generators devices of their own, or use infer.engine=native"


@rule("infer.engine", "infer.vllm")
def _options_of_an_engine_are_used(context: Context) -> Findings:
    infer = context.recipe.infer
    if infer.engine == "native" and infer.vllm != VllmConfig():
        message = "has no effect: the engine is native"
        yield context.problem("infer.vllm", message, "set infer.engine=vllm, or remove it")


@rule("infer.zero_mismatch", "infer.engine", "devices")
def _zero_mismatch_has_its_kernels(context: Context) -> Findings:
    infer = context.recipe.infer
    if not infer.zero_mismatch:
        return
    if infer.engine != "native":
        message = f"needs the native engine, not {infer.engine}"
        yield context.problem("infer.zero_mismatch", message, "use infer.engine=native")
    elif any(
        device.kind == "cpu"
        for role in ("policy", "generators")
        for device in _devices_of(context, role)
    ):
        message = "has kernels for GPUs only"
        yield context.problem("infer.zero_mismatch", message, "use run.deterministic on the CPU")


@rule("infer.engine", "devices")
def _vllm_has_its_devices_for_itself(context: Context) -> Findings:
    """It lives in processes of its own: it cannot use a learner's parameters, and on the CPU it
    cannot sleep while somebody else works."""
    if context.recipe.infer.engine != "vllm":
        return
    generators = _devices_of(context, "generators")
    for role in ROLES:
        common = sorted(set(generators) & set(_devices_of(context, role)))
        if role == "generators" or not common:
            continue
        if role == "policy":
            message = f"vllm cannot share the parameters of the policy, which is on {common[0]} too"
            yield context.problem("infer.engine", message, OWN_DEVICES)
        elif common[0].kind == "cpu":
            message = f"vllm cannot sleep on the CPU, and the {role} is on {common[0]} too"
            yield context.problem("infer.engine", message, OWN_DEVICES)


@rule("infer.engine", "infer.vllm", "devices")
def _options_of_vllm_suit_its_devices(context: Context) -> Findings:
    infer = context.recipe.infer
    if infer.engine != "vllm":
        return
    on_cpu = any(device.kind == "cpu" for device in _devices_of(context, "generators"))
    share = infer.vllm.gpu_memory_utilization
    if on_cpu and share != VllmConfig().gpu_memory_utilization:
        message = f"{share:g} has no effect on the CPU"
        yield context.problem("infer.vllm.gpu_memory_utilization", message, "use kv_cache_gb")
    if not on_cpu and _is_spread(infer):
        message = f"{infer.vllm.tensor_parallel} needs more GPUs than the one that a generator has"
        fix = "use 1; a wider engine works with VllmEngine.create, outside of a recipe"
        yield context.problem("infer.vllm.tensor_parallel", message, fix)


def _is_spread(infer: InferConfig) -> bool:
    return infer.vllm.tensor_parallel > 1


def _devices_of(context: Context, role: str) -> tuple[Device, ...]:
    """Those that the recipe names; wrong ones are another rule's problem."""
    text = getattr(context.recipe.devices, role, None)
    try:
        return parse_devices(text) if text else ()
    except ConfigError:
        return ()
