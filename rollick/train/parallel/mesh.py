"""The ranks of a sharded learner: how they find each other, and who shares what with whom.

Ranks lie in a grid of four axes, the last one fastest:

    expert x data x context x tensor

    tensor    ranks that cut the matrices of a layer between them
    context   ranks that cut the rows of a pack between them
    data      ranks with samples of their own
    expert    ranks with samples of their own, which cut the experts of a mixture between them

Owns the process group, the device mesh and the names of its parts. Does not own what is done on
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollick.config.schema import ParallelConfig
from rollick.errors import ConfigError

AXES = ("expert", "data", "context", "tensor")

JOIN_TIMEOUT_S = 120.0
"""How long a rank waits for the others to come."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a learner meet. It travels to them by value."""

    host: str
    port: int
    ranks: int
    timeout_s: float
    """How long a rank waits in one exchange before it takes another one for lost."""


def open_meeting(host: str, *, ranks: int, timeout_s: float) -> tuple[Any, Meeting]:
    """A store for the ranks to meet at, which lives as long as it is held, and how to find it.

    It listens on all interfaces of this machine and carries addresses, not weights.
    """
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return store, Meeting(host, store.port, ranks, timeout_s)


def join(meeting: Meeting | None, rank: int, *, device: str) -> None:
    """Take part in torch's process group of this process; None is a learner of one rank.

    A process has one such group: a learner of the same ranks that comes later uses it too.
    """
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(torch.device(device).index or 0)
    if dist.is_initialized():
        return
    if meeting is None:
        store: Any = dist.HashStore()
        ranks, timeout_s = 1, JOIN_TIMEOUT_S
    else:
        wait = timedelta(seconds=JOIN_TIMEOUT_S)
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=wait)
        ranks, timeout_s = meeting.ranks, meeting.timeout_s
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """End the process group of this process, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class GridShape:
    """How many ranks each axis has. Pure."""

    expert: int
    data: int
    context: int
    tensor: int

    @classmethod
    def of(cls, parallel: ParallelConfig, ranks: int) -> GridShape:
        """`data` takes what the others leave, where the recipe does not say it."""
        data = parallel.data_of(ranks)
        if data * parallel.others != ranks:
            raise ConfigError(
                f"train.parallel makes {data} x {parallel.tensor} x {parallel.context} x "
                f"{parallel.expert} = {data * parallel.others} ranks (data, tensor, context, "
                f"expert), and the policy has {ranks} devices",
                fix="change a factor, or give devices.policy as many devices",
            )
        return cls(parallel.expert, data, parallel.context, parallel.tensor)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.expert, self.data, self.context, self.tensor

    @property
    def replicas(self) -> int:
        """Sets of ranks with samples of their own."""
        return self.expert * self.data

    @property
    def copies(self) -> int:
        """Ranks that work on one micro-batch together."""
        return self.context * self.tensor


class Grid:
    """The mesh of this process, and its place on it."""

    def __init__(self, shape: GridShape, *, device: str) -> None:
        self.shape = shape
        kind = "cuda" if device.startswith("cuda") else "cpu"
        self.whole = init_device_mesh(kind, shape.sizes, mesh_dim_names=AXES)
        self.rank = dist.get_rank()
        place = self.whole.get_coordinate()
        assert place is not None, "every rank of the process group is on the mesh"
        self.expert, self.data, self.context, self.tensor = place
        self.tensors = self.whole["tensor"]
        self.contexts = self.whole["context"]
        self.experts = self.whole["expert"]
        self.replicas = self._flat("expert", "data")
        self.copies = self._flat("context", "tensor")
        self.shards = self._flat("expert", "data", "context")
        """Ranks over which the parameters of a layer are sharded."""
        self.expert_shards = self._flat("data", "context")
        """The same of the experts of a mixture, of which each rank of `experts` has some."""
        self.all = self._flat(*AXES)

    def _flat(self, *axes: str) -> DeviceMesh:
        """The ranks of these axes in a row."""
        part = self.whole[axes]
        return part._flatten("_".join(axes))  # pyright: ignore[reportPrivateUsage]

    @property
    def replica(self) -> int:
        """Which set of ranks this one is in."""
        return self.expert * self.shape.data + self.data

    @property
    def copy(self) -> int:
        """Which rank of its set this one is."""
        return self.context * self.shape.tensor + self.tensor
