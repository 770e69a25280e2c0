"""Plans packs in which the shared prefix of a group is computed once.

Samples of a prompt mostly begin with the same tokens, whose hidden states are equal and whose
gradients add up. The pack holds the prefix once, then the suffix of each sample. varlen.py supports
segment trees of any depth; this file plans two levels, prefix and suffix.

    group's samples   p q r a b | p q r c | p q r d e
    pack              p q r | c | a b | d e              (suffixes of equal length are adjacent)

Legend: B samples, N their concatenated tokens, C tokens of the pack.
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
    """The segments of a pack, and the mapping between its tokens and those of the samples."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """The parent of each segment; see `PackedLayout.of`."""
    source_C: IndexArray
    """The index of each token of the pack among the samples' tokens."""
    packed_index_N: IndexArray
    """The position in the pack of each sample token."""


def plan_unshared(lengths_B: npt.ArrayLike) -> PrefixPlan:
    """A pack of complete samples, in order."""
    lengths: list[int] = np.asarray(lengths_B).tolist()
    indices = np.arange(sum(lengths))
    return PrefixPlan(tuple(lengths), (ROOT,) * len(lengths), indices, indices)


def plan_prefixes(
    lengths_B: npt.ArrayLike, *, group_B: npt.ArrayLike, shared_B: npt.ArrayLike
) -> PrefixPlan:
    """The samples of a group share their first `shared_B` tokens. Prefixes and unshared samples are
    first, then the suffixes of each group. Segments are sorted by length, so that equal lengths are
    adjacent."""
    lengths: list[int] = np.asarray(lengths_B).tolist()
    shared: list[int] = np.asarray(shared_B).tolist()
    starts = np.cumsum([0, *lengths])
    root_members = [
        group
        for members in members_by_group(group_B)
        for group in ([members] if shared[members[0]] else [[b] for b in members])
    ]

    def root_length(members: Sequence[int]) -> int:
        return lengths[members[0]] if len(members) == 1 else shared[members[0]]

    root_members.sort(key=root_length)
    segments = [(ROOT, int(starts[members[0]]), root_length(members)) for members in root_members]
    for parent, members in enumerate(root_members):
        if len(members) > 1:
            prefix = root_length(members)
            for b in sorted(members, key=lambda b: lengths[b]):
                segments.append((parent, int(starts[b]) + prefix, lengths[b] - prefix))
    source_C = np.concatenate([np.arange(start, start + size) for _, start, size in segments])
    packed_index_N = np.empty(sum(lengths), np.int64)
    packed_index_N[source_C] = np.arange(len(source_C))
    for members in root_members:
        offsets = np.arange(root_length(members))
        for b in members[1:]:
            packed_index_N[starts[b] + offsets] = packed_index_N[starts[members[0]] + offsets]
    parents, _, sizes = zip(*segments, strict=True)
    return PrefixPlan(sizes, parents, source_C, packed_index_N)


def shared_lengths(
    token_ids_N: npt.ArrayLike,
    lengths_B: npt.ArrayLike,
    *,
    group_B: npt.ArrayLike,
    limit_B: npt.ArrayLike,
) -> IndexArray:
    """The length of the prefix that each sample shares with all others of its group: at most the
    smallest limit, which must leave each sample one more token; 0 for a group of one."""
    token_ids, limits = np.asarray(token_ids_N), np.asarray(limit_B)
    starts = np.concatenate([[0], np.cumsum(lengths_B)])
    shared_B = np.zeros(len(limits), np.int64)
    for members in members_by_group(group_B):
        if len(members) > 1:
            limit = int(limits[members].min())
            prefixes_BL = np.stack([token_ids[starts[b] : starts[b] + limit] for b in members])
            differs = (prefixes_BL != prefixes_BL[0]).any(axis=0)
            shared_B[members] = differs.argmax() if differs.any() else limit
    return shared_B


def members_by_group(group_B: npt.ArrayLike) -> list[list[int]]:
    """The indices of each group's samples; groups in the order of their first samples."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(np.asarray(group_B).tolist()):
        members.setdefault(group, []).append(index)
    return list(members.values())
