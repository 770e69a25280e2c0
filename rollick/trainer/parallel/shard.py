"""A model whose parameters are sharded over ranks, and its optimizer.

    module on the meta device -> experts sharded (expert) -> layers sharded (tensor) ->
    fully_shard -> allocate -> copy values

Only the first rank reads the model's files. It broadcasts one parameter at a time, so the other
ranks need memory for their shards and one parameter. Parameters are float32 masters, gathered in
the compute dtype.

FSDP gathers together: each layer (its experts separately, if `expert` shards them), the last norm,
and everything else, including the vocabulary matrices. This last group is sharded over all
ranks, including those of `tensor`.

    gradients, reduce-scattered by FSDP -> summed over `tensor` where needed -> norm over all ranks
    -> AdamW on the shards, in place
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

from rollick.config.schema import ParallelConfig
from rollick.errors import ModelError, RollickError
from rollick.trainer.optimizer import MasterAdamW, TotalNorm
from rollick.trainer.parallel.collectives import all_sum, gather_rows
from rollick.trainer.parallel.expert import shard_experts
from rollick.trainer.parallel.mesh import Grid
from rollick.trainer.parallel.tensor import shard_layers, summed_parameters
from rollick.trainer.strategy import OptimReport

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]], TotalNorm], MasterAdamW]
"""Makes the optimizer of named parameters; the function computes the norm over all ranks."""


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


def shard_model(
    model: nn.Module, grid: Grid, *, parallel: ParallelConfig, master: torch.dtype
) -> list[nn.Module]:
    """Shard a model on the meta device over `expert` and `tensor`, in place. Returns the modules of
    sharded experts."""
    module: Any = model
    if master is torch.float64:
        # The fused experts kernel does not support float64.
        module.set_experts_implementation("eager")
    experts = shard_experts(model, grid.expert_mesh) if grid.shape.expert > 1 else []
    if grid.shape.tensor > 1:
        shard_layers(model, grid.tensor_mesh)
        module.get_input_embeddings().register_forward_hook(
            partial(_divide_gradient, ranks=grid.shape.tensor)
        )
    if parallel.recompute:
        run_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        for layer in layers_of(model):
            layer.forward = partial(run_checkpointed, layer.forward)
    return experts


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a decoder, in order."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        kind = type(model).__name__
        raise ModelError(f"{kind} has no ModuleList named layers", fix="use train.strategy=local")
    return list(layers)


def shard(
    root: nn.Module,
    model: nn.Module,
    experts: list[nn.Module],
    *,
    grid: Grid,
    precision: Precision,
    offload: bool,
) -> None:
    """Shard the parameters of the model, in place; `root` is the module to call."""
    offload_policy = _offload_policy(grid, offload=offload)
    shard_module = partial(fully_shard, mp_policy=precision.policy, offload_policy=offload_policy)
    for module in experts:
        shard_module(module, mesh=grid.expert_shard_mesh, reshard_after_forward=True)
    for module in layers_of(model):
        shard_module(module, mesh=grid.shard_mesh, reshard_after_forward=True)
    last_norm: Any = getattr(model.base_model, "norm", None)
    if grid.shape.tensor > 1 and isinstance(last_norm, nn.Module):
        shard_module(last_norm, mesh=grid.shard_mesh, reshard_after_forward=True)
    shard_module(root, mesh=grid.world_mesh, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # A batch's weights are global, so gradients are summed; gloo only supports sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # From torch 2.13 on. Before, each rank must use every parameter, which it does: it has
            # at least one row, and the experts of a layer are one parameter.
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)


def shard_in_master_dtype(module: nn.Module, grid: Grid, *, offload: bool) -> None:
    """Shard a small module that computes in the dtype of its masters. Call it before `shard`."""
    fully_shard(module, mesh=grid.world_mesh, offload_policy=_offload_policy(grid, offload=offload))


def _offload_policy(grid: Grid, *, offload: bool) -> OffloadPolicy:
    if not offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=grid.mesh.device_type == "cuda")


def load_on_first_rank(load: Callable[[], nn.Module], grid: Grid) -> nn.Module | None:
    """Load the complete model on the first rank; returns None on others. If the load fails, all
    ranks raise: the others would otherwise wait for its parameters."""
    model: nn.Module | None = None
    load_error: list[RollickError | None] = [None]
    if grid.rank == 0:
        try:
            model = load()
        except RollickError as error:
            load_error = [error]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(load_error, src=0)
    if load_error[0] is not None:
        raise load_error[0]
    return model


def load_shards(model: nn.Module, source: nn.Module | None, *, device: str, offload: bool) -> None:
    """Allocate the shards, and fill them from the model on the first rank."""
    model.to_empty(device="cpu" if offload else device)
    if offload:
        # FSDP's offload moves parameters to the device when needed, but not buffers.
        for module in model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
    if source is not None:
        target: Any = model
        target._weight_conversions = getattr(source, "_weight_conversions", None)
    parameters = dict(source.named_parameters()) if source else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = _broadcast_from_first(parameters.get(name), parameter, device)
            for split in _splits(parameter):
                full = full.split(split.sizes, dim=split.dim)[split.rank]
            local_tensor(parameter).copy_(full)
        buffers = dict(source.named_buffers()) if source else {}
        for name, buffer in model.named_buffers():
            buffer.copy_(_broadcast_from_first(buffers.get(name), buffer, device))


def _broadcast_from_first(value: Tensor | None, like: Tensor, device: str) -> Tensor:
    """Broadcast the first rank's value to all ranks."""
    tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
    if value is not None:
        tensor = value.detach().to(device, like.dtype).contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=0)
    return tensor


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter or gradient, without a copy."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def shard_like(parameter: Tensor, local: Tensor) -> Tensor:
    """A tensor sharded like the parameter; `local` is this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    # `from_local` would copy an offloaded tensor to the mesh's device, and a load would fill only
    # the copy.
    spec: Any = parameter._spec  # pyright: ignore[reportPrivateUsage]
    return DTensor(local, spec, requires_grad=False)


class _Split(NamedTuple):
    """How one axis of the mesh divides one dimension of a tensor."""

    dim: int
    sizes: list[int]
    rank: int
    """This rank's index on the axis: which of the sizes it has."""
    group: Any


