"""Tensor parallelism: applies a model's tensor-parallel plan with torch's `parallelize_module`.

The plan of a transformers model names the style of each linear layer: "colwise" (by output
features, so that each rank has some heads) or "rowwise" (by input features; outputs are summed).
It does not apply to the vocabulary matrices: they are sharded over all ranks, and the rows that
need the head are divided (rank_forward.py). `expert` shards the experts of a mixture.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from rollick.errors import ModelError

SUMMED = "replicated_with_grad_allreduce"
"""Style of small parameters that each rank uses for its own heads: gradients are partial."""

NOT_SPLIT = frozenset(
    {
        "colwise_gather_output",
        "embedding_rowwise",
        "packed_colwise",
        "packed_rowwise",
        "moe_tp_experts",
        "grouped_gemm",
        "ep_router",
        "ep_dispatch_experts",
    }
)
"""Styles of the vocabulary matrices and of experts, which are sharded without the plan."""


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Style by pattern of module names in the full model."""
    base: Any = model.base_model
    prefix = f"{model.base_model_prefix}." if base is not model else ""  # pyright: ignore
    config: Any = model.config
    base_plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not base_plan:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan",
            fix="use train.parallel.tensor=1 and shard with data or context",
        )
    return {f"{prefix}{pattern}": style for pattern, style in base_plan.items()}


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The plan's style of a module or parameter; `*` in a pattern matches a number."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the linear layers over the mesh in place. Parameters may be meta tensors."""
    _check_divisible(model, mesh.size())
    plan = tensor_plan(model)
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        style = style_of(name, plan)
        if isinstance(module, nn.Linear) and style is not None and style not in NOT_SPLIT:
            styles[name] = _parallel_style(style, name)
    parallelize_module(model, mesh, styles, src_data_rank=None)


def _check_divisible(model: nn.Module, ranks: int) -> None:
    """Raise unless the ranks divide the attention heads evenly."""
    model_config: Any = model.config
    config: Any = model_config.get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    for name, size in (("attention heads", heads), ("key-value heads", kv_heads)):
        if size % ranks:
            raise ModelError(
                f"train.parallel.tensor={ranks} does not divide the model's {size} {name}",
                fix="use a divisor of both, or shard with data or context",
            )


def _parallel_style(style: str, name: str) -> ParallelStyle:
    if style in ("colwise", "rowwise"):
        return ColwiseParallel() if style == "colwise" else RowwiseParallel()
    raise ModelError(
        f"the model's plan shards {name} as {style!r}, which is not supported",
        fix="use train.parallel.tensor=1 and shard with data or context",
    )


def summed_parameters(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Replicated parameters with a partial gradient on each rank of `tensor`."""
    plan = tensor_plan(model)
    return {name for name in names if style_of(name.rpartition(".")[0], plan) == SUMMED}
