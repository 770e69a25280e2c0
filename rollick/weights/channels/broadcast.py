"""Weights between machines: torch.distributed broadcasts them from the learner, bucket by bucket.

The learner is rank 0 of a process group of its own (not torch's default one, which belongs to
training), the receivers follow in the order of the offer. A group lives as long as its members:
after any failure both ends drop it, and the next offer opens another one.

    offer  a store for the rendezvous -> manifest (address, key, ranks)
    send   join, then a broadcast of each bucket       open  join, then take each bucket

The backend is gloo, through host memory. Which network it takes is torch's choice, or
GLOO_SOCKET_IFNAME. The store listens on all interfaces of the learner's machine: it carries the
addresses of the members, not weights, and belongs into a cluster's own network.
"""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollick.errors import WeightError
from rollick.models.fingerprint import fingerprint
from rollick.types import PolicyVersion
from rollick.weights.channels.base import Outcome
from rollick.weights.manifest import Pairs, TensorPlace, WeightManifest, lay_out, views_of

BUCKET_BYTES = 64 << 20
JOIN_S = 60.0
"""How long a member waits for the others to join, and for each bucket."""


@dataclass(frozen=True, slots=True)
class BroadcastSource:
    """Where to join, and who takes part: generator ranks, in the order of the group's ranks 1..."""

    host: str
    port: int
    key: str
    ranks: tuple[int, ...]
    size: int
    bucket_bytes: int


class BroadcastSender:
    """Rank 0 of the group."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = JOIN_S) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.store: Any = None
        self.group: Any = None
        self.source: BroadcastSource | None = None
        self.pairs: Pairs = ()
        self.places: tuple[TensorPlace, ...] = ()

    def offer(self, pairs: Pairs, version: PolicyVersion, ranks: tuple[int, ...]) -> WeightManifest:
        self.pairs = pairs
        self.places, size = lay_out(pairs)
        if self.source is None or self.source.ranks != ranks:
            self._listen(ranks)
        assert self.source is not None
        host, port, key = self.source.host, self.source.port, self.source.key
        self.source = BroadcastSource(host, port, key, ranks, size, self.bucket_bytes)
        return WeightManifest(version, fingerprint(list(pairs)), self.places, self.source)

    def send(self) -> None:
        assert self.source is not None, "send follows an offer"
        try:
            if self.group is None:
                self.group = _join(self.store, self.source, 0, timeout_s=self.timeout_s)
            buffer = torch.empty(min(self.source.size, self.bucket_bytes), dtype=torch.uint8)
            for start in range(0, self.source.size, self.bucket_bytes):
                bucket = buffer[: min(self.bucket_bytes, self.source.size - start)]
                _fill(bucket, start, self.places, self.pairs)
                self.group.broadcast([bucket], _from_learner()).wait()
        except RuntimeError as error:
            self.close()
            raise WeightError(
                f"the broadcast to generators {self.source_ranks} broke: {first_line(error)}",
                fix="a generator died or cannot be reached; nothing was committed",
            ) from error

    @property
    def source_ranks(self) -> tuple[int, ...]:
        return self.source.ranks if self.source else ()

    def release(self, outcome: Outcome) -> None:
        self.pairs, self.places = (), ()
        if not outcome.committed:
            self.close()

    def close(self) -> None:
        self.group = self.store = self.source = None

    def _listen(self, ranks: tuple[int, ...]) -> None:
        self.close()
        self.store = dist.TCPStore(
            "0.0.0.0",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout_s),
        )
        key = uuid.uuid4().hex
        self.source = BroadcastSource(own_address(), self.store.port, key, ranks, 0, 0)


class BroadcastReceiver:
    """A further rank, and the memory that the bytes arrive in."""

    # The memory is written again at the next offer.
    lasting = False

    def __init__(self, *, timeout_s: float = JOIN_S) -> None:
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
                self.group.broadcast([bucket], _from_learner()).wait()
        except RuntimeError as error:
            self.forget()
            raise WeightError(
                f"the broadcast of version {manifest.version} broke: {first_line(error)}",
                fix="the learner or another generator died; nothing was committed",
            ) from error
        return views_of(self.memory, manifest.places)

    def forget(self) -> None:
        self.group, self.key = None, ""

    def _join(self, source: BroadcastSource, rank: int) -> None:
        if self.key == source.key:
            return
        self.forget()
        limit = timedelta(seconds=self.timeout_s)
        store = dist.TCPStore(source.host, source.port, is_master=False, timeout=limit)
        number = 1 + source.ranks.index(rank)
        self.group = _join(store, source, number, timeout_s=self.timeout_s)
        self.key = source.key


def own_address() -> str:
    """The address by which other machines reach this one; loopback where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # No packet is sent: connecting a datagram socket only chooses the way out.
            probe.connect(("10.255.255.255", 1))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _join(store: Any, source: BroadcastSource, number: int, *, timeout_s: float) -> Any:
    """Waits until every member has joined."""
    members = 1 + len(source.ranks)
    limit = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore(source.key, store), number, members, limit)


def _from_learner() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _fill(bucket: Tensor, start: int, places: tuple[TensorPlace, ...], pairs: Pairs) -> None:
    """Copy the bytes from `start` on; a tensor may lie in several buckets."""
    end = start + bucket.numel()
    for place, (_, tensor) in zip(places, pairs, strict=True):
        low, high = max(start, place.offset), min(end, place.offset + place.size)
        if low < high:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            bucket[low - start : high - start].copy_(flat[low - place.offset : high - place.offset])
