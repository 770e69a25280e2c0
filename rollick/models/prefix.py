"""What the samples of a group begin with, computed once: which tokens a pack holds, and where.

Pure, on numpy arrays. Samples of a group (of one prompt) mostly begin with the same tokens. A
token's hidden state depends on the tokens before it alone, so those of the common part are the
same for all of them, and their gradients add up. The pack holds the common part once, then what
each sample goes on with; attention.py computes it as segments with parents, of any depth, of which
two levels are planned here.

    group's samples   p q r a b | p q r c | p q r d e
    pack              p q r | c | a b | d e              (tails of one length are neighbours)

Legend: B samples, N their tokens end to end, C tokens that are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollick.models.attention import ROOT

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPlan:
    """The segments of a pack, and how its tokens and those of the samples find each other."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """Of each segment: see `PackedLayout.of`."""
    source_C: Places
    """Where each computed token stands among those of the samples."""
    row_N: Places
    """Where each token of the samples is computed."""


def plan_whole(lengths_B: npt.ArrayLike) -> PrefixPlan:
    """Every sample by itself, in the given order."""
    lengths: list[int] = np.asarray(lengths_B).tolist()
    every = np.arange(sum(lengths))
    return PrefixPlan(tuple(lengths), (ROOT,) * len(lengths), source_C=every, row_N=every)


def plan_prefixes(
    lengths_B: npt.ArrayLike, *, group_B: npt.ArrayLike, shared_B: npt.ArrayLike
) -> PrefixPlan:
    """The samples of a group have their first `shared_B` tokens (see `shared_lengths`) in common.

    Equal lengths are neighbours: beginnings and whole samples first, then the tails of each group.
    """
    lengths: list[int] = np.asarray(lengths_B).tolist()
    shared: list[int] = np.asarray(shared_B).tolist()
    starts = np.cumsum([0, *lengths])
    families = [
        family
        for members in members_by_group(group_B)
        for family in ([members] if shared[members[0]] else [[b] for b in members])
    ]

    def beginning(members: Sequence[int]) -> int:
        return lengths[members[0]] if len(members) == 1 else shared[members[0]]

    families.sort(key=beginning)
    segments = [(ROOT, int(starts[members[0]]), beginning(members)) for members in families]
    for parent, members in enumerate(families):
        if len(members) > 1:
            first = beginning(members)
            for b in sorted(members, key=lambda b: lengths[b]):
                segments.append((parent, int(starts[b]) + first, lengths[b] - first))
    source_C = np.concatenate([np.arange(start, start + size) for _, start, size in segments])
    row_N = np.empty(sum(lengths), np.int64)
    row_N[source_C] = np.arange(len(source_C))
    for members in families:
        common = np.arange(beginning(members))
        for b in members[1:]:
            row_N[starts[b] + common] = row_N[starts[members[0]] + common]
    return PrefixPlan(
        lengths=tuple(size for _, _, size in segments),
        parents=tuple(parent for parent, _, _ in segments),
        source_C=source_C,
        row_N=row_N,
    )


def shared_lengths(
    token_ids_N: npt.ArrayLike,
    lengths_B: npt.ArrayLike,
    *,
    group_B: npt.ArrayLike,
    limit_B: npt.ArrayLike,
) -> Places:
    """How many tokens each sample has in common with all others of its group, from the first on.

    At most the limit of any of them, which has to leave each a token of its own; 0 for a sample
    that is alone.
    """
    token_ids, limits = np.asarray(token_ids_N), np.asarray(limit_B)
    starts = np.concatenate([[0], np.cumsum(lengths_B)])
    shared_B = np.zeros(len(limits), np.int64)
    for members in members_by_group(group_B):
        if len(members) > 1:
            most = int(limits[members].min())
            beginnings = (token_ids[starts[b] : starts[b] + most] for b in members)
            shared_B[members] = _common(beginnings)
    return shared_B


def members_by_group(group_B: npt.ArrayLike) -> list[list[int]]:
    """The places of each group's samples; groups in order of their first one."""
    members: dict[int, list[int]] = {}
    for place, group in enumerate(np.asarray(group_B).tolist()):
        members.setdefault(group, []).append(place)
    return list(members.values())


def _common(beginnings: Iterable[npt.NDArray[np.integer]]) -> int:
    """Length of the longest common prefix of arrays of one length."""
    rows = np.stack(list(beginnings))
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else rows.shape[1]
