"""Which samples go to which rank: by what they cost, not by how many they are. Pure.

A row costs its way through the layers and, in attention, a little for each row that it looks back
at. Samples that share a beginning stay together as long as that does not make one rank the last.

Legend: B samples, N rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rollick.models.prefix import members_by_group


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a row costs, in operations: in linear layers, and for each row that it sees."""

    token: float
    pair: float

    @classmethod
    def of(cls, config: Any) -> RowCost:
        """From the sizes in a model's own configuration."""
        hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
        size = int(getattr(config, "head_dim", None) or hidden // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        chosen = int(getattr(config, "num_experts_per_tok", None) or 0)
        if chosen:
            inner = chosen * int(getattr(config, "moe_intermediate_size", None) or inner)
        attention = 2 * hidden * size * (2 * heads + 2 * kv_heads)
        return cls(token=attention + 6 * hidden * inner, pair=4 * heads * size)

    def of_rows(self, start: int, stop: int) -> float:
        """Rows of a sequence from place `start` on, up to `stop`."""
        seen = (stop * (stop + 1) - start * (start + 1)) / 2
        return self.token * (stop - start) + self.pair * seen


def plan_ranks(
    lengths_B: Sequence[int],
    *,
    ranks: int,
    cost: RowCost,
    groups_B: Sequence[int],
    shared_B: Sequence[int],
    keep_groups: bool = False,
) -> list[list[int]]:
    """The samples of each rank, in ascending order; some have none where there are too few.

    `shared_B` is how many of its first rows a sample has in common with its group. A group that
    costs more than a rank's part is cut into pieces, but never with `keep_groups`.
    """
    units: list[tuple[float, list[int]]] = []
    whole = members_by_group(groups_B)
    total = sum(_cost(members, lengths_B, shared_B, cost) for members in whole)
    for members in whole:
        alone = not keep_groups and not shared_B[members[0]]
        parts = (
            1
            if keep_groups
            else ceil(_cost(members, lengths_B, shared_B, cost) * ranks / max(total, 1.0) - 1e-9)
        )
        pieces = (
            [[b] for b in members]
            if alone
            else _dealt(members, lengths_B, min(parts, len(members)))
        )
        units += [(_cost(piece, lengths_B, shared_B, cost), piece) for piece in pieces]
    return _packed(units, ranks)


def _cost(
    members: Sequence[int], lengths_B: Sequence[int], shared_B: Sequence[int], cost: RowCost
) -> float:
    shared = shared_B[members[0]]
    return cost.of_rows(0, shared) + sum(cost.of_rows(shared, lengths_B[b]) for b in members)


def _dealt(members: Sequence[int], lengths_B: Sequence[int], parts: int) -> list[list[int]]:
    """The members in turn, longest first, so that the pieces are much alike."""
    ordered = sorted(members, key=lambda b: (-lengths_B[b], b))
    return [ordered[number::parts] for number in range(max(1, parts))]


def _packed(units: Sequence[tuple[float, list[int]]], ranks: int) -> list[list[int]]:
    """The costliest unit first, each to the rank with the least so far."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for size, unit in sorted(units, key=lambda each: (-each[0], each[1])):
        load, rank = loads[0]
        parts[rank] += unit
        heapq.heapreplace(loads, (load + size, rank))
    return [sorted(part) for part in parts]
