"""Expert parallel: each rank holds some experts of every mixture, and rows travel to them.

    row -> router -> (row, expert) pairs -- all to all --> the expert's rank -> expert
        <- weighed and summed <------------ all to all ---

Works on the experts module of transformers: parameters with one expert after another along their
first axis, called with (rows, chosen experts, weights). The router stays on every rank.

Legend: n rows of this rank, k experts of a row, P = n * k pairs, D hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rollick.errors import ModelError
from rollick.train.parallel.exchange import trade_rows


def expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that hold the experts of a mixture, one after another in their parameters."""
    for part in model.modules():
        count = getattr(part, "num_experts", None)
        own = list(part.parameters(recurse=False))
        if isinstance(count, int) and own and all(p.ndim == 3 and len(p) == count for p in own):
            yield part


def cut_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of the mesh its experts, in place; returns their modules.

    The parameters have no memory yet.
    """
    found = list(expert_modules(model))
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no experts that ranks could divide",
            fix="use train.parallel.expert=1",
        )
    for part in found:
        _cut(part, mesh)
    return found


def _cut(part: Any, mesh: DeviceMesh) -> None:
    ranks, experts = mesh.size(), int(part.num_experts)
    if experts % ranks:
        raise ModelError(
            f"train.parallel.expert={ranks} does not divide the model's {experts} experts",
            fix="use a divisor of the number of experts",
        )
    for name, parameter in list(part.named_parameters(recurse=False)):
        local = parameter.detach()[: experts // ranks]
        cut = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        part.register_parameter(name, nn.Parameter(cut))
    part.num_experts = experts // ranks
    part.forward = _Traded(part, mesh, part.forward)


class _Traded:
    """The forward of an experts module whose experts are on several ranks."""

    def __init__(self, part: Any, mesh: DeviceMesh, forward: Any) -> None:
        self.part = part
        self.group = mesh.get_group()
        self.ranks = mesh.size()
        self.forward = forward

    def __call__(
        self, rows_nD: torch.Tensor, chosen_nk: torch.Tensor, weights_nk: torch.Tensor
    ) -> torch.Tensor:
        here = self.part.num_experts
        chosen_P = chosen_nk.flatten()
        order_P = chosen_P.argsort(stable=True)
        pairs_PD = rows_nD.repeat_interleave(chosen_nk.shape[1], dim=0)[order_P]
        sent, received = self._counts(chosen_P // here)
        came_QD = trade_rows(pairs_PD, sent=sent, received=received, group=self.group)
        with torch.no_grad():
            expert_Q = trade_rows(
                (chosen_P[order_P] % here)[:, None], sent=sent, received=received, group=self.group
            )
        done_QD = self._compute(came_QD, expert_Q)
        back_PD = trade_rows(done_QD, sent=received, received=sent, group=self.group)
        pairs_nkD = back_PD[order_P.argsort()].unflatten(0, chosen_nk.shape)
        return (pairs_nkD * weights_nk[..., None]).sum(1).to(rows_nD.dtype)

    def _counts(self, rank_P: torch.Tensor) -> tuple[list[int], list[int]]:
        """Pairs that go to each rank, and that come from each."""
        sent = torch.bincount(rank_P, minlength=self.ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return sent.tolist(), received.tolist()

    def _compute(self, came_QD: torch.Tensor, expert_Q: torch.Tensor) -> torch.Tensor:
        """What the experts here make of the rows. A row of zeros is added and dropped: a rank
        that no row came to has a gradient (of zeros) too, as its partners expect."""
        rows_QD = torch.cat([came_QD, came_QD.new_zeros(1, came_QD.shape[1])])
        chosen_Q1 = torch.cat([expert_Q, expert_Q.new_zeros(1, 1)])
        weights_Q1 = torch.ones_like(chosen_Q1, dtype=rows_QD.dtype)
        with _local_parameters(self.part):
            return self.forward(rows_QD, chosen_Q1, weights_Q1)[:-1]


@contextmanager
def _local_parameters(part: nn.Module) -> Generator[None]:
    """Inside, the parameters of a module are plain tensors: the experts of this rank."""
    held = {n: p for n, p in part.named_parameters(recurse=False) if isinstance(p, DTensor)}
    for name, parameter in held.items():
        del part._parameters[name]  # pyright: ignore[reportPrivateUsage]
        object.__setattr__(part, name, parameter.to_local())
    try:
        yield
    finally:
        for name, parameter in held.items():
            object.__delattr__(part, name)
            part._parameters[name] = parameter  # pyright: ignore
