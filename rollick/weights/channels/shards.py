"""Weights from the ranks of a sharded learner to engines anywhere, without gathering them.

    learner rank --its pieces of a bucket--> the bucket's first receiver --broadcast--> the others

Each rank sends only the parts that it has, once. The receivers take turns as the first receiver of
a bucket. Learner ranks need memory for two of their pieces of a bucket, receivers for two buckets
beside the tensors that they write. Every rank sends the fingerprint of its pieces after the last
bucket, and each receiver compares it.

The groups are closed after a failure; the next offer creates new ones. The backend is gloo, through
host memory; see broadcast.py for its network.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollick.errors import WeightError
from rollick.models.loading.fingerprint import RunningFingerprint
from rollick.trainer.strategy import LocalShards, ShardedWeights
from rollick.types import Fingerprint, PolicyVersion
from rollick.weights.channels.base import PublishOutcome
from rollick.weights.channels.broadcast import (
    BUCKET_BYTES,
    TIMEOUT_S,
    broadcast,
    connect_store,
    first_line,
    join_group,
    local_address,
    open_store,
)
from rollick.weights.manifest import Pairs, TensorLayout, WeightManifest, plan_layout, views_of
from rollick.weights.shards import Bucket, Piece, choose_pieces, plan_buckets

FINGERPRINT_BYTES = 32
"""Length of a fingerprint as text."""


@dataclass(frozen=True, slots=True)
class ShardSource:
    """The rendezvous address, the number of learner ranks, and the pieces that they send. The
    generators are the members after the learner's ranks."""

    host: str
    port: int
    key: str
    ranks: tuple[int, ...]
    senders: int
    pieces: tuple[Piece, ...]
    bucket_bytes: int

    def buckets(self, layout: Sequence[TensorLayout]) -> list[Bucket]:
        return plan_buckets(layout, self.pieces, bucket_bytes=self.bucket_bytes)

    def first_receiver(self, number: int) -> int:
        """The generator that receives the bucket with this number from the learner."""
        return number % len(self.ranks)

    def join(self, store: Any, member: int, *, timeout_s: float) -> Any:
        """Join the group of all learner ranks and generators."""
        members = self.senders + len(self.ranks)
        return join_group(store, f"{self.key} all", member, members, timeout_s=timeout_s)

    def join_generators(self, store: Any, member: int, *, timeout_s: float) -> Any | None:
        """Join the group of the generators; None if there is only one."""
        members = len(self.ranks)
        if members == 1:
            return None
        return join_group(store, f"{self.key} generators", member, members, timeout_s=timeout_s)


