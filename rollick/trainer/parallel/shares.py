"""How a batch is divided over the ranks of a role, and how their results are gathered.

    Batch -> mini-batches -> the rows of each replica (plan_ranks) -> a share for each rank
          -> (workers) -> results for these rows -> gather_tokens, gather_samples

No rank receives more than it computes. Ranks that compute the same rows together (the axes context
and tensor) get equal shares. Sizes need not divide evenly: 10 samples over 3 ranks are 4, 3 and 3.
The weights of a batch are global, so losses and gradients of the shares are summed.

Samples are divided by cost: each token costs its linear layers, and attention to each token before
it. Samples that share a prefix stay on one rank, unless they cost more than its share.

Shapes: B samples, N tokens over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.config.schema import Recipe
from rollick.data.batch import Batch, BatchShare
from rollick.models.attention.shared_prefix import members_by_group
from rollick.trainer.microbatch import sample_prefixes, trained_tokens
from rollick.types import RoleName

SplitPlan = tuple[tuple[int, ...], ...]
"""For each replica, its rows of the batch, ascending. Every row occurs once."""
ReplicaResults = Sequence[npt.NDArray[Any] | None]
"""Results by replica; that of a replica without rows may be None."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Operations of a token: in linear layers, and for each token that it attends to."""

    token: float
    pair: float

    @classmethod
    def of(cls, config: Any) -> RowCost:
        """The cost for a model, from the sizes in its transformers config."""
        hidden_size, heads = int(config.hidden_size), int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        mlp_size = int(getattr(config, "intermediate_size", None) or 4 * hidden_size)
        top_k = int(getattr(config, "num_experts_per_tok", None) or 0)
        if top_k:
            mlp_size = top_k * int(getattr(config, "moe_intermediate_size", None) or mlp_size)
        attention = 2 * hidden_size * head_dim * (2 * heads + 2 * kv_heads)
        return cls(token=attention + 6 * hidden_size * mlp_size, pair=4 * heads * head_dim)

    def of_rows(self, start: int, stop: int) -> float:
        """The cost of the tokens of a sequence at positions [start, stop)."""
        pairs = (stop * (stop + 1) - start * (start + 1)) / 2
        return self.token * (stop - start) + self.pair * pairs


