"""The waiting requests: which of them goes to an engine next. Pure.

A request is one generation of a sample, so a sample waits here at most once. In this order:

    deadline   the version at which its group must be trained: the smaller first
    started    a sample that has tokens already (a further turn, or one that was interrupted) before
               a new one: it holds a place, and perhaps a cache
    length     where asked for, the longest first, so that no long one is left for the end
    id

Taking out in the middle only marks: the heap drops a marked entry when it comes up, and is built
anew when more than half of it is marked. So each call costs O(log waiting), amortised.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from rollick.types import SampleId

Order = Literal["oldest", "longest"]

_Entry = tuple[int, bool, float, SampleId, int]


class RequestQueue:
    """Requests that wait for an engine, each by its sample's id."""

    def __init__(self, *, lookahead: int = 64) -> None:
        """`lookahead` is how many requests a `pop` offers to `fits` at most: its cost must not grow
        with the queue when nothing fits."""
        self._lookahead = lookahead
        self._heap: list[_Entry] = []
        self._waiting: dict[SampleId, _Entry] = {}
        self._pushes = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, uid: SampleId) -> bool:
        return uid in self._waiting

    def push(
        self,
        uid: SampleId,
        *,
        deadline: int,
        tokens: float,
        order: Order = "oldest",
        started: bool = False,
    ) -> None:
        """Let a request wait; one that waits already gets this place instead of the one it had.

        `tokens` is the predicted length; it counts with order "longest".
        """
        length = -tokens if order == "longest" else 0.0
        entry = (deadline, not started, length, uid, next(self._pushes))
        self._waiting[uid] = entry
        heappush(self._heap, entry)
        self._clear_marked()

    def pop(self, fits: Callable[[SampleId], bool] | None = None) -> SampleId | None:
        """Take the first request, or the first of the next few that fits; None if there is none."""
        passed: list[_Entry] = []
        found: SampleId | None = None
        while found is None and len(passed) < self._lookahead:
            entry = self._next_entry()
            if entry is None:
                break
            if fits is None or fits(entry[3]):
                found = entry[3]
                del self._waiting[found]
            else:
                passed.append(entry)
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def remove(self, uid: SampleId) -> bool:
        """Take a request out; False if it does not wait."""
        if self._waiting.pop(uid, None) is None:
            return False
        self._clear_marked()
        return True

    def _next_entry(self) -> _Entry | None:
        while self._heap:
            entry = heappop(self._heap)
            if self._waiting.get(entry[3]) is entry:
                return entry
        return None

    def _clear_marked(self) -> None:
        if len(self._heap) > 64 + 2 * len(self._waiting):
            self._heap = list(self._waiting.values())
            heapify(self._heap)
