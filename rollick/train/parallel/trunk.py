"""What one rank computes of a pack: its rows, and the head of its part of the counted tokens.

    Pack -- share_of --> Share -- Trunk --> log-probs of all counted tokens of the pack

Rows are cut over `context`. The counted tokens whose rows are here are divided over `tensor`, whose
ranks all have these rows: each computes the head of some, so that no work over the vocabulary is
done twice. What the ranks of a pack find is gathered, and then each of them has all of it.

Legend: N rows of a pack, n those of them on this rank, T counted tokens, t those of them whose head
is computed here, K likeliest tokens of a position, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from rollick.data.batch import Batch
from rollick.models.attention import PackedLayout
from rollick.models.head import chosen_logprobs, output_head, token_logprobs
from rollick.train.microbatch import Pack
from rollick.train.parallel.balance import RowCost
from rollick.train.parallel.context import cut_layout, plan_cuts
from rollick.train.parallel.exchange import gather_rows, shared_input
from rollick.train.parallel.mesh import Grid
from rollick.train.routing import RouterLog, Routing


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What this rank computes of a pack."""

    token_ids_n: torch.Tensor
    layout: PackedLayout
    counted_n: torch.Tensor
    """Rows here that predict a counted token, once for each one."""
    rows_t: torch.Tensor
    """Those of them whose head is computed here."""
    targets_t: torch.Tensor
    temperature_t: torch.Tensor
    chosen_tK: torch.Tensor | None
    """The teacher's likeliest tokens."""
    sizes: tuple[int, ...]
    """t of each rank that works on this pack."""
    inverse_T: torch.Tensor | None
    """Puts what these ranks found, end to end, into the order of the counted tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What a forward gave, of all counted tokens of a pack."""

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    student_TK: torch.Tensor | None
    routing: Routing | None
    """Of the counted rows that are here."""


class Trunk(nn.Module):
    """The model with its head over the vocabulary as one call, so that all of it is sharded."""

    def __init__(self, model: nn.Module, grid: Grid, *, chunk: int, routers: bool) -> None:
        super().__init__()
        self.model = model
        self.grid = grid
        self.chunk = chunk
        self.log = RouterLog(model) if routers else None

    def forward(self, share: Share, entropy_in_loss: bool) -> tuple[torch.Tensor | None, ...]:
        """(log-probs, entropy, student, expert counts, expert sums); the last three may be None."""
        hidden_nD = self._hidden(share)
        routing = None if self.log is None else self.log.of_rows(share.counted_n)
        if self.grid.shape.tensor > 1:
            hidden_nD = shared_input(hidden_nD, self.grid.tensors.get_group())
        weight_VD, bias_V = output_head(self.model)
        head: dict[str, Any] = {"weight_VD": weight_VD, "bias_V": bias_V, "chunk": self.chunk}
        rows_tD = hidden_nD.index_select(0, share.rows_t)
        logprobs_t, entropy_t = token_logprobs(
            rows_tD, targets_T=share.targets_t, temperature_T=share.temperature_t, **head
        )
        student_tK = None
        if share.chosen_tK is not None:
            student_tK = chosen_logprobs(
                rows_tD, ids_TK=share.chosen_tK, temperature_T=share.temperature_t, **head
            )
        entropy_t = entropy_t if entropy_in_loss else entropy_t.detach()
        gathered = (self._whole(each, share) for each in (logprobs_t, entropy_t, student_tK))
        return *gathered, *(routing or (None, None))

    def _hidden(self, share: Share) -> torch.Tensor:
        decoder: Any = self.model.base_model

        def run() -> torch.Tensor:
            return decoder(
                input_ids=share.token_ids_n[None],
                position_ids=share.layout.position_ids_N[None],
                use_cache=False,
                layout=share.layout,
            ).last_hidden_state[0]

        if self.log is None:
            return run()
        with self.log.recording():
            return run()

    def _whole(self, found_t: torch.Tensor | None, share: Share) -> torch.Tensor | None:
        """Of all counted tokens of the pack, on every rank that works on it."""
        if found_t is None:
            return None
        if share.inverse_T is None:
            return found_t.clone()  # A view would lose the hook that begins the backward.
        every = gather_rows(found_t, share.sizes, self.grid.copies.get_group())
        return every.index_select(0, share.inverse_T)


def share_of(packed: Pack, part: Batch, *, grid: Grid, cost: RowCost) -> Share:
    """Rows are cut over `context`; the counted tokens of those here over `tensor`."""
    chosen_TK = None
    if part.teacher_ids_NK is not None:
        ids = np.asarray(part.teacher_ids_NK[packed.places_T], np.int64)
        chosen_TK = torch.as_tensor(ids).to(packed.rows_T.device)
    if grid.shape.copies == 1:
        return Share(
            token_ids_n=packed.token_ids_N,
            layout=packed.layout,
            counted_n=packed.rows_T,
            rows_t=packed.rows_T,
            targets_t=packed.targets_T,
            temperature_t=packed.temperature_T,
            chosen_tK=chosen_TK,
            sizes=(len(packed.rows_T),),
            inverse_T=None,
        )
    positions_N = packed.layout.position_ids_N.cpu().numpy()
    cuts = plan_cuts(positions_N, ranks=grid.shape.context, cost=cost)
    rows_T = packed.rows_T.cpu().numpy()
    owner_T = np.searchsorted(np.asarray(cuts), rows_T, side="right") - 1
    here = [np.flatnonzero(owner_T == context) for context in range(grid.shape.context)]
    dealt = [some for each in here for some in np.array_split(each, grid.shape.tensor)]
    device = packed.rows_T.device
    start, stop = cuts[grid.context], cuts[grid.context + 1]
    mine = torch.as_tensor(dealt[grid.copy]).to(device)
    counted = torch.as_tensor(here[grid.context]).to(device)
    layout = packed.layout
    if grid.shape.context > 1:
        layout = cut_layout(layout, cuts, rank=grid.context, group=grid.contexts.get_group())
    return Share(
        token_ids_n=packed.token_ids_N[start:stop],
        layout=layout,
        counted_n=packed.rows_T[counted] - start,
        rows_t=packed.rows_T[mine] - start,
        targets_t=packed.targets_T[mine],
        temperature_t=packed.temperature_T[mine],
        chosen_tK=None if chosen_TK is None else chosen_TK[mine],
        sizes=tuple(len(each) for each in dealt),
        inverse_T=torch.as_tensor(np.argsort(np.concatenate(dealt))).to(device),
    )