PER_TOKEN = RowCost(token=1.0, pair=0.0)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How a role divides batches: over time into mini-batches, and over its ranks."""

    ranks_per_replica: int = 1
    """Ranks that compute the same rows together."""
    minibatches: int = 1
    keep_groups: bool = False
    """Rows of a group stay together, for a loss that compares pairs."""
    share_prefix: bool = False
    """Rows that share a prefix stay together, unless they cost more than a rank's share."""
    cost: RowCost = PER_TOKEN
    speeds: tuple[float, ...] = ()
    """Relative speed of each rank; empty: all are equal."""

    @classmethod
    def of(
        cls, recipe: Recipe, cost: RowCost = PER_TOKEN, *, role: RoleName = "policy"
    ) -> BatchSplit:
        """The split for a role of the recipe."""
        train, parallel = recipe.train, recipe.parallel_of(role)
        return cls(
            ranks_per_replica=parallel.ranks_per_replica if parallel else 1,
            minibatches=train.minibatches,
            keep_groups=recipe.compares_pairs,
            share_prefix=train.share_prefix,
            cost=cost,
        )

    def shares(self, batch: Batch, *, ranks: int) -> list[BatchShare]:
        """The share of each rank. Ranks of one replica get the same object."""
        replicas: list[list[Batch]] = [[] for _ in range(ranks // self.ranks_per_replica)]
        keep_groups = self.keep_groups
        for part in minibatches(batch, count=self.minibatches, keep_groups=keep_groups):
            for replica, rows in zip(replicas, self.plan(part, ranks=ranks), strict=True):
                replica.append(part if len(rows) == part.rows else part.take(rows))
        shares = [BatchShare(tuple(parts)) for parts in replicas]
        return [shares[rank // self.ranks_per_replica] for rank in range(ranks)]

    def plan(self, batch: Batch, *, ranks: int) -> SplitPlan:
        """Divide the rows by cost. The first replica gets all rows without a trained token."""
        replicas = ranks // self.ranks_per_replica
        if replicas == 1:
            return (tuple(range(batch.rows)),)
        trained_rows: list[int] = np.unique(trained_tokens(batch)[1]).tolist()
        trained = batch.take(trained_rows)
        rows_by_replica = plan_ranks(
            trained.lengths_B.tolist(),
            ranks=replicas,
            cost=self.cost,
            groups_B=trained.group_B.tolist(),
            shared_B=sample_prefixes(trained).tolist() if self.share_prefix else [0] * trained.rows,
            keep_groups=self.keep_groups,
            speeds=self._replica_speeds(ranks),
        )
        first, *others = ([trained_rows[index] for index in rows] for rows in rows_by_replica)
        first = sorted({*first, *range(batch.rows)}.difference(*others))
        return tuple(map(tuple, (first, *others)))

    def _replica_speeds(self, ranks: int) -> Sequence[float]:
        """The speed of the slowest rank of each replica; empty if `speeds` was measured with
        another number of ranks."""
        if len(self.speeds) != ranks:
            return ()
        starts = range(0, ranks, self.ranks_per_replica)
        return [min(self.speeds[start : start + self.ranks_per_replica]) for start in starts]


def plan_ranks(
    lengths_B: Sequence[int],
    *,
    ranks: int,
    cost: RowCost,
    groups_B: Sequence[int],
    shared_B: Sequence[int],
    keep_groups: bool = False,
    speeds: Sequence[float] = (),
) -> list[list[int]]:
    """The samples of each rank, in ascending order; some ranks have none if there are too few.
    `speeds`: relative speed of each rank; empty: all are equal.

    `shared_B` is the length of the prefix that a sample shares with its group. A group that costs
    more than a rank's share is divided, but never with `keep_groups`.
    """

    def cost_of(members: Sequence[int]) -> float:
        shared = shared_B[members[0]]
        return cost.of_rows(0, shared) + sum(cost.of_rows(shared, lengths_B[b]) for b in members)

    units: list[tuple[float, list[int]]] = []
    groups = members_by_group(groups_B)
    total = sum(map(cost_of, groups))
    for members in groups:
        num_pieces = len(members)
        if keep_groups:
            num_pieces = 1
        elif shared_B[members[0]]:
            num_pieces = min(num_pieces, ceil(cost_of(members) * ranks / max(total, 1.0) - 1e-9))
        # Round-robin, longest first: the pieces cost about the same.
        ordered = sorted(members, key=lambda b: (-lengths_B[b], b))
        pieces = [ordered[first::num_pieces] for first in range(max(1, num_pieces))]
        units += [(cost_of(piece), piece) for piece in pieces]
    return _assign(units, speeds or [1.0] * ranks)


def _assign(units: Sequence[tuple[float, list[int]]], speeds: Sequence[float]) -> list[list[int]]:
    """Greedy: the most expensive unit first, each to the rank that would finish it first."""
    assigned: list[list[int]] = [[] for _ in speeds]
    loads = [0.0 for _ in speeds]
    for cost, samples in sorted(units, key=lambda unit: (-unit[0], unit[1])):
        finish_times = [(load + cost) / speed for load, speed in zip(loads, speeds, strict=True)]
        rank = finish_times.index(min(finish_times))
        assigned[rank] += samples
        loads[rank] += cost
    return [sorted(rank_samples) for rank_samples in assigned]


def minibatches(batch: Batch, *, count: int, keep_groups: bool) -> Iterator[Batch]:
    """Split a batch into at most `count` mini-batches. Weights are relative to the full batch, so
    those of M mini-batches are multiplied by M."""
    _, group_B = np.unique(batch.group_B, return_inverse=True)
    unit_B = group_B if keep_groups else np.arange(batch.rows)
    num_minibatches = min(count, int(unit_B.max()) + 1)
    if num_minibatches == 1:
        yield batch
        return
    for index in range(num_minibatches):
        rows = np.flatnonzero(unit_B % num_minibatches == index)
        yield batch.take(rows.tolist()).scale_weights(num_minibatches)


def gather_tokens(parts: ReplicaResults, batch: Batch, plan: SplitPlan) -> npt.NDArray[Any]:
    """[N] or [N, K]: per-token results of the ranks, in the order of the batch."""
    arrays = [part for part in parts if part is not None]
    dtype = np.result_type(*arrays) if arrays else np.dtype(np.float32)
    gathered_N = np.empty((batch.tokens, *(arrays[0].shape[1:] if arrays else ())), dtype)
    for part, samples in zip(parts, plan, strict=True):
        is_own_N = np.repeat(np.isin(np.arange(batch.rows), samples), batch.lengths_B)
        returned, expected = 0 if part is None else len(part), int(is_own_N.sum())
        if returned != expected:
            raise ValueError(f"a rank returned {returned} values for its {expected} tokens")
        if part is not None:
            gathered_N[is_own_N] = part
    return gathered_N


def gather_samples(parts: ReplicaResults, batch: Batch, plan: SplitPlan) -> npt.NDArray[np.float64]:
    """[B]: one number per sample from the ranks, in the order of the batch."""
    gathered_B = np.empty(batch.rows)
    for part, samples in zip(parts, plan, strict=True):
        if part is not None:
            gathered_B[list(samples)] = part
    return gathered_B
