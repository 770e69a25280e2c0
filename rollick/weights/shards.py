"""Plans how the ranks of a sharded learner send their weights, without gathering them.

    regions of each rank -> choose_pieces -> every part of every tensor, once
    pieces -> plan_buckets -> buckets of whole tensors, with the pieces that each rank sends

Pure functions: the ends of a transfer make the same plan from the same manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from rollick.errors import WeightError
from rollick.trainer.strategy import Region
from rollick.weights.manifest import TensorLayout


class Piece(NamedTuple):
    """A part of a tensor, and the learner rank that sends it."""

    rank: int
    tensor: int
    """Index in the layout."""
    region: Region


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together, and their pieces by sending rank."""

    tensors: Sequence[TensorLayout]
    first: int
    """Index of the first tensor in the layout."""
    pieces: Mapping[int, Sequence[Piece]]

    def bytes_of(self, rank: int) -> int:
        return sum(self.piece_bytes(piece) for piece in self.pieces[rank])

    @property
    def size(self) -> int:
        return sum(map(self.bytes_of, self.pieces))

    def layout_of(self, piece: Piece) -> TensorLayout:
        return self.tensors[piece.tensor - self.first]

    def piece_bytes(self, piece: Piece) -> int:
        tensor = self.layout_of(piece)
        return tensor.size * prod(piece.region.shape) // max(prod(tensor.shape), 1)


def choose_pieces(
    layout: Sequence[TensorLayout], regions: Sequence[Mapping[str, Region]]
) -> tuple[Piece, ...]:
    """Cover every tensor by the regions that ranks have. Ranks with the same region take turns.
    `regions`: by rank, then by name; a rank without a part of a tensor has none."""
    pieces: list[Piece] = []
    for index, tensor in enumerate(layout):
        owners: dict[Region, list[int]] = {}
        for rank, named in enumerate(regions):
            if (region := named.get(tensor.name)) is not None and prod(region.shape):
                owners.setdefault(region, []).append(rank)
        covered = sum(prod(region.shape) for region in owners)
        if covered != prod(tensor.shape):
            raise WeightError(
                f"the learner's ranks have {covered} of the {prod(tensor.shape)} elements of "
                f"{tensor.name}",
                fix="use weights.channel=host",
            )
        pieces += [Piece(ranks[index % len(ranks)], index, each) for each, ranks in owners.items()]
    return tuple(sorted(pieces))


def plan_buckets(
    layout: Sequence[TensorLayout], pieces: Sequence[Piece], *, bucket_bytes: int
) -> list[Bucket]:
    """Buckets of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
    starts, used = [0], 0
    for index, tensor in enumerate(layout):
        if used and used + tensor.size > bucket_bytes:
            starts.append(index)
            used = 0
        used += tensor.size
    buckets: list[Bucket] = []
    for first, end in zip(starts, [*starts[1:], len(layout)], strict=True):
        by_rank: dict[int, list[Piece]] = {}
        for piece in pieces:
            if first <= piece.tensor < end:
                by_rank.setdefault(piece.rank, []).append(piece)
        buckets.append(Bucket(layout[first:end], first, by_rank))
    return buckets
