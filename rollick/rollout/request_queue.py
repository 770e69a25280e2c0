"""The queue of requests: which of them goes to an engine next.

A request is one generation of a sample, so a sample has at most one request here. The order is

    deadline   the version at which its group must be trained: the smallest first
    started    a sample that has tokens already (a further turn, or one that was interrupted) before
               a new one: its group's slot and perhaps its KV cache are in use
    length     with order "longest", the longest first, so that it does not end the step alone
    id

A removed request stays in the heap until it reaches the top; the heap is rebuilt when more than
half of its entries were removed. So a call costs O(log requests), amortised.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from rollick.types import SampleId

QueueOrder = Literal["oldest", "longest"]

_Rank = tuple[int, bool, float, SampleId]
"""Deadline, whether the sample is new, minus the length if it counts, id."""


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """What a request needs of an engine."""

    deadline: int
    tokens: float
    """Tokens that it is expected to hold in the KV cache: prompt and predicted response."""
    session: str | None = None
    """The key of an earlier request whose KV cache it can continue."""


class RequestQueue:
    """Requests that wait for an engine, by the id of their sample."""

    def __init__(self) -> None:
        self._heap: list[_Rank] = []
        self._waiting: dict[SampleId, tuple[_Rank, RequestNeeds]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(
        self,
        uid: SampleId,
        needs: RequestNeeds,
        *,
        order: QueueOrder = "oldest",
        started: bool = False,
    ) -> None:
        """Add a request, or replace the one that the sample has."""
        self.remove(uid)
        length = -needs.tokens if order == "longest" else 0.0
        rank = (needs.deadline, not started, length, uid)
        self._waiting[uid] = rank, needs
        heappush(self._heap, rank)

    def pop(self) -> tuple[SampleId, RequestNeeds] | None:
        """Remove and return the first request; None if the queue is empty."""
        while self._heap:
            rank = heappop(self._heap)
            uid = rank[-1]
            waiting = self._waiting.get(uid)
            if waiting is not None and waiting[0] is rank:
                del self._waiting[uid]
                return uid, waiting[1]
        return None

    def remove(self, uid: SampleId) -> bool:
        """Remove a sample's request; returns whether it had one."""
        if self._waiting.pop(uid, None) is None:
            return False
        if len(self._heap) > 64 + 2 * len(self._waiting):
            self._heap = [rank for rank, _ in self._waiting.values()]
            heapify(self._heap)
        return True
