"""One rank's share of a pack: its rows, and the output head for its share of the trained tokens.

    PackedBatch -- share_pack --> PackShare -- RankForward --> log-probs of the trained tokens

Rows are divided over the `context` ranks. The trained tokens of a context rank are divided over its
`tensor` ranks, so that no logits are computed twice. All these ranks gather the results.

A cut between `context` ranks may go through a sample. The piece after it is then a segment that
continues the piece before it, which attention over packs supports (models/attention/varlen.py). In
every layer each rank gathers the keys and values of all rows, and attends with the queries of its
own rows. Cuts divide the cost equally; a row that attends to more rows costs more.

    pack     p q r s t u | v w        (two samples)
    rank 0   p q r s                  rank 1   t u (continues p q r s) | v w

Legend: N rows of a pack, n those on this rank, T trained tokens, t those whose head is computed
here, K top tokens of the teacher, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rollick.data.batch import Batch
from rollick.models.attention.varlen import ROOT, ContextShard, PackedLayout, plan_calls
from rollick.models.decoder.training import run_decoder
from rollick.models.head.logprobs import chosen_logprobs, output_head, token_logprobs
from rollick.trainer.microbatch import PackedBatch
from rollick.trainer.parallel.collectives import gather_rows, shared_input
from rollick.trainer.parallel.mesh import Grid
from rollick.trainer.parallel.shares import RowCost
from rollick.trainer.token_loss import RouterLog


@dataclass(frozen=True, slots=True, eq=False)
class PackShare:
    """The part of a pack that this rank computes."""

    token_ids_n: Tensor
    layout: PackedLayout
    trained_n: Tensor
    """Rows on this rank that predict a trained token; repeated if a row predicts several."""
    rows_t: Tensor
    """Those of `trained_n` for which this rank computes the output head."""
    targets_t: Tensor
    temperature_t: Tensor
    teacher_ids_tK: Tensor | None
    """The teacher's top-K token ids."""
    sizes: tuple[int, ...]
    """t of each rank that computes a share of this pack."""
    inverse_T: Tensor | None
    """Reorders the gathered results of these ranks by trained token."""


class RankForward(nn.Module):
    """The model and its output head as one call, so that FSDP shards all of it."""

    def __init__(self, model: nn.Module, grid: Grid, *, chunk: int, routers: bool) -> None:
        super().__init__()
        self.model = model
        self.grid = grid
        self.chunk = chunk
        self.router_log = RouterLog(model) if routers else None

    def forward(self, share: PackShare, entropy_in_loss: bool) -> tuple[Tensor | None, ...]:
        """(log-probs, entropy, student, expert counts, expert sums); the last three may be None."""
        hidden_nD = self._compute_hidden(share)
        routing = None if self.router_log is None else self.router_log.of_rows(share.trained_n)
        if self.grid.shape.tensor > 1:
            hidden_nD = shared_input(hidden_nD, self.grid.tensors.get_group())
        options: dict[str, Any] = {"head": output_head(self.model), "chunk": self.chunk}
        rows_tD = hidden_nD.index_select(0, share.rows_t)
        logprobs_t, entropy_t = token_logprobs(
            rows_tD, targets_T=share.targets_t, temperature_T=share.temperature_t, **options
        )
        student_tK = None
        if share.teacher_ids_tK is not None:
            student_tK = chosen_logprobs(
                rows_tD, ids_TK=share.teacher_ids_tK, temperature_T=share.temperature_t, **options
            )
        entropy_t = entropy_t if entropy_in_loss else entropy_t.detach()
        gathered = (self._gather(values, share) for values in (logprobs_t, entropy_t, student_tK))
        return *gathered, *(routing or (None, None))

    def _compute_hidden(self, share: PackShare) -> Tensor:
        with nullcontext() if self.router_log is None else self.router_log.recording():
            return run_decoder(self.model.base_model, share.token_ids_n, share.layout)

    def _gather(self, values_t: Tensor | None, share: PackShare) -> Tensor | None:
        """Gather the values of all trained tokens of the pack on each of its ranks."""
        if values_t is None:
            return None
        if share.inverse_T is None:
            return values_t.clone()  # On a view, FSDP's backward hook would be lost.
        gathered = gather_rows(values_t, share.sizes, self.grid.replica_ranks.get_group())
        return gathered.index_select(0, share.inverse_T)


