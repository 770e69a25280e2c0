"""One rank's share of a pack: its rows, and the head for its share of the selected rows.

    PackedBatch -- share_pack --> PackShare -- RankForward --> results of the selected rows

Rows are divided over the `context` ranks. A head needs only some rows: those that predict trained
tokens, or the last row of each sample. The selected rows of a context rank are divided over its
`tensor` ranks, so that no head is computed twice. All these ranks gather the results.

A cut between `context` ranks may go through a sample. The piece after it is then a segment that
continues the piece before it, which attention over packs supports (models/attention/varlen.py). In
every layer each rank gathers the keys and values of all rows, and attends with the queries of its
own rows. Cuts divide the cost equally; a row that attends to more rows costs more.

    pack     p q r s t u | v w        (two samples)
    rank 0   p q r s                  rank 1   t u (continues p q r s) | v w

Legend: N rows of a pack, n those on this rank, R selected rows, r those whose head is computed
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
from rollick.models.head.logprobs import (
    OutputHead,
    chosen_logprobs,
    output_head,
    token_logprobs,
    top_logprobs,
)
from rollick.trainer.microbatch import PackedBatch
from rollick.trainer.parallel.collectives import gather_rows, shared_input
from rollick.trainer.parallel.mesh import Grid
from rollick.trainer.parallel.shares import RowCost
from rollick.trainer.token_loss import RouterLog


@dataclass(frozen=True, slots=True, eq=False)
class RowShare:
    """The selected rows of a pack that this rank computes the head for."""

    local_n: Tensor
    """All selected rows on this rank; repeated if a row is selected several times."""
    rows_r: Tensor
    """Those of `local_n` for which this rank computes the head."""
    selected_r: Tensor | None
    """Their indices in the selection; None if this rank computes all of it."""
    sizes: tuple[int, ...]
    """r of each rank that computes a share of this pack."""
    inverse_R: Tensor | None
    """Reorders the gathered results of these ranks by selected row."""

    def take(self, values_R: Tensor) -> Tensor:
        """The values of the rows of this rank."""
        return values_R if self.selected_r is None else values_R[self.selected_r]


@dataclass(frozen=True, slots=True, eq=False)
class PackShare:
    """The part of a pack that this rank computes."""

    token_ids_n: Tensor
    layout: PackedLayout
    trained: RowShare
    """The rows that predict a trained token."""
    last: RowShare
    """The last row of each sample."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTargets:
    """The arguments of the output head for the trained tokens of this rank."""

    targets_r: Tensor
    temperature_r: Tensor
    teacher_ids_rK: Tensor | None
    """The teacher's top-K token ids."""
    entropy_in_loss: bool

    @classmethod
    def of(cls, packed: PackedBatch, microbatch: Batch, trained: RowShare) -> TokenTargets:
        teacher_ids_rK = None
        if microbatch.teacher_ids_NK is not None:
            ids = np.asarray(microbatch.teacher_ids_NK[packed.indices_T], np.int64)
            teacher_ids_rK = trained.take(torch.as_tensor(ids).to(packed.rows_T.device))
        return cls(
            targets_r=trained.take(packed.targets_T),
            temperature_r=trained.take(packed.temperature_T),
            teacher_ids_rK=teacher_ids_rK,
            entropy_in_loss=microbatch.entropy_weights_N is not None,
        )


class RankForward(nn.Module):
    """A model and its head as one call, so that FSDP shards all of it. Subclasses add the head."""

    def __init__(self, model: nn.Module, grid: Grid) -> None:
        super().__init__()
        self.model: Any = model
        self.grid = grid

    def compute_hidden(self, share: PackShare) -> Tensor:
        """The hidden states of this rank's rows."""
        hidden_nD = run_decoder(self.model.base_model, share.token_ids_n, share.layout)
        if self.grid.shape.tensor > 1:
            hidden_nD = shared_input(hidden_nD, self.grid.tensor_mesh.get_group())
        return hidden_nD

    def gather(self, values_r: Tensor, rows: RowShare) -> Tensor:
        """The values of all selected rows of the pack, on each of its ranks."""
        if rows.inverse_R is None:
            return values_r.clone()  # On a view, FSDP's backward hook would be lost.
        gathered = gather_rows(values_r, rows.sizes, self.grid.rank_mesh.get_group())
        return gathered.index_select(0, rows.inverse_R)


