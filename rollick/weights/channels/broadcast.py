"""Weights between machines: torch.distributed broadcasts them from the learner in buckets.

The learner is rank 0 of a separate process group; the receivers follow in the order of the offer.
After a failure both sides discard the group, and the next offer creates a new one.

The backend is gloo, through host memory; set GLOO_SOCKET_IFNAME to choose the network. The store
listens on all interfaces of the learner's machine. It carries the addresses of the members and no
weights; keep it inside the cluster's network.
"""

from __future__ import annotations

import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollick.errors import WeightError
from rollick.models.loading.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.manifest import Pairs, TensorLayout, WeightManifest, plan_layout, views_of

BUCKET_BYTES = 64 << 20
TIMEOUT_S = 60.0
"""Timeout for all members to join, and for each bucket."""
PRIVATE_ADDRESSES = ("10.255.255.254", "172.31.255.254", "192.168.255.254")
"""One in each private network, for machines without a default route. None is a broadcast address:
the kernel refuses to connect to those."""


@dataclass(frozen=True, slots=True)
class BroadcastSource:
    """The rendezvous address, and the generators in the order of their group ranks 1, 2, …"""

    host: str
    port: int
    key: str
    ranks: tuple[int, ...]
    size: int
    bucket_bytes: int

    def join(self, store: Any, member: int, *, timeout_s: float) -> Any:
        """Join the group of the learner and the generators."""
        return join_group(store, self.key, member, 1 + len(self.ranks), timeout_s=timeout_s)


class BroadcastSender:
    """Rank 0 of the process group."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = TIMEOUT_S) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.store: Any = None
        self.group: Any = None
        self.source: BroadcastSource | None = None
        self.pairs: Pairs = ()
        self.layout: tuple[TensorLayout, ...] = ()

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        self.pairs = pairs
        self.layout, size = plan_layout(pairs)
        if self.source is None or self.source.ranks != ranks:
            self.source = self._listen(ranks)
        self.source = replace(self.source, size=size)
        return WeightManifest(version, fingerprint(list(pairs)), self.layout, self.source)

    def send(self) -> None:
        source = self.source
        assert source is not None, "call offer before send"
        try:
            if self.group is None:
                self.group = source.join(self.store, 0, timeout_s=self.timeout_s)
            buffer = torch.empty(min(source.size, self.bucket_bytes), dtype=torch.uint8)
            for start in range(0, source.size, self.bucket_bytes):
                bucket = buffer[: min(self.bucket_bytes, source.size - start)]
                _fill(bucket, start, self.layout, self.pairs)
                broadcast(self.group, bucket)
        except RuntimeError as error:
            self.close()
            raise WeightError(
                f"the broadcast to generators {source.ranks} failed: {first_line(error)}",
                fix="a generator died or is unreachable; nothing was committed",
            ) from error

    def release(self, outcome: PublishOutcome) -> None:
        self.pairs, self.layout = (), ()
        if not outcome.committed:
            self.close()

    def close(self) -> None:
        self.group = self.store = self.source = None

    def _listen(self, ranks: tuple[int, ...]) -> BroadcastSource:
        self.close()
        self.store = open_store(timeout_s=self.timeout_s)
        rendezvous = local_address(), self.store.port, uuid.uuid4().hex
        return BroadcastSource(*rendezvous, ranks, size=0, bucket_bytes=self.bucket_bytes)


class BroadcastReceiver:
    """A generator's rank in the process group, and its receive buffer."""

    persistent = False  # the next offer overwrites the buffer

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.group: Any = None
        self.key = ""
        self.memory = torch.empty(0, dtype=torch.uint8)

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        source: BroadcastSource = manifest.source
        if self.memory.numel() < source.size:
            self.memory = torch.empty(source.size, dtype=torch.uint8)
        try:
            self._join(source, rank)
            for start in range(0, source.size, source.bucket_bytes):
                bucket = self.memory[start : min(start + source.bucket_bytes, source.size)]
                broadcast(self.group, bucket)
        except RuntimeError as error:
            self.forget()
            raise WeightError(
                f"the broadcast of version {manifest.version} failed: {first_line(error)}",
                fix="the learner or another generator died; nothing was committed",
            ) from error
        return views_of(self.memory, manifest.layout)

    def forget(self) -> None:
        self.group, self.key = None, ""

    def _join(self, source: BroadcastSource, rank: int) -> None:
        if self.key == source.key:
            return
        self.forget()
        store = connect_store(source.host, source.port, timeout_s=self.timeout_s)
        member = 1 + source.ranks.index(rank)
        self.group = source.join(store, member, timeout_s=self.timeout_s)
        self.key = source.key


def local_address() -> str:
    """This machine's address on its network; loopback if it has none."""
    for address in PRIVATE_ADDRESSES:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
            # Sends no packet: connecting a datagram socket only selects the interface.
            probe.connect((address, 1))
            return probe.getsockname()[0]
    return "127.0.0.1"


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def open_store(*, timeout_s: float) -> Any:
    """Open the store of a rendezvous, at a free port on all interfaces."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def connect_store(host: str, port: int, *, timeout_s: float) -> Any:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(store: Any, key: str, member: int, members: int, *, timeout_s: float) -> Any:
    """Join the process group with this key; returns when every member has joined."""
    timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore(key, store), member, members, timeout)


def broadcast(group: Any, bucket: Tensor, *, root: int = 0) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([bucket], options).wait()


def _fill(bucket: Tensor, start: int, layout: tuple[TensorLayout, ...], pairs: Pairs) -> None:
    """Fill the bucket with the weights' bytes from `start` on. Tensors may span buckets."""
    end = start + bucket.numel()
    for spec, (_, tensor) in zip(layout, pairs, strict=True):
        low, high = max(start, spec.offset), min(end, spec.offset + spec.size)
        if low < high:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            bucket[low - start : high - start].copy_(flat[low - spec.offset : high - spec.offset])
