"""A model whose parameters are spread over ranks: built without memory, cut, then filled.

    tree without memory -> experts cut -> layers cut (tensor) -> fully_shard -> memory -> values

Only the first rank reads the model's files. Values travel one parameter at a time, and each rank
keeps its part, so no rank but the first ever holds more than its share and one parameter. The
parameters are float32 masters; what is computed with is gathered in the compute dtype.

Groups that are gathered together: each layer (its experts apart, where ranks divide them), the last
norm, and the vocabulary matrices with what else is outside the layers. These last ones are sharded
over all ranks, those of `tensor` too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from rollick.config.schema import ModelConfig, ParallelConfig
from rollick.errors import ModelError
from rollick.models.attention import VARLEN
from rollick.models.load import empty_model, load_model
from rollick.train.body import refuse_unpackable
from rollick.train.parallel.exchange import gather_rows, scaled_gradient
from rollick.train.parallel.expert import cut_experts
from rollick.train.parallel.mesh import Grid
from rollick.train.parallel.tensor import cut_layers


@dataclass(frozen=True, slots=True)
class Precision:
    """What parameters are kept in, and what is computed with."""

    master: torch.dtype
    compute: torch.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.master is self.compute:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.master)


def build_tree(
    config: ModelConfig, grid: Grid, *, parallel: ParallelConfig, master: torch.dtype
) -> tuple[nn.Module, list[nn.Module]]:
    """The module tree without memory, cut over `expert` and `tensor`, and the experts' modules if
    ranks divide these."""
    refuse_unpackable(config)
    tree: Any = empty_model(config, attention=VARLEN).to(master)
    if master is torch.float64:
        # The kernel for all experts at once has no float64.
        tree.set_experts_implementation("eager")
    experts = cut_experts(tree, grid.experts) if grid.shape.expert > 1 else []
    if grid.shape.tensor > 1:
        cut_layers(tree, grid.tensors)
        tree.get_input_embeddings().register_forward_hook(
            partial(_shared_by_all, ranks=grid.shape.tensor)
        )
    if parallel.recompute:
        for layer in layers_of(tree):
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
    return tree, experts


def layers_of(tree: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, in order."""
    found = getattr(tree.base_model, "layers", None)
    if not isinstance(found, nn.ModuleList):
        raise ModelError(
            f"{type(tree).__name__} does not keep its layers as a list named layers",
            fix="use train.strategy=local",
        )
    return list(found)


def shard(
    root: nn.Module,
    tree: nn.Module,
    experts: list[nn.Module],
    *,
    grid: Grid,
    precision: Precision,
    offload: bool,
) -> None:
    """Shard the parameters of the tree, in place; `root` is the module that is called."""
    pinned = grid.whole.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()

    def over(part: nn.Module, mesh: DeviceMesh, *, keep: bool = False) -> None:
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=not keep,
            mp_policy=precision.policy,
            offload_policy=policy,
        )

    for part in experts:
        over(part, grid.expert_shards)
    for part in layers_of(tree):
        over(part, grid.shards)
    last_norm: Any = getattr(tree.base_model, "norm", None)
    if grid.shape.tensor > 1 and isinstance(last_norm, nn.Module):
        over(last_norm, grid.shards)
    over(root, grid.all, keep=True)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # A batch's weights are global: gradients add up. Gloo knows sums only.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # From torch 2.13 on. Before, each rank must use every parameter: so it does, with one
            # row at least, where the experts of a layer are one parameter.
            if hasattr(part, "set_reduce_scatter_unused_params"):
                part.set_reduce_scatter_unused_params(True, recurse=False)


def fill(tree: nn.Module, config: ModelConfig, *, grid: Grid, device: str, offload: bool) -> None:
    """Give the tree memory, and the values of the model's files."""
    tree.to_empty(device="cpu" if offload else device)
    if offload:
        _move_buffers(tree, device)
    source: Any = None
    if grid.rank == 0:
        source = load_model(config, device="cpu", attention=VARLEN)
        kept: Any = tree
        kept._weight_conversions = getattr(source, "_weight_conversions", None)
    parameters = dict(source.named_parameters()) if source else {}
    with torch.no_grad():
        for name, parameter in tree.named_parameters():
            whole = _from_first(parameters.get(name), parameter, device)
            local_of(parameter).copy_(cut_out(whole, parameter))
        held = dict(source.named_buffers()) if source else {}
        for name, buffer in tree.named_buffers():
            buffer.copy_(_from_first(held.get(name), buffer, device))


def _move_buffers(tree: nn.Module, device: str) -> None:
    """They are computed with where they lie: only parameters are fetched when they are needed."""
    for part in tree.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def _from_first(value: torch.Tensor | None, like: torch.Tensor, device: str) -> torch.Tensor:
    """What the first rank has, on all ranks."""
    shape, dtype = like.shape, like.dtype
    if value is None:
        whole = torch.empty(shape, dtype=dtype, device=device)
    else:
        whole = value.detach().to(device, dtype).contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(whole, src=0)
    return whole


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter (or of its gradient) that this rank holds, over its memory."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def cut_out(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank holds of a parameter of that shape."""
    for cut in _cuts(parameter):
        parts = whole.split(cut.sizes, dim=cut.dim)
        whole = parts[cut.own]
    return whole


@torch.no_grad()
def put_together(value: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter or gradient, on all ranks that hold a part of it; they must ask
    together."""
    part = local_of(value)
    for cut in reversed(_cuts(value)):
        rows = part.movedim(cut.dim, 0).contiguous()
        part = gather_rows(rows, cut.sizes, cut.group).movedim(0, cut.dim)
    return part


class _Cut(NamedTuple):
    """One way in which a tensor is spread: along a dimension, over the ranks of an axis."""

    dim: int
    sizes: list[int]
    own: int
    group: Any


def _cuts(parameter: torch.Tensor) -> list[_Cut]:
    """In the order in which they were made: over `tensor` or `expert`, and then what is left over
    shards."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, place = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert place is not None
    shape = list(parameter.shape)
    found: list[_Cut] = []
    for axis in reversed(range(mesh.ndim)):
        placement: Any = parameter.placements[axis]
        if isinstance(placement, Replicate):
            continue
        sizes = _chunks(shape[placement.dim], mesh.size(axis))
        found.append(_Cut(placement.dim, sizes, place[axis], mesh.get_group(axis)))
        shape[placement.dim] = sizes[place[axis]]
    return found


def _chunks(size: int, parts: int) -> list[int]:
    """As torch cuts: equal parts from the first on, the last ones smaller or empty."""
    each = -(-size // parts)
    return [max(0, min(each, size - each * part)) for part in range(parts)]


def holders(parameter: torch.Tensor) -> int:
    """Ranks that hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return dist.get_world_size()
    sharded = [
        parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if not isinstance(placement, Replicate)
    ]
    spread = 1
    for size in sharded:
        spread *= size
    return dist.get_world_size() // spread


def whole_tensors(
    named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor whole, one at a time. All ranks must go through it together."""
    for name, value in named:
        yield name, put_together(value).to(dtype)


def _shared_by_all(_: nn.Module, __: Any, rows: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """Ranks of `tensor` look up the same rows, and their gradients are added up: each counts a
    part."""
    return scaled_gradient(rows, 1 / ranks)
