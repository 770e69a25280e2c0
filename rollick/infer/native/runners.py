"""Which runner an engine has: pages and graphs on a GPU, slots everywhere else."""

from __future__ import annotations

from typing import Any

from torch import nn

from rollick.config.schema import InferConfig
from rollick.errors import EngineError
from rollick.infer.native.endings import Stops
from rollick.infer.native.gpu.forward import Ways
from rollick.infer.native.gpu.runner import PagedRunner
from rollick.infer.native.runner import Runner
from rollick.models.attention import other_layers
from rollick.models.cached_attention import CACHED
from rollick.models.fused import fuse_storage

AnyRunner = Runner | PagedRunner


def runner_for(
    module: nn.Module,
    infer: InferConfig,
    *,
    device: str,
    deterministic: bool,
    shared: bool,
    stops: Stops,
    version: int,
) -> AnyRunner:
    """`shared` parameters belong to a learner, which lays them out before it shares them."""
    _check_module(module)
    if deterministic or not device.startswith("cuda"):
        return Runner(
            module, infer, device=device, deterministic=deterministic, stops=stops, version=version
        )
    if not shared:
        fuse_storage(module)
    ways = Ways.zero_mismatch() if infer.zero_mismatch else Ways()
    return PagedRunner(module, infer, device=device, stops=stops, version=version, ways=ways)


def _check_module(module: nn.Module) -> None:
    config: Any = module.config
    if kinds := other_layers(config):
        raise EngineError(
            f"{type(module).__name__} has layers of kind {kinds}, which the native "
            "engine's cache does not hold",
            fix="use another engine for this model",
        )
    if config._attn_implementation != CACHED:
        raise EngineError(
            f"the module was built with attention {config._attn_implementation!r}",
            fix=f"build it with attention={CACHED!r}",
        )
