"""Context parallel: the ranks of a pack cut its rows between them, and share keys and values.

A cut may go through a sample. The piece after it is then a segment that continues the piece before
it, which is what attention over packs knows already (models/attention.py): shared prefixes, samples
of any length and windows work as they do without a cut, and no number of heads matters. In every
layer each rank gathers the keys and values of all rows, and attends with the queries of its own.

    pack     p q r s t u | v w        (two samples)
    rank 0   p q r s                  rank 1   t u (continues p q r s) | v w

Cuts are where the cost before them is an equal part: a row costs more, the more it looks back.

Legend: N rows of a pack, n those of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ProcessGroup

from rollick.models.attention import ROOT, PackedLayout, PackPart, Place, Run
from rollick.train.parallel.balance import RowCost
from rollick.train.parallel.exchange import gather_summed


def plan_cuts(positions_N: npt.ArrayLike, *, ranks: int, cost: RowCost) -> tuple[int, ...]:
    """Where each rank's rows begin, and the number of rows after the last one.

    Every rank gets a row at least, so there must be as many rows as ranks.
    """
    costs_N = cost.token + cost.pair * (np.asarray(positions_N, np.float64) + 1)
    done_N = np.cumsum(costs_N)
    rows = len(costs_N)
    assert rows >= ranks, f"{rows} rows cannot be cut over {ranks} ranks"
    wanted = done_N[-1] * np.arange(1, ranks) / ranks
    cuts = [0]
    for rank, cut in enumerate(np.searchsorted(done_N, wanted), start=1):
        cuts.append(min(max(int(cut) + 1, cuts[-1] + 1), rows - (ranks - rank)))
    return (*cuts, rows)


def cut_layout(
    layout: PackedLayout, cuts: Sequence[int], *, rank: int, group: ProcessGroup
) -> PackedLayout:
    """What this rank attends to: all pieces, of which it has the queries of its own."""
    lengths, parents, owners = cut_segments(layout.lengths, layout.parents, cuts)
    runs, own = _runs(lengths, parents, owners=owners, rank=rank)
    sizes = [stop - start for start, stop in pairwise(cuts)]
    return replace(
        layout,
        lengths=tuple(lengths),
        parents=tuple(parents),
        runs=runs,
        position_ids_N=layout.position_ids_N[cuts[rank] : cuts[rank + 1]],
        order_N=None,
        inverse_N=None,
        part=PackPart(own, partial(_gather_tokens, sizes=sizes, group=group)),
    )


def cut_segments(
    lengths: Sequence[int], parents: Sequence[int], cuts: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """(length, parent, rank) of each piece, for segments that are cut at these rows."""
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


def _runs(
    lengths: Sequence[int], parents: Sequence[int], *, owners: Sequence[int], rank: int
) -> tuple[tuple[Run, ...], range]:
    """The calls of all ranks in the order of the pack, and which of them are this rank's."""
    runs: list[Run] = []
    places: dict[int, Place] = {}
    mine: list[int] = []
    start = 0
    kinds = list(zip(owners, parents, lengths, strict=True))
    for (owner, parent, length), same in groupby(range(len(kinds)), key=lambda b: kinds[b]):
        members = list(same)
        before: list[Place] = []
        while parent != ROOT:
            before.insert(0, places[parent])
            parent = parents[parent]
        places |= {b: (len(runs), number) for number, b in enumerate(members)}
        mine += [len(runs)] if owner == rank else []
        runs.append(Run(start, len(members), length, tuple(before)))
        start += len(members) * length
    return tuple(runs), range(mine[0], mine[-1] + 1)


def _gather_tokens(
    packed: torch.Tensor, *, sizes: Sequence[int], group: ProcessGroup
) -> torch.Tensor:
    """[1, heads, n, D] of each rank -> [1, heads, N, D]; gradients are summed over ranks."""
    rows = packed[0].transpose(0, 1).contiguous()
    return gather_summed(rows, sizes, group).transpose(0, 1)[None]