def share_pack(packed: PackedBatch, microbatch: Batch, *, grid: Grid, cost: RowCost) -> PackShare:
    """This rank's share: rows are divided over `context`, their trained tokens over `tensor`."""
    teacher_ids_TK = None
    if microbatch.teacher_ids_NK is not None:
        ids = np.asarray(microbatch.teacher_ids_NK[packed.indices_T], np.int64)
        teacher_ids_TK = torch.as_tensor(ids).to(packed.rows_T.device)
    if grid.shape.ranks_per_replica == 1:
        return PackShare(
            token_ids_n=packed.token_ids_N,
            layout=packed.layout,
            trained_n=packed.rows_T,
            rows_t=packed.rows_T,
            targets_t=packed.targets_T,
            temperature_t=packed.temperature_T,
            teacher_ids_tK=teacher_ids_TK,
            sizes=(len(packed.rows_T),),
            inverse_T=None,
        )
    positions_N = packed.layout.position_ids_N.cpu().numpy()
    cuts = plan_cuts(positions_N, ranks=grid.shape.context, cost=cost)
    rows_T = packed.rows_T.cpu().numpy()
    context_T = np.searchsorted(np.asarray(cuts), rows_T, side="right") - 1
    by_context = [np.flatnonzero(context_T == context) for context in range(grid.shape.context)]
    shares = [share for rows in by_context for share in np.array_split(rows, grid.shape.tensor)]
    device = packed.rows_T.device
    start, stop = cuts[grid.context], cuts[grid.context + 1]
    selected = torch.as_tensor(shares[grid.rank_in_replica]).to(device)
    trained = torch.as_tensor(by_context[grid.context]).to(device)
    layout = packed.layout
    if grid.shape.context > 1:
        layout = cut_layout(layout, cuts, rank=grid.context, group=grid.contexts.get_group())
    return PackShare(
        token_ids_n=packed.token_ids_N[start:stop],
        layout=layout,
        trained_n=packed.rows_T[trained] - start,
        rows_t=packed.rows_T[selected] - start,
        targets_t=packed.targets_T[selected],
        temperature_t=packed.temperature_T[selected],
        teacher_ids_tK=None if teacher_ids_TK is None else teacher_ids_TK[selected],
        sizes=tuple(len(share) for share in shares),
        inverse_T=torch.as_tensor(np.argsort(np.concatenate(shares))).to(device),
    )


def plan_cuts(positions_N: npt.ArrayLike, *, ranks: int, cost: RowCost) -> tuple[int, ...]:
    """The first row of each rank, then the number of rows. Every rank gets at least one row."""
    costs_N = cost.token + cost.pair * (np.asarray(positions_N, np.float64) + 1)
    cumulative_N = np.cumsum(costs_N)
    num_rows = len(costs_N)
    assert num_rows >= ranks, f"{num_rows} rows cannot be cut over {ranks} ranks"
    targets = cumulative_N[-1] * np.arange(1, ranks) / ranks
    cuts = [0]
    for rank, cut in enumerate(np.searchsorted(cumulative_N, targets), start=1):
        cuts.append(min(max(int(cut) + 1, cuts[-1] + 1), num_rows - (ranks - rank)))
    return (*cuts, num_rows)


def cut_layout(
    layout: PackedLayout, cuts: Sequence[int], *, rank: int, group: ProcessGroup
) -> PackedLayout:
    """The layout of this rank: the attention calls of all ranks, with the queries of its rows."""
    lengths, parents, owners = cut_segments(layout.lengths, layout.parents, cuts)
    keys = list(zip(owners, parents, lengths, strict=True))
    local = [number for number, (key, _) in enumerate(groupby(keys)) if key[0] == rank]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    return replace(
        layout,
        lengths=tuple(lengths),
        parents=tuple(parents),
        calls=plan_calls(lengths, parents, keys, ordered=range(len(keys))),
        position_ids_N=layout.position_ids_N[cuts[rank] : cuts[rank + 1]],
        order_N=None,
        inverse_N=None,
        shard=ContextShard(
            range(local[0], local[-1] + 1), partial(_gather_tokens, sizes=sizes, group=group)
        ),
    )


def cut_segments(
    lengths: Sequence[int], parents: Sequence[int], cuts: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """(length, parent, rank) of each piece of segments that are cut at these rows."""
    pieces: list[tuple[int, int, int]] = []
    last_pieces: list[int] = []  # For each segment, the piece that its children continue.
    start = 0
    for length, parent in zip(lengths, parents, strict=True):
        parent_piece = ROOT if parent == ROOT else last_pieces[parent]
        inner_cuts = [cut for cut in cuts[1:-1] if start < cut < start + length]
        edges = [start, *inner_cuts, start + length]
        for begin, end in pairwise(edges):
            rank = int(np.searchsorted(np.asarray(cuts), begin, side="right")) - 1
            pieces.append((end - begin, parent_piece, rank))
            parent_piece = len(pieces) - 1
        last_pieces.append(parent_piece)
        start += length
    return [p[0] for p in pieces], [p[1] for p in pieces], [p[2] for p in pieces]


def _gather_tokens(packed: Tensor, *, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
    """All-gather [1, heads, n, D] to [1, heads, N, D]; gradients are summed over ranks."""
    rows = packed[0].transpose(0, 1).contiguous()
    return gather_rows(rows, sizes, group, summed=True).transpose(0, 1)[None]
