"""Tensor parallel: a model's own plan, read as data and applied with torch.

A model of transformers says of each linear layer how ranks may cut it ("colwise": by rows of its
matrix, so that each rank has some heads; "rowwise": by columns, after which the parts are summed).
Only these words are taken from it; the cutting is torch's `parallelize_module`, which composes with
fully_shard and with checkpoints.

The vocabulary matrices are not cut by a plan: they are sharded over all ranks, and the rows that
need the head are divided instead (see fsdp.py). The experts of a mixture are cut by `expert`.
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
"""Of small parameters that each rank uses for its own heads: their gradients are parts."""

LEFT_WHOLE = frozenset(
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
"""Words of a plan for the vocabulary and for experts, which are cut in another way here."""


def tensor_plan(model: nn.Module) -> dict[str, str]:
    """Pattern -> word, with the patterns as names under the whole model."""
    base: Any = model.base_model
    prefix = f"{model.base_model_prefix}." if base is not model else ""  # pyright: ignore
    config: Any = model.config
    inner: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not inner:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan",
            fix="use train.parallel.tensor=1 and shard with data or context",
        )
    return {f"{prefix}{pattern}": word for pattern, word in inner.items()}


def word_of(name: str, plan: Mapping[str, str]) -> str | None:
    """What the plan says of a module or a parameter; `*` in a pattern is a number."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def cut_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the linear layers over the mesh, in place. The parameters may have no memory yet."""
    _demand_divisible(model, mesh.size())
    plan = tensor_plan(model)
    styles: dict[str, ParallelStyle] = {}
    for name, part in model.named_modules():
        word = word_of(name, plan)
        if word is None or not isinstance(part, nn.Linear) or word in LEFT_WHOLE:
            continue
        styles[name] = _style(word, name)
    parallelize_module(model, mesh, styles, src_data_rank=None)


def _demand_divisible(model: nn.Module, ranks: int) -> None:
    """Each rank has whole heads."""
    whole: Any = model.config
    config: Any = whole.get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    for name, size in (("attention heads", heads), ("key-value heads", kv_heads)):
        if size % ranks:
            raise ModelError(
                f"train.parallel.tensor={ranks} does not divide the model's {size} {name}",
                fix="use a divisor of both, or shard with data or context",
            )


def _style(word: str, name: str) -> ParallelStyle:
    if word == "colwise":
        return ColwiseParallel()
    if word == "rowwise":
        return RowwiseParallel()
    raise ModelError(
        f"the model's plan cuts {name} as {word!r}, which is not built",
        fix="use train.parallel.tensor=1 and shard with data or context",
    )


def summed_parameters(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Whole parameters of which each rank of `tensor` has a part of the gradient only."""
    plan = tensor_plan(model)
    return {name for name in names if word_of(name.rpartition(".")[0], plan) == SUMMED}
