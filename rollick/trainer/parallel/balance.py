"""Divides samples over ranks by their cost. Pure.

A row costs its linear layers and, in attention, an amount for each row that it attends to. Samples
that share a prefix stay on one rank unless they cost more than a rank's part.

Legend: B samples, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rollick.models.attention.shared_prefix import members_by_group


@dataclass(frozen=True, slots=True)
class RowCost:
    """Operations of a row: in linear layers, and for each row that it attends to."""

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
        """Rows of a sequence at positions [start, stop)."""
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
    shares: Sequence[float] = (),
) -> list[list[int]]:
    """The samples of each rank, in ascending order; some ranks have none if there are too few.
    `shares`: how much of the work each rank gets, compared with the others; none: equal parts.

    `shared_B` is the length of the prefix that a sample shares with its group. A group that costs
    more than a rank's part is divided, but never with `keep_groups`.
    """

    def cost_of(members: Sequence[int]) -> float:
        shared = shared_B[members[0]]
        return cost.of_rows(0, shared) + sum(cost.of_rows(shared, lengths_B[b]) for b in members)

    units: list[tuple[float, list[int]]] = []
    complete = members_by_group(groups_B)
    total = sum(map(cost_of, complete))
    for members in complete:
        parts = len(members)
        if keep_groups:
            parts = 1
        elif shared_B[members[0]]:
            parts = min(parts, ceil(cost_of(members) * ranks / max(total, 1.0) - 1e-9))
        units += [(cost_of(piece), piece) for piece in _deal(members, lengths_B, parts)]
    return _assign(units, shares or [1.0] * ranks)


def _deal(members: Sequence[int], lengths_B: Sequence[int], parts: int) -> list[list[int]]:
    """The members round-robin, longest first, so that the pieces cost about the same."""
    ordered = sorted(members, key=lambda b: (-lengths_B[b], b))
    return [ordered[number::parts] for number in range(max(1, parts))]


def _assign(units: Sequence[tuple[float, list[int]]], shares: Sequence[float]) -> list[list[int]]:
    """The most expensive unit first, each to the rank that would be done with it first."""
    parts: list[list[int]] = [[] for _ in shares]
    loads = [0.0 for _ in shares]
    for size, unit in sorted(units, key=lambda each: (-each[0], each[1])):
        ends = [(load + size) / share for load, share in zip(loads, shares, strict=True)]
        rank = ends.index(min(ends))
        parts[rank] += unit
        loads[rank] += size
    return [sorted(part) for part in parts]