def _splits(parameter: Tensor) -> list[_Split]:
    """In the order in which they apply: over `tensor` or `expert`, then over FSDP's shards."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    shape = list(parameter.shape)
    splits: list[_Split] = []
    for axis in reversed(range(mesh.ndim)):
        placement: Any = parameter.placements[axis]
        if isinstance(placement, Replicate):
            continue
        sizes = _chunk_sizes(shape[placement.dim], mesh.size(axis))
        splits.append(_Split(placement.dim, sizes, coordinates[axis], mesh.get_group(axis)))
        shape[placement.dim] = sizes[coordinates[axis]]
    return splits


def _chunk_sizes(size: int, parts: int) -> list[int]:
    """Sizes of the parts, as DTensor divides a dimension; the last ones can be smaller or empty."""
    largest = -(-size // parts)
    return [max(0, min(largest, size - largest * part)) for part in range(parts)]


def replica_count(parameter: Tensor) -> int:
    """The number of ranks with the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return dist.get_world_size()
    return dist.get_world_size() // prod(len(split.sizes) for split in _splits(parameter))


def gather_full_tensors(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Each full parameter or gradient, one at a time. A collective: all ranks must iterate."""
    for name, value in named:
        tensor = local_tensor(value)
        for split in reversed(_splits(value)):
            with torch.no_grad():
                rows = tensor.movedim(split.dim, 0).contiguous()
                tensor = gather_rows(rows, split.sizes, split.group).movedim(0, split.dim)
        yield name, tensor.to(dtype)


def _divide_gradient(_: nn.Module, __: Any, rows: Tensor, *, ranks: int) -> None:
    """Scale the gradient by 1 / ranks: the ranks of `tensor` look up the same embeddings, and their
    gradients are summed."""
    if rows.requires_grad:
        rows.register_hook(partial(torch.mul, other=1 / ranks))


class ShardedOptimizer:
    """Updates a sharded model: each rank updates its shards in place. All ranks must make the same
    calls."""

    def __init__(
        self, model: nn.Module, make_optimizer: MakeOptimizer, *, grid: Grid, device: str
    ) -> None:
        self.grid = grid
        self.device = device
        self.parameters = dict(model.named_parameters())
        uses_tensor_axis = grid.shape.tensor > 1
        self._summed = summed_parameters(model, self.parameters) if uses_tensor_axis else set[str]()
        named = self.parameters.items()
        shards = ((name, nn.Parameter(local_tensor(parameter))) for name, parameter in named)
        self.local_optimizer = make_optimizer(shards, self._total_norm)
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
        """Continue after this many steps; the tensors of `state` have been loaded."""
        self.local_optimizer.steps = steps
        for moments in self.local_optimizer.adamw.state.values():
            moments["step"].fill_(steps)
        self.drop_gradients()

    @torch.no_grad()
    def gradient(self, name: str) -> Tensor | None:
        """This rank's shard of a parameter's gradient.

        Each rank of `tensor` has the full gradient of a replicated parameter, which is averaged to
        be bitwise equal. If each uses the parameter for its own heads, the gradients are summed.
        """
        parameter, ranks = self.parameters[name], self.grid.shape.tensor
        if parameter.grad is None:
            return None
        gradient = local_tensor(parameter.grad)
        if ranks == 1 or replica_count(parameter) == 1:
            return gradient
        gradient = all_sum(gradient.clone(), self.grid.tensor_mesh.get_group())
        return gradient if name in self._summed else gradient.div_(ranks)

    def _total_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm over all ranks; a shard that several ranks hold counts once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, gradient in gradients.items():
            square = gradient.double().square().sum() / replica_count(self.parameters[name])
            squares += square.to(self.device)
        dist.all_reduce(squares)
        # On the masters' device: they may be offloaded.
        master = next(iter(self.local_optimizer.masters.values()))
        return squares.sqrt().to(master.device, master.dtype)