class ShardSender:
    """The end of one learner rank."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = TIMEOUT_S) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.store: Any = None
        self.group: Any = None
        self.source: ShardSource | None = None
        self.joined = ""
        """Key of the group."""
        self.layout: tuple[TensorLayout, ...] = ()
        self.shards: LocalShards | None = None

    def offer(
        self, weights: ShardedWeights, version: PolicyVersion, ranks: tuple[int, ...]
    ) -> WeightManifest | None:
        """Keep the weights for `send`. A collective of the learner's ranks; rank 0 returns the
        manifest, without a fingerprint of the full weights, which no rank knows."""
        shards = self.shards = weights.shards
        assert shards is not None, "the strategy describes its shards"
        self.layout, _ = plan_layout(weights.shapes)
        regions = shards.regions()
        if shards.rank:
            return None
        if self.source is None or self.source.ranks != ranks:
            pieces = choose_pieces(self.layout, regions)
            self.source = self._listen(ranks, pieces, senders=len(regions))
        return WeightManifest(version, Fingerprint(""), self.layout, self.source)

    def send(self, source: ShardSource) -> None:
        """Send this rank's pieces, bucket by bucket. All ranks and receivers must take part."""
        assert self.shards is not None, "call offer before send"
        try:
            self._join(source, self.shards.rank)
            self._send_buckets(source, self.shards)
        except RuntimeError as error:
            self.close()
            raise WeightError(
                f"the transfer to generators {source.ranks} failed: {first_line(error)}",
                fix="a generator or a rank of the learner died or is unreachable; nothing was "
                "committed",
            ) from error

    def release(self, outcome: PublishOutcome) -> None:
        self.shards, self.layout = None, ()
        if not outcome.committed:
            self.close()

    def close(self) -> None:
        self.group = self.store = self.source = None
        self.joined = ""

    def _send_buckets(self, source: ShardSource, shards: LocalShards) -> None:
        tensors, digest = iter(shards.tensors()), RunningFingerprint()
        buckets, rank = source.buckets(self.layout), shards.rank
        sizes = [bucket.bytes_of(rank) for bucket in buckets if rank in bucket.pieces]
        buffers = [torch.empty(max(sizes, default=0), dtype=torch.uint8) for _ in range(2)]
        sending: list[Any] = []
        for number, bucket in enumerate(buckets):
            own = self._fill(buffers[0], bucket, tensors, rank, digest)
            if own.numel():
                target = source.senders + source.first_receiver(number)
                sending.append(self.group.send([own], target, number))
                buffers.reverse()
            while len(sending) > 1:  # The other buffer is filled next.
                sending.pop(0).wait()
        for work in sending:
            work.wait()
        text = torch.tensor(list(digest.result().encode()), dtype=torch.uint8)
        for receiver in range(len(source.ranks)):
            self.group.send([text], source.senders + receiver, len(buckets)).wait()

    def _fill(
        self,
        buffer: Tensor,
        bucket: Bucket,
        tensors: Iterator[tuple[str, Any]],
        rank: int,
        digest: RunningFingerprint,
    ) -> Tensor:
        """Write this rank's pieces of the bucket into the buffer. Takes the bucket's tensors from
        the iterator."""
        used, sent = 0, {piece.tensor for piece in bucket.pieces.get(rank, ())}
        for index, layout in enumerate(bucket.tensors, start=bucket.first):
            name, tensor = next(tensors)
            assert name == layout.name, "shards come in the order of the layout"
            if index in sent:
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                buffer[used : used + data.numel()].copy_(data)
                digest.add(name, buffer[used : used + data.numel()])
                used += data.numel()
        return buffer[:used]

    def _listen(
        self, ranks: tuple[int, ...], pieces: tuple[Piece, ...], *, senders: int
    ) -> ShardSource:
        self.close()
        self.store = open_store(timeout_s=self.timeout_s)
        address = local_address(), self.store.port, uuid.uuid4().hex
        return ShardSource(*address, ranks, senders, pieces, self.bucket_bytes)

    def _join(self, source: ShardSource, rank: int) -> None:
        if self.joined == source.key:
            return
        if rank:
            self.store = connect_store(source.host, source.port, timeout_s=self.timeout_s)
        self.group = source.join(self.store, rank, timeout_s=self.timeout_s)
        self.joined = source.key


