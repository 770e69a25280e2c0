"""How a batch is split over ranks and how results come back. Pure.

    Batch -> plan_split -> one Batch for each rank -> (workers) -> per-token parts -> gather_tokens

No divisibility rules: 10 samples over 3 ranks are 4, 3 and 3. The weights of a batch are global,
so losses and gradients of the parts just add up.
Shapes: B samples, N tokens over all of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.data.batch import Batch

SplitPlan = tuple[tuple[int, ...], ...]
"""For each rank, the places of its items, ascending. Every place occurs once."""
RankParts = Sequence[npt.NDArray[Any] | None]
"""Results by rank; the part of a rank that had no samples may be None."""


def plan_split(costs: Sequence[int], ranks: int) -> SplitPlan:
    """Balance by cost: the costliest item first, each to the rank with the least so far. Ties go to
    the rank with fewer items, then to the lower rank, so the plan is a function of the costs alone.
    With fewer items than ranks some parts are empty."""
    if ranks < 1:
        raise ValueError(f"cannot split over {ranks} ranks")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        load, count, rank = loads[0]
        parts[rank].append(item)
        heapq.heapreplace(loads, (load + costs[item], count + 1, rank))
    return tuple(tuple(sorted(part)) for part in parts)


def split_batch(
    batch: Batch, ranks: int, *, keep_groups: bool = False
) -> tuple[list[Batch], SplitPlan]:
    """One batch for each rank, balanced by tokens, and the plan to undo it. `keep_groups` gives all
    samples of a group to one rank, as a loss of pairs needs it."""
    keys = batch.group_B if keep_groups else np.arange(batch.samples)
    _, item_B = np.unique(keys, return_inverse=True)
    costs = np.bincount(item_B, weights=batch.lengths_B).astype(np.int64)
    items = plan_split(costs.tolist(), ranks)
    plan = tuple(tuple(np.flatnonzero(np.isin(item_B, part)).tolist()) for part in items)
    return [batch.take(part) for part in plan], plan


def gather_tokens(parts: RankParts, batch: Batch, plan: SplitPlan) -> npt.NDArray[Any]:
    """[N] or [N, K]: per-token results of the ranks, in the order of the batch."""
    arrays = [part for part in parts if part is not None]
    dtype = np.result_type(*arrays) if arrays else np.dtype(np.float32)
    gathered_N = np.empty((batch.tokens, *(arrays[0].shape[1:] if arrays else ())), dtype)
    for part, samples in zip(parts, plan, strict=True):
        own_N = np.repeat(np.isin(np.arange(batch.samples), samples), batch.lengths_B)
        found, expected = 0 if part is None else len(part), int(own_N.sum())
        if found != expected:
            raise ValueError(f"a rank returned {found} values for its {expected} tokens")
        if part is not None:
            gathered_N[own_N] = part
    return gathered_N


def gather_samples(parts: RankParts, batch: Batch, plan: SplitPlan) -> npt.NDArray[np.float64]:
    """[B]: one number a sample from the ranks, in the order of the batch."""
    gathered_B = np.empty(batch.samples)
    for part, samples in zip(parts, plan, strict=True):
        if part is not None:
            gathered_B[list(samples)] = part
    return gathered_B
