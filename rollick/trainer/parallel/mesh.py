"""The ranks of a sharded learner: their rendezvous, and the device mesh.

Ranks form a grid of four axes, the last one fastest:

    expert x data x context x tensor

    tensor    ranks that divide the matrices of a layer
    context   ranks that divide the rows of a pack
    data      ranks with different samples
    expert    ranks with different samples that also divide the experts of a mixture
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollick.config.schema import ParallelConfig
from rollick.errors import ConfigError

AXES = ("expert", "data", "context", "tensor")

JOIN_TIMEOUT_S = 120.0
"""How long a rank waits for the others to join."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address of the store through which the ranks of a learner connect."""

    host: str
    port: int
    ranks: int
    timeout_s: float
    """How long a rank waits in one collective before it reports a lost rank."""


def open_rendezvous(host: str, *, ranks: int, timeout_s: float) -> tuple[Any, Rendezvous]:
    """Open a store, and return it with its address; it closes when it is no longer referenced. It
    listens on all interfaces and transfers addresses, not weights."""
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return store, Rendezvous(host, store.port, ranks, timeout_s)


def join_process_group(rendezvous: Rendezvous | None, rank: int, *, device: str) -> None:
    """Join torch's process group; None: create one with a single rank. A process joins once:
    a later learner with the same ranks reuses the group."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(torch.device(device).index or 0)
    if dist.is_initialized():
        return
    if rendezvous is None:
        store: Any = dist.HashStore()
        ranks, timeout_s = 1, JOIN_TIMEOUT_S
    else:
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
        ranks, timeout_s = rendezvous.ranks, rendezvous.timeout_s
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class GridShape:
    """The number of ranks of each axis."""

    expert: int
    data: int
    context: int
    tensor: int

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int) -> GridShape:
        """By default, `data` is `ranks` divided by the other factors."""
        data = parallel.data_of(ranks)
        if data * parallel.non_data_ranks != ranks:
            raise ConfigError(
                f"train.parallel makes {data} x {parallel.tensor} x {parallel.context} x "
                f"{parallel.expert} = {data * parallel.non_data_ranks} ranks "
                f"(data, tensor, context, expert), and the policy has {ranks} devices",
                fix="change a factor, or give devices.policy as many devices",
            )
        return cls(parallel.expert, data, parallel.context, parallel.tensor)

    @property
    def replicas(self) -> int:
        """Sets of ranks with different samples."""
        return self.expert * self.data

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that divide a micro-batch between them."""
        return self.context * self.tensor


class Grid:
    """The device mesh, and this process's coordinates on it."""

    def __init__(self, shape: GridShape, *, device: str) -> None:
        self.shape = shape
        device_type = "cuda" if device.startswith("cuda") else "cpu"
        self.mesh = init_device_mesh(device_type, astuple(shape), mesh_dim_names=AXES)
        self.rank = dist.get_rank()
        coordinates = self.mesh.get_coordinate()
        assert coordinates is not None, "every rank of the process group is on the mesh"
        self.expert, self.data, self.context, self.tensor = coordinates
        self.tensor_mesh = self.mesh["tensor"]
        self.context_mesh = self.mesh["context"]
        self.expert_mesh = self.mesh["expert"]
        self.replica_mesh = self._flatten("expert", "data")
        self.rank_mesh = self._flatten("context", "tensor")
        """The ranks of this rank's replica."""
        self.shard_mesh = self._flatten("expert", "data", "context")
        """Ranks over which FSDP shards the parameters of a layer."""
        self.expert_shard_mesh = self._flatten("data", "context")
        """The same for experts, which are first divided over the `expert` axis."""
        self.world_mesh = self._flatten(*AXES)

    def _flatten(self, *axes: str) -> DeviceMesh:
        """The mesh of these axes, flattened to one dimension."""
        mesh = self.mesh[axes]
        return mesh._flatten("_".join(axes))  # pyright: ignore[reportPrivateUsage]

    @property
    def replica(self) -> int:
        """The index of this rank's replica."""
        return self.expert * self.shape.data + self.data

    @property
    def rank_in_replica(self) -> int:
        """The index of this rank in its replica."""
        return self.context * self.shape.tensor + self.tensor