class ShardReceiver:
    """The end of a generator."""

    persistent = False  # the next offer overwrites the memory

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self.group: Any = None
        self.generators: Any = None
        self.joined = ""
        self.memory = torch.empty(0, dtype=torch.uint8)

    def open(self, manifest: WeightManifest, rank: int) -> Pairs:
        """Receive all weights into memory of this process."""
        size = _buffer_size(manifest)
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        pairs = views_of(self.memory, manifest.layout)
        self.receive(manifest, rank, [tensor for _, tensor in pairs])
        return pairs

    def receive(self, manifest: WeightManifest, rank: int, targets: Sequence[Tensor]) -> None:
        """Receive the weights into these tensors, which have the shapes of the layout; other dtypes
        are converted."""
        source: ShardSource = manifest.source
        member = source.ranks.index(rank)
        try:
            self._join(source, member)
            self._receive_buckets(source, manifest, member, targets)
        except RuntimeError as error:
            self.forget()
            raise WeightError(
                f"the transfer of version {manifest.version} failed: {first_line(error)}",
                fix="a rank of the learner or another generator died; nothing was committed",
            ) from error

    def forget(self) -> None:
        self.group = self.generators = None
        self.joined = ""

    def _receive_buckets(
        self,
        source: ShardSource,
        manifest: WeightManifest,
        member: int,
        targets: Sequence[Tensor],
    ) -> None:
        buckets = source.buckets(manifest.layout)
        size = max(bucket.size for bucket in buckets)
        buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        digests = [RunningFingerprint() for _ in range(source.senders)]
        arriving = self._start(source, buckets, 0, member, buffers[0])
        for number, bucket in enumerate(buckets):
            for work in arriving:
                work.wait()
            buffer = buffers[0][: bucket.size]
            if self.generators is not None:
                broadcast(self.generators, buffer, root=source.first_receiver(number))
            buffers.reverse()
            arriving = self._start(source, buckets, number + 1, member, buffers[0])
            _write_pieces(bucket, buffer, targets, digests)
        # Receive all of them before one is compared: the senders wait.
        sent = [self._receive_text(rank, tag=len(buckets)) for rank in range(source.senders)]
        for rank, digest in enumerate(digests):
            if digest.result() != sent[rank]:
                self.forget()
                raise WeightError(
                    f"the pieces of version {manifest.version} arrived from learner rank {rank} "
                    f"with fingerprint {digest.result()[:12]}; sent was {sent[rank][:12]}",
                    fix="nothing was committed; publish again",
                )

    def _receive_text(self, rank: int, *, tag: int) -> str:
        """Receive a fingerprint from a learner rank."""
        text = torch.empty(FINGERPRINT_BYTES, dtype=torch.uint8)
        self.group.recv([text], rank, tag).wait()
        return bytes(text.tolist()).decode()

    def _start(
        self,
        source: ShardSource,
        buckets: Sequence[Bucket],
        number: int,
        member: int,
        buffer: Tensor,
    ) -> list[Any]:
        """Start to receive a bucket from the learner, if this is its first receiver."""
        if number >= len(buckets) or source.first_receiver(number) != member:
            return []
        bucket, offset, works = buckets[number], 0, []
        for rank in sorted(bucket.pieces):
            size = bucket.bytes_of(rank)
            works.append(self.group.recv([buffer[offset : offset + size]], rank, number))
            offset += size
        return works

    def _join(self, source: ShardSource, member: int) -> None:
        if self.joined == source.key:
            return
        self.forget()
        store = connect_store(source.host, source.port, timeout_s=self.timeout_s)
        self.group = source.join(store, source.senders + member, timeout_s=self.timeout_s)
        self.generators = source.join_generators(store, member, timeout_s=self.timeout_s)
        self.joined = source.key


def _write_pieces(
    bucket: Bucket,
    buffer: Tensor,
    targets: Sequence[Tensor],
    digests: Sequence[RunningFingerprint],
) -> None:
    """Write the pieces of a bucket into the tensors, and add them to the fingerprints of their
    senders."""
    offset = 0
    for rank in sorted(bucket.pieces):
        for piece in bucket.pieces[rank]:
            layout, size = bucket.layout_of(piece), bucket.piece_bytes(piece)
            data = buffer[offset : offset + size]
            digests[rank].add(layout.name, data)
            dtype: torch.dtype = getattr(torch, layout.dtype)
            # A piece need not be aligned in the buffer as its dtype requires.
            values = data.clone() if offset % dtype.itemsize else data
            target = targets[piece.tensor]
            for axis, (start, length) in enumerate(zip(*piece.region, strict=True)):
                target = target.narrow(axis, start, length)
            target.copy_(values.view(dtype).view(piece.region.shape))
            offset += size


def _buffer_size(manifest: WeightManifest) -> int:
    return max((tensor.offset + tensor.size for tensor in manifest.layout), default=0)
