"""Expert parallelism: each rank holds some experts of every mixture; rows are sent to them.

    row -> router -> (row, expert) pairs -- all-to-all --> the expert's rank -> expert
        <- weighted and summed <------------ all-to-all ---

Works on the experts module of transformers: parameters whose first axis is the expert, called with
(rows, chosen experts, weights). The router is on every rank.

Legend: n rows of this rank, k experts of a row, P = n * k pairs, Q pairs received, D hidden size.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rollick.errors import ModelError
from rollick.trainer.parallel.collectives import exchange_rows


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Shard the experts over the mesh, in place; returns their modules. The parameters are
    meta tensors."""
    modules = [module for module in model.modules() if _has_stacked_experts(module)]
    if not modules:
        kind = type(model).__name__
        raise ModelError(f"{kind} has no experts to shard", fix="use train.parallel.expert=1")
    for module in modules:
        _shard_module(module, mesh)
    return modules


def _has_stacked_experts(module: nn.Module) -> bool:
    """Whether the first axis of all its parameters is the expert."""
    count = getattr(module, "num_experts", None)
    tensors = list(module.parameters(recurse=False))
    return (
        isinstance(count, int)
        and bool(tensors)
        and all(p.ndim == 3 and len(p) == count for p in tensors)
    )


def _shard_module(module: Any, mesh: DeviceMesh) -> None:
    ranks, experts = mesh.size(), int(module.num_experts)
    if experts % ranks:
        raise ModelError(
            f"train.parallel.expert={ranks} does not divide the model's {experts} experts",
            fix="use a divisor of the number of experts",
        )
    for name, parameter in list(module.named_parameters(recurse=False)):
        local = parameter.detach()[: experts // ranks]
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        module.register_parameter(name, nn.Parameter(sharded))
    module.num_experts = experts // ranks
    module.forward = _ExpertParallelForward(module, mesh, module.forward)


class _ExpertParallelForward:
    """The forward of an experts module whose experts are on several ranks."""

    def __init__(self, module: Any, mesh: DeviceMesh, forward: Any) -> None:
        self.module = module
        self.group = mesh.get_group()
        self.ranks = mesh.size()
        self.forward = forward

    def __call__(self, rows_nD: Tensor, chosen_nk: Tensor, weights_nk: Tensor) -> Tensor:
        num_local = self.module.num_experts
        chosen_P = chosen_nk.flatten()
        order_P = chosen_P.argsort(stable=True)
        pairs_PD = rows_nD.repeat_interleave(chosen_nk.shape[1], dim=0)[order_P]
        sent, received = self._exchange_counts(chosen_P // num_local)
        exchange = partial(exchange_rows, sent=sent, received=received, group=self.group)
        received_QD = exchange(pairs_PD)
        with torch.no_grad():
            expert_Q = exchange((chosen_P[order_P] % num_local)[:, None])
        output_QD = self._run_experts(received_QD, expert_Q)
        returned_PD = exchange_rows(output_QD, sent=received, received=sent, group=self.group)
        output_nkD = returned_PD[order_P.argsort()].unflatten(0, chosen_nk.shape)
        return (output_nkD * weights_nk[..., None]).sum(1).to(rows_nD.dtype)

    def _exchange_counts(self, rank_P: Tensor) -> tuple[list[int], list[int]]:
        """(pairs to send to each rank, pairs to receive from each)."""
        sent = torch.bincount(rank_P, minlength=self.ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return sent.tolist(), received.tolist()

    def _run_experts(self, received_QD: Tensor, expert_Q: Tensor) -> Tensor:
        """Run the experts on this rank. A row of zeros is appended and dropped, so that a rank
        without rows also has a gradient (of zeros), as the collectives expect."""
        rows_QD = torch.cat([received_QD, received_QD.new_zeros(1, received_QD.shape[1])])
        chosen_Q1 = torch.cat([expert_Q, expert_Q.new_zeros(1, 1)])
        weights_Q1 = torch.ones_like(chosen_Q1, dtype=rows_QD.dtype)
        with _local_parameters(self.module):
            return self.forward(rows_QD, chosen_Q1, weights_Q1)[:-1]


@contextmanager
def _local_parameters(module: nn.Module) -> Generator[None]:
    """Inside the context, the parameters are local tensors: the experts of this rank."""
    sharded = {n: p for n, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    for name, parameter in sharded.items():
        del module._parameters[name]  # pyright: ignore[reportPrivateUsage]
        object.__setattr__(module, name, parameter.to_local())
    try:
        yield
    finally:
        for name, parameter in sharded.items():
            object.__delattr__(module, name)
            module._parameters[name] = parameter  # pyright: ignore
