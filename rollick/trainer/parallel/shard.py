"""A model whose parameters are sharded over ranks: built on the meta device, sharded, filled,
updated.

    module on the meta device -> experts sharded (expert) -> layers sharded (tensor) ->
    fully_shard -> allocate -> copy values

Only the first rank reads the model's files. Parameters are broadcast one at a time, so no other
rank holds more than its share and one parameter. Parameters are float32 masters; they are gathered
in the compute dtype.

FSDP gathers as one group: each layer (its experts separately, if `expert` shards them), the last
norm, and the vocabulary matrices with everything else outside the layers. These last ones are
sharded over all ranks, including those of `tensor`.

    gradients (FSDP has summed them over shards) -> this rank's shard of each, summed over `tensor`
    where needed -> the norm over all ranks -> AdamW on the shards, in place
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from rollick.config.schema import ModelConfig, ParallelConfig, Recipe
from rollick.errors import ModelError, RollickError
from rollick.models.attention.varlen import VARLEN
from rollick.models.loading.load import empty_model
from rollick.trainer.parallel.collectives import all_sum, gather_rows
from rollick.trainer.parallel.expert import shard_experts
from rollick.trainer.parallel.mesh import Grid
from rollick.trainer.parallel.tensor import shard_layers, summed_parameters
from rollick.trainer.strategy import OptimReport
from rollick.trainer.trainable_model import check_packable, load_packed_model, policy_optimizer


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of parameters and of computation."""

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
    """The module on the meta device, sharded over `expert` and `tensor`, and the experts' modules
    if they are sharded."""
    check_packable(config)
    tree: Any = empty_model(config, attention=VARLEN).to(master)
    if master is torch.float64:
        # The fused experts kernel does not support float64.
        tree.set_experts_implementation("eager")
    experts = shard_experts(tree, grid.experts) if grid.shape.expert > 1 else []
    if grid.shape.tensor > 1:
        shard_layers(tree, grid.tensors)
        tree.get_input_embeddings().register_forward_hook(
            partial(_divide_gradient, ranks=grid.shape.tensor)
        )
    if parallel.recompute:
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in layers_of(tree):
            layer.forward = partial(recomputed, layer.forward)
    return tree, experts


