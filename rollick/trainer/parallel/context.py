"""Context parallelism: the ranks of a pack divide its rows and share keys and values.

A cut may go through a sample. The piece after it is then a segment that continues the piece before
it, which attention over packs supports (models/attention/varlen.py). In every layer each rank
gathers the keys and values of all rows, and attends with the queries of its own.

    pack     p q r s t u | v w        (two samples)
    rank 0   p q r s                  rank 1   t u (continues p q r s) | v w

Cuts divide the cost equally: a row costs more, the more rows it attends to.

Legend: N rows of a pack, n those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.distributed import ProcessGroup

from rollick.models.attention.varlen import (
    ROOT,
    AttentionCall,
    ContextShard,
    PackedLayout,
    plan_calls,
)
from rollick.trainer.parallel.balance import RowCost
from rollick.trainer.parallel.collectives import gather_summed


def plan_cuts(positions_N: npt.ArrayLike, *, ranks: int, cost: RowCost) -> tuple[int, ...]:
    """The first row of each rank, then the number of rows. Every rank gets at least one row."""
    costs_N = cost.token + cost.pair * (np.asarray(positions_N, np.float64) + 1)
    done_N = np.cumsum(costs_N)
    rows = len(costs_N)
    assert rows >= ranks, f"{rows} rows cannot be cut over {ranks} ranks"
    targets = done_N[-1] * np.arange(1, ranks) / ranks
    cuts = [0]
    for rank, cut in enumerate(np.searchsorted(done_N, targets), start=1):
        cuts.append(min(max(int(cut) + 1, cuts[-1] + 1), rows - (ranks - rank)))
    return (*cuts, rows)


def cut_layout(
    layout: PackedLayout, cuts: Sequence[int], *, rank: int, group: ProcessGroup
) -> PackedLayout:
    """The layout of this rank: all pieces, with the queries of its own rows."""
    lengths, parents, owners = cut_segments(layout.lengths, layout.parents, cuts)
    calls, own = _plan_calls(lengths, parents, owners=owners, rank=rank)
    sizes = [stop - start for start, stop in pairwise(cuts)]
    return replace(
        layout,
        lengths=tuple(lengths),
        parents=tuple(parents),
        calls=calls,
        position_ids_N=layout.position_ids_N[cuts[rank] : cuts[rank + 1]],
        order_N=None,
        inverse_N=None,
        shard=ContextShard(own, partial(_gather_tokens, sizes=sizes, group=group)),
    )


def cut_segments(
    lengths: Sequence[int], parents: Sequence[int], cuts: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """(length, parent, rank) of each piece of segments that are cut at these rows."""
    pieces: list[tuple[int, int, int]] = []
    last: list[int] = []  # of each segment: its last piece, which its children continue
    start = 0
    for length, parent in zip(lengths, parents, strict=True):
        before = ROOT if parent == ROOT else last[parent]
        inside = [cut for cut in cuts[1:-1] if start < cut < start + length]
        edges = [start, *inside, start + length]
        for begin, end in pairwise(edges):
            owner = int(np.searchsorted(np.asarray(cuts), begin, side="right")) - 1
            pieces.append((end - begin, before, owner))
            before = len(pieces) - 1
        last.append(before)
        start += length
    return [p[0] for p in pieces], [p[1] for p in pieces], [p[2] for p in pieces]


def _plan_calls(
    lengths: Sequence[int], parents: Sequence[int], *, owners: Sequence[int], rank: int
) -> tuple[tuple[AttentionCall, ...], range]:
    """The calls of all ranks in the order of the pack, and which of them are this rank's."""
    keys = list(zip(owners, parents, lengths, strict=True))
    calls = plan_calls(lengths, parents, keys, ordered=range(len(keys)))
    own = [number for number, (key, _) in enumerate(groupby(keys)) if key[0] == rank]
    return calls, range(own[0], own[-1] + 1)


def _gather_tokens(packed: Tensor, *, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """[1, heads, n, D] of each rank -> [1, heads, N, D]; gradients are summed over ranks."""
    rows = packed[0].transpose(0, 1).contiguous()
    return gather_summed(rows, sizes, group).transpose(0, 1)[None]
