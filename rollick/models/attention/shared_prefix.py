"""Plans packs in which the shared prefix of a group is computed once.

Samples of a prompt mostly begin with the same tokens, whose hidden states are equal and whose
gradients add up. The pack holds the prefix once, then each sample's rest; varlen.py computes it as
segments with parents, of any depth, of which two levels are planned here.

    group's samples   p q r a b | p q r c | p q r d e
    pack              p q r | c | a b | d e              (rests of one length are adjacent)

Legend: B samples, N their tokens end to end, C tokens that are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollick.models.attention.varlen import ROOT

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """The segments of a pack, and the mapping between its tokens and the samples'."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each segment: see `PackedLayout.of`."""
    source_C: IndexArray
    """The index of each computed token among those of the samples."""
    row_N: IndexArray
    """The row that computes each token of the samples."""


def plan_unshared(lengths_B: npt.ArrayLike) -> PrefixPlan:
    """Every sample separately, in the given order."""
    lengths: list[int] = np.asarray(lengths_B).tolist()
    every = np.arange(sum(lengths))
    return PrefixPlan(tuple(lengths), (ROOT,) * len(lengths), source_C=every, row_N=every)


def plan_prefixes(
    lengths_B: npt.ArrayLike, *, group_B: npt.ArrayLike, shared_B: npt.ArrayLike
) -> PrefixPlan:
    """The samples of a group share their first `shared_B` tokens. Equal lengths are adjacent:
    prefixes and unshared samples first, then the rests of each group."""
    lengths: list[int] = np.asarray(lengths_B).tolist()
    shared: list[int] = np.asarray(shared_B).tolist()
    starts = np.cumsum([0, *lengths])
    prefix_groups = [
        group
        for members in members_by_group(group_B)
        for group in ([members] if shared[members[0]] else [[b] for b in members])
    ]

    def first_length(members: Sequence[int]) -> int:
        return lengths[members[0]] if len(members) == 1 else shared[members[0]]

    prefix_groups.sort(key=first_length)
    segments = [(ROOT, int(starts[members[0]]), first_length(members)) for members in prefix_groups]
    for parent, members in enumerate(prefix_groups):
        if len(members) > 1:
            first = first_length(members)
            for b in sorted(members, key=lambda b: lengths[b]):
                segments.append((parent, int(starts[b]) + first, lengths[b] - first))
    source_C = np.concatenate([np.arange(start, start + size) for _, start, size in segments])
    row_N = np.empty(sum(lengths), np.int64)
    row_N[source_C] = np.arange(len(source_C))
    for members in prefix_groups:
        common = np.arange(first_length(members))
        for b in members[1:]:
            row_N[starts[b] + common] = row_N[starts[members[0]] + common]
    parents, _, sizes = zip(*segments, strict=True)
    return PrefixPlan(sizes, parents, source_C, row_N)


def shared_lengths(
    token_ids_N: npt.ArrayLike,
    lengths_B: npt.ArrayLike,
    *,
    group_B: npt.ArrayLike,
    limit_B: npt.ArrayLike,
) -> IndexArray:
    """The length of the prefix that each sample shares with all others of its group: at most the
    smallest limit, which must leave each sample a token of its own; 0 for a group of one."""
    token_ids, limits = np.asarray(token_ids_N), np.asarray(limit_B)
    starts = np.concatenate([[0], np.cumsum(lengths_B)])
    shared_B = np.zeros(len(limits), np.int64)
    for members in members_by_group(group_B):
        if len(members) > 1:
            limit = int(limits[members].min())
            rows = np.stack([token_ids[starts[b] : starts[b] + limit] for b in members])
            differs = (rows != rows[0]).any(axis=0)
            shared_B[members] = differs.argmax() if differs.any() else limit
    return shared_B


def members_by_group(group_B: npt.ArrayLike) -> list[list[int]]:
    """The indices of each group's samples; groups in order of their first one."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(np.asarray(group_B).tolist()):
        members.setdefault(group, []).append(index)
    return list(members.values())
