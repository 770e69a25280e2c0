"""How a batch is divided over the ranks of a role, and how their results come back. Pure.

    Batch -> mini-batches -> the rows of each replica (balance.py) -> a share for each rank
          -> (workers) -> results for these rows -> gather_tokens, gather_samples

No rank receives more than it computes. Ranks that compute the same rows together (the axes context
and tensor) get equal shares. No divisibility rules: 10 samples over 3 ranks are 4, 3 and 3. The
weights of a batch are global, so losses and gradients of the parts just add up.

Shapes: B samples, N tokens over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollick.config.schema import Recipe
from rollick.data.batch import Batch, BatchShare
from rollick.trainer.microbatch import sample_prefixes, trained_tokens
from rollick.trainer.parallel.balance import RowCost, plan_ranks

SplitPlan = tuple[tuple[int, ...], ...]
"""For each replica, its rows of the batch, ascending. Every row occurs once."""
ReplicaResults = Sequence[npt.NDArray[Any] | None]
"""Results by replica; that of a replica without rows may be None."""
PER_TOKEN = RowCost(token=1.0, pair=0.0)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How a role divides batches: over time into mini-batches, and over its ranks."""

    copies: int = 1
    """Ranks that compute the same rows."""
    minibatches: int = 1
    keep_groups: bool = False
    """A loss of pairs: rows of a group stay together."""
    share_prefix: bool = False
    """Rows of a group with a common prefix stay together, unless that is too unequal."""
    cost: RowCost = PER_TOKEN
    speeds: tuple[float, ...] = ()
    """Of the ranks, compared with each other; none: all are as fast."""

    @classmethod
    def of(cls, recipe: Recipe, cost: RowCost = PER_TOKEN) -> BatchSplit:
        """That of the recipe's policy."""
        train = recipe.train
        return cls(
            copies=train.parallel.copies,
            minibatches=train.minibatches,
            keep_groups=recipe.compares_pairs,
            share_prefix=train.share_prefix,
            cost=cost,
        )

    def shares(self, batch: Batch, *, ranks: int) -> list[BatchShare]:
        """The share of each rank. Ranks of one replica get the same object."""
        replicas: list[list[Batch]] = [[] for _ in range(ranks // self.copies)]
        for part in self._minibatches(batch):
            for replica, rows in zip(replicas, self.plan(part, ranks=ranks), strict=True):
                replica.append(part if len(rows) == part.samples else part.take(rows))
        shares = [BatchShare(tuple(minibatches)) for minibatches in replicas]
        return [shares[rank // self.copies] for rank in range(ranks)]

    def plan(self, batch: Batch, *, ranks: int) -> SplitPlan:
        """Balanced by cost. The first replica has all rows without a trained token."""
        replicas = ranks // self.copies
        if replicas == 1:
            return (tuple(range(batch.samples)),)
        useful: list[int] = np.unique(trained_tokens(batch)[1]).tolist()
        part = batch.take(useful)
        planned = plan_ranks(
            part.lengths_B.tolist(),
            ranks=replicas,
            cost=self.cost,
            groups_B=part.group_B.tolist(),
            shared_B=sample_prefixes(part).tolist() if self.share_prefix else [0] * part.samples,
            keep_groups=self.keep_groups,
            shares=self._replica_speeds(ranks),
        )
        first, *others = ([useful[index] for index in rows] for rows in planned)
        first = sorted({*first, *range(batch.samples)}.difference(*others))
        return tuple(map(tuple, (first, *others)))

    def _replica_speeds(self, ranks: int) -> Sequence[float]:
        """That of the slowest rank of each replica. Those of another number of ranks say nothing
        about these."""
        if len(self.speeds) != ranks:
            return ()
        starts = range(0, ranks, self.copies)
        return [min(self.speeds[start : start + self.copies]) for start in starts]

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        return minibatches(batch, count=self.minibatches, keep_groups=self.keep_groups)


def minibatches(batch: Batch, *, count: int, keep_groups: bool) -> Iterator[Batch]:
    """Split a batch into at most `count` mini-batches. Weights are those of the full batch, so
    those of 1/M of it are scaled by M."""
    _, group_B = np.unique(batch.group_B, return_inverse=True)
    number_B = group_B if keep_groups else np.arange(batch.samples)
    parts = min(count, int(number_B.max()) + 1)
    if parts == 1:
        yield batch
        return
    for part in range(parts):
        chosen = np.flatnonzero(number_B % parts == part)
        yield batch.take(chosen.tolist()).scaled(parts)


def gather_tokens(parts: ReplicaResults, batch: Batch, plan: SplitPlan) -> npt.NDArray[Any]:
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


def gather_samples(parts: ReplicaResults, batch: Batch, plan: SplitPlan) -> npt.NDArray[np.float64]:
    """[B]: one number a sample from the ranks, in the order of the batch."""
    gathered_B = np.empty(batch.samples)
    for part, samples in zip(parts, plan, strict=True):
        if part is not None:
            gathered_B[list(samples)] = part
    return gathered_B
