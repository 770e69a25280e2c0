"""The waiting requests: which of them goes to an engine next. Pure.

A request is one generation of a sample, so a sample waits here at most once. In this order:

    deadline   the version at which its group must be trained: the smaller first
    started    a sample that has tokens already (a further turn, or one that was interrupted) before
               a new one: it holds a place, and perhaps a cache
    length     where asked for, the longest first, so that no long one is left for the end
    id

The samples of a group that wait alike share one *line*, and only lines are ordered: with a million
samples waiting, what is searched and sorted is an eighth of that. A line that was emptied in the
middle is only marked: the heap drops it when it comes up, and is built anew when more than half of
it is marked. So each call costs O(log lines), amortised, and O(size of a group) at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from rollick.types import SampleId

Order = Literal["oldest", "longest"]

_Rank = tuple[int, bool, float, int]
"""Deadline, whether it is new, minus the length that counts, group: lines go by these."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a request asks for: its deadline, tokens that it may hold, whose cache it has."""

    deadline: int
    tokens: float
    session: str | None = None


class _Line:
    """Samples of one group that wait with one rank, in the order of their ids."""

    __slots__ = ("rank", "wants")

    def __init__(self, rank: _Rank) -> None:
        self.rank = rank
        self.wants: dict[SampleId, Want] = {}

    def add(self, uid: SampleId, want: Want) -> None:
        in_order = not self.wants or next(reversed(self.wants)) < uid
        self.wants[uid] = want
        if not in_order:
            self.wants = dict(sorted(self.wants.items()))


class RequestQueue:
    """Requests that wait for an engine, each by its sample's id."""

    def __init__(self) -> None:
        self._heap: list[_Rank] = []
        self._lines: dict[_Rank, _Line] = {}
        self._of_group: dict[int, list[_Line]] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __contains__(self, uid: SampleId) -> bool:
        return self._line_of(uid) is not None

    def push(
        self, uid: SampleId, want: Want, *, order: Order = "oldest", started: bool = False
    ) -> None:
        """Let a request wait; one that waits already gets this place instead of the one it had.

        Its tokens, which are predicted, count with order "longest".
        """
        if uid.group in self._of_group:
            self.remove(uid)
        length = -want.tokens if order == "longest" else 0.0
        rank = (want.deadline, not started, length, uid.group)
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = _Line(rank)
            self._of_group.setdefault(uid.group, []).append(line)
            heappush(self._heap, rank)
        line.add(uid, want)
        self._waiting += 1

    def pop(self) -> tuple[SampleId, Want] | None:
        """Take the first request; None if there is none."""
        while self._heap:
            line = self._lines.get(self._heap[0])
            if line is None:
                heappop(self._heap)
                continue
            uid = next(iter(line.wants))
            want = self._take(uid, line)
            if not line.wants:
                heappop(self._heap)
            return uid, want
        return None

    def remove(self, uid: SampleId) -> bool:
        """Take a request out; False if it does not wait."""
        line = self._line_of(uid)
        if line is None:
            return False
        self._take(uid, line)
        if len(self._heap) > 64 + 2 * len(self._lines):
            self._heap = list(self._lines)
            heapify(self._heap)
        return True

    def _line_of(self, uid: SampleId) -> _Line | None:
        for line in self._of_group.get(uid.group, ()):
            if uid in line.wants:
                return line
        return None

    def _take(self, uid: SampleId, line: _Line) -> Want:
        """Out of its line; a line without a request is nowhere but in the heap."""
        want = line.wants.pop(uid)
        self._waiting -= 1
        if not line.wants:
            del self._lines[line.rank]
            lines = self._of_group[uid.group]
            lines.remove(line)
            if not lines:
                del self._of_group[uid.group]
        return want