def layers_of(tree: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, in order."""
    layers = getattr(tree.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        kind = type(tree).__name__
        raise ModelError(f"{kind} has no ModuleList named layers", fix="use train.strategy=local")
    return list(layers)


def shard(
    root: nn.Module,
    tree: nn.Module,
    experts: list[nn.Module],
    *,
    grid: Grid,
    precision: Precision,
    offload: bool,
) -> None:
    """Shard the parameters of the tree, in place; `root` is the module to call."""
    pinned = grid.mesh.device_type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()

    shard_module = partial(fully_shard, mp_policy=precision.policy, offload_policy=policy)
    for part in experts:
        shard_module(part, mesh=grid.expert_shards, reshard_after_forward=True)
    for part in layers_of(tree):
        shard_module(part, mesh=grid.shards, reshard_after_forward=True)
    last_norm: Any = getattr(tree.base_model, "norm", None)
    if grid.shape.tensor > 1 and isinstance(last_norm, nn.Module):
        shard_module(last_norm, mesh=grid.shards, reshard_after_forward=True)
    shard_module(root, mesh=grid.all, reshard_after_forward=False)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            # A batch's weights are global, so gradients are summed; gloo only supports sums.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            # From torch 2.13 on. Before, each rank must use every parameter, which it does: it has
            # at least one row, and the experts of a layer are one parameter.
            if hasattr(part, "set_reduce_scatter_unused_params"):
                part.set_reduce_scatter_unused_params(True, recurse=False)


def load_on_first_rank(config: ModelConfig, grid: Grid, *, max_length: int) -> nn.Module | None:
    """The complete model on the first rank, None on others. If it cannot be loaded, all ranks
    raise: the others would wait for its parameters."""
    source: nn.Module | None = None
    load_error: list[RollickError | None] = [None]
    if grid.rank == 0:
        try:
            source = load_packed_model(config, device="cpu", max_length=max_length)
        except RollickError as error:
            load_error = [error]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(load_error, src=0)
    if load_error[0] is not None:
        raise load_error[0]
    return source


def load_shards(tree: nn.Module, source: nn.Module | None, *, device: str, offload: bool) -> None:
    """Allocate the shards, and fill them from the model on the first rank."""
    tree.to_empty(device="cpu" if offload else device)
    if offload:
        # FSDP's offload moves parameters to the device when needed, but not buffers.
        for part in tree.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, buffer.to(device))
    if source is not None:
        kept: Any = tree
        kept._weight_conversions = getattr(source, "_weight_conversions", None)
    parameters = dict(source.named_parameters()) if source else {}
    with torch.no_grad():
        for name, parameter in tree.named_parameters():
            full = _broadcast_from_first(parameters.get(name), parameter, device)
            for cut in _cuts(parameter):
                full = full.split(cut.sizes, dim=cut.dim)[cut.own]
            local_tensor(parameter).copy_(full)
        buffers = dict(source.named_buffers()) if source else {}
        for name, buffer in tree.named_buffers():
            buffer.copy_(_broadcast_from_first(buffers.get(name), buffer, device))


def _broadcast_from_first(value: Tensor | None, like: Tensor, device: str) -> Tensor:
    """The first rank's value, on all ranks."""
    full = torch.empty(like.shape, dtype=like.dtype, device=device)
    if value is not None:
        full = value.detach().to(device, like.dtype).contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(full, src=0)
    return full


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter (or of its gradient), over its memory."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like the parameter; `local` is this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    # Not `from_local`: it would copy offloaded tensors to the mesh's device, and a load would
    # fill the copy.
    spec: Any = parameter._spec  # pyright: ignore[reportPrivateUsage]
    return DTensor(local, spec, requires_grad=False)


class _Cut(NamedTuple):
    """A tensor's division along one dimension, over the ranks of one axis."""

    dim: int
    sizes: list[int]
    own: int
    group: Any


def _cuts(parameter: Tensor) -> list[_Cut]:
    """In order: over `tensor` or `expert`, then over shards."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    shape = list(parameter.shape)
    cuts: list[_Cut] = []
    for axis in reversed(range(mesh.ndim)):
        placement: Any = parameter.placements[axis]
        if isinstance(placement, Replicate):
            continue
        sizes = _chunks(shape[placement.dim], mesh.size(axis))
        cuts.append(_Cut(placement.dim, sizes, coordinates[axis], mesh.get_group(axis)))
        shape[placement.dim] = sizes[coordinates[axis]]
    return cuts


def _chunks(size: int, parts: int) -> list[int]:
    """As torch divides: equal parts from the first on, the last ones smaller or empty."""
    each = -(-size // parts)
    return [max(0, min(each, size - each * part)) for part in range(parts)]


def replica_count(parameter: Tensor) -> int:
    """The number of ranks with the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return dist.get_world_size()
    return dist.get_world_size() // prod(len(cut.sizes) for cut in _cuts(parameter))


def gather_full_tensors(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Each full parameter or gradient, one at a time. A collective: all ranks must iterate."""
    for name, value in named:
        part = local_tensor(value)
        for cut in reversed(_cuts(value)):
            with torch.no_grad():
                rows = part.movedim(cut.dim, 0).contiguous()
                part = gather_rows(rows, cut.sizes, cut.group).movedim(0, cut.dim)
        yield name, part.to(dtype)


def _divide_gradient(_: nn.Module, __: Any, rows: Tensor, *, ranks: int) -> None:
    """Ranks of `tensor` look up the same rows and their gradients are summed: each adds a part."""
    if rows.requires_grad:
        rows.register_hook(partial(torch.mul, other=1 / ranks))


class ShardedOptimizer:
    """Updates the parameters of a sharded module: each rank its shards, which are the memory of the
    parameters. All ranks make the same calls."""

    def __init__(self, tree: nn.Module, recipe: Recipe, *, grid: Grid, device: str) -> None:
        self.grid = grid
        self.device = device
        self.parameters = dict(tree.named_parameters())
        divided = grid.shape.tensor > 1
        self._summed = summed_parameters(tree, self.parameters) if divided else set[str]()
        named = self.parameters.items()
        shards = ((name, nn.Parameter(local_tensor(value))) for name, value in named)
        self.local_optimizer = policy_optimizer(shards, recipe, total_norm=self._total_norm)
        # Allocated at the start, so that a checkpoint can be read into it.
        for master in self.local_optimizer.masters.values():
            self.local_optimizer.adamw.state[master] = {
                "step": torch.zeros((), device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self) -> OptimReport:
        """One update, clipped by the norm over all ranks; skipped by all ranks or none."""
        for name, master in self.local_optimizer.masters.items():
            master.grad = self.gradient(name)
        report = self.local_optimizer.step()
        self.drop_gradients()
        return report

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Masters and moments as sharded tensors over their live memory."""
        state: dict[str, Tensor] = {}
        for name, local in self.local_optimizer.tensors().items():
            kind, _, parameter = name.partition(".")
            if kind != "step":
                state[name] = shard_like(self.parameters[parameter].detach(), local)
        return state

    def resume(self, steps: int) -> None:
        """Continue after this many steps, with values read into the tensors of `state`."""
        self.local_optimizer.steps = steps
        for held in self.local_optimizer.adamw.state.values():
            held["step"].fill_(steps)
        self.drop_gradients()

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """This rank's shard of a parameter's gradient.

        Ranks of `tensor` have the full gradient of undivided parameters (averaged here, to be equal
        bit for bit), but only a part of it if each uses the parameter for its own heads.
        """
        parameter, ranks = self.parameters[name], self.grid.shape.tensor
        if parameter.grad is None:
            return None
        gradient = local_tensor(parameter.grad)
        if ranks == 1 or replica_count(parameter) == 1:
            return gradient
        gradient = all_sum(gradient.clone(), self.grid.tensors.get_group())
        return gradient if name in self._summed else gradient.div_(ranks)

    def _total_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Over all ranks; a shard that several of them hold counts once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            square = gradient.double().square().sum() / replica_count(self.parameters[name])
            squares += square.to(self.device)
        dist.all_reduce(squares)
        # On the masters' device: they may be offloaded.
        master = next(iter(self.local_optimizer.masters.values()))
        return squares.sqrt().to(master.device, master.dtype)
