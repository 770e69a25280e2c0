"""The queue of requests: which of them goes to an engine next. Pure.

A request is one generation of a sample, so a sample has at most one request here. The order is

    deadline   the version at which its group must be trained: the smallest first
    started    a sample that has tokens already (a further turn, or one that was interrupted) before
               a new one: its group's slot and perhaps its KV cache are in use
    length     with order "longest", the longest first, so that it does not end the step alone
    id

Requests of one group with the same rank share a *bucket*, and only buckets are ordered. A bucket
that was emptied by `remove` stays in the heap until it comes up; the heap is rebuilt when more than
half of its entries are empty. So a call costs O(log buckets), amortised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from rollick.types import SampleId

QueueOrder = Literal["oldest", "longest"]

_Rank = tuple[int, bool, float, int]
"""Deadline, whether the sample is new, minus the length if it counts, group."""


@dataclass(frozen=True, slots=True)
class RequestNeeds:
    """What a request needs of an engine."""

    deadline: int
    tokens: float
    """Tokens that it is expected to hold in the KV cache: prompt and predicted response."""
    session: str | None = None
    """The key of an earlier request whose KV cache it can continue."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Requests of one group with one rank, ordered by id."""

    rank: _Rank
    requests: dict[SampleId, RequestNeeds] = field(default_factory=dict[SampleId, RequestNeeds])

    def add(self, uid: SampleId, needs: RequestNeeds) -> None:
        in_order = not self.requests or next(reversed(self.requests)) < uid
        self.requests[uid] = needs
        if not in_order:
            self.requests = dict(sorted(self.requests.items()))


class RequestQueue:
    """Requests that wait for an engine, by the id of their sample."""

    def __init__(self) -> None:
        self._heap: list[_Rank] = []
        self._buckets: dict[_Rank, _Bucket] = {}
        self._of_group: dict[int, list[_Bucket]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(
        self,
        uid: SampleId,
        needs: RequestNeeds,
        *,
        order: QueueOrder = "oldest",
        started: bool = False,
    ) -> None:
        """Add a request, or replace the one that the sample has."""
        if uid.group in self._of_group:
            self.remove(uid)
        length = -needs.tokens if order == "longest" else 0.0
        rank = (needs.deadline, not started, length, uid.group)
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = _Bucket(rank)
            self._of_group.setdefault(uid.group, []).append(bucket)
            heappush(self._heap, rank)
        bucket.add(uid, needs)
        self._count += 1

    def pop(self) -> tuple[SampleId, RequestNeeds] | None:
        """Remove and return the first request; None if the queue is empty."""
        while self._heap:
            bucket = self._buckets.get(self._heap[0])
            if bucket is not None:
                uid = next(iter(bucket.requests))
                return uid, self._take(uid, bucket)
            heappop(self._heap)
        return None

    def remove(self, uid: SampleId) -> bool:
        """Remove a sample's request; returns whether it had one."""
        bucket = self._bucket_of(uid)
        if bucket is None:
            return False
        self._take(uid, bucket)
        if len(self._heap) > 64 + 2 * len(self._buckets):
            self._heap = list(self._buckets)
            heapify(self._heap)
        return True

    def _bucket_of(self, uid: SampleId) -> _Bucket | None:
        return next((b for b in self._of_group.get(uid.group, ()) if uid in b.requests), None)

    def _take(self, uid: SampleId, bucket: _Bucket) -> RequestNeeds:
        needs = bucket.requests.pop(uid)
        self._count -= 1
        if not bucket.requests:
            del self._buckets[bucket.rank]
            buckets = self._of_group[uid.group]
            buckets.remove(bucket)
            if not buckets:
                del self._of_group[uid.group]
        return needs