class TokenForward(RankForward):
    """Log-probs of tokens. `vocabulary` restricts the output to the first tokens."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        *,
        chunk: int,
        routers: bool = False,
        vocabulary: int | None = None,
    ) -> None:
        super().__init__(model, grid)
        self.chunk = chunk
        self.vocabulary = vocabulary
        self.router_log = RouterLog(model) if routers else None

    def forward(
        self, share: PackShare, tokens: TokenTargets, top_k: int | None = None
    ) -> tuple[Any, ...]:
        """(log-probs, entropy, student, routing); the last two may be None. With `top_k`: (ids,
        log-probs) of the likeliest tokens."""
        with nullcontext() if self.router_log is None else self.router_log.recording():
            hidden_nD = self.compute_hidden(share)
        trained = share.trained
        rows_rD = hidden_nD.index_select(0, trained.rows_r)
        options: dict[str, Any] = {"head": self._output_head(), "chunk": self.chunk}
        options["temperature_T"] = tokens.temperature_r
        if top_k is not None:
            top = top_logprobs(rows_rD, k=top_k, **options)
            return tuple(self.gather(values, trained) for values in top)
        routing = None if self.router_log is None else self.router_log.of_rows(trained.local_n)
        logprobs_r, entropy_r = token_logprobs(rows_rD, targets_T=tokens.targets_r, **options)
        student_RK = None
        if tokens.teacher_ids_rK is not None:
            student_rK = chosen_logprobs(rows_rD, ids_TK=tokens.teacher_ids_rK, **options)
            student_RK = self.gather(student_rK, trained)
        entropy_r = entropy_r if tokens.entropy_in_loss else entropy_r.detach()
        logprobs_R, entropy_R = self.gather(logprobs_r, trained), self.gather(entropy_r, trained)
        # FSDP hooks the tensors of tuples, not those of other classes.
        return logprobs_R, entropy_R, student_RK, *(routing or (None, None))

    def _output_head(self) -> OutputHead:
        head = output_head(self.model)
        return head if self.vocabulary is None else head.first_tokens(self.vocabulary)


def share_pack(packed: PackedBatch, *, grid: Grid, cost: RowCost) -> PackShare:
    """This rank's share of a pack."""
    layout, cuts = packed.layout, (0, len(packed.token_ids_N))
    if grid.shape.context > 1:
        positions_N = layout.position_ids_N.cpu().numpy()
        cuts = plan_cuts(positions_N, ranks=grid.shape.context, cost=cost)
        layout = cut_layout(layout, cuts, rank=grid.context, group=grid.context_mesh.get_group())
    return PackShare(
        token_ids_n=packed.token_ids_N[cuts[grid.context] : cuts[grid.context + 1]],
        layout=layout,
        trained=share_rows(packed.rows_T, cuts, grid=grid),
        last=share_rows(packed.last_rows_B, cuts, grid=grid),
    )


def share_rows(selected_R: Tensor, cuts: Sequence[int], *, grid: Grid) -> RowShare:
    """This rank's share of selected rows, which are divided over `tensor`."""
    if grid.shape.ranks_per_replica == 1:
        return RowShare(selected_R, selected_R, None, (len(selected_R),), None)
    context_R = np.searchsorted(np.asarray(cuts), selected_R.cpu().numpy(), side="right") - 1
    by_context = [np.flatnonzero(context_R == context) for context in range(grid.shape.context)]
    shares = [share for rows in by_context for share in np.array_split(rows, grid.shape.tensor)]
    device, start = selected_R.device, cuts[grid.context]
    own_r = torch.as_tensor(shares[grid.rank_in_replica]).to(device)
    return RowShare(
        local_n=selected_R[torch.as_tensor(by_context[grid.context]).to(device)] - start,
        rows_r=selected_R[own_r] - start,
        selected_r=own_r,
        sizes=tuple(len(share) for share in shares),
        inverse_R=torch.as_tensor(np.argsort(np.concatenate(shares))).to(device),
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
