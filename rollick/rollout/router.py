"""The router: which engine a request goes to, and how many an engine is sent.

    choose(uid) -> engine    reserves the tokens that the request is expected to hold there
    release(uid, load)       gives them back; a load snapshot also adapts the engine's limit

An engine decodes `slots` sequences at once. A few more queue inside the engine, so that a free slot
is refilled without a round trip; others wait here, for whichever engine is free first.

An engine that decodes slower than the others has a *weight* below 1 (relative_speeds.py): it counts
as that much fuller, and fewer requests queue inside it.

If the KV cache is smaller than what the slots can fill, a *limit* below the slots holds: it grows
with each request that ends while the cache has room, and shrinks when the cache is nearly full. An
engine decodes whatever it is sent, up to its slots, so it is sent no more than its limit.

The least loaded engine is on top of a heap. A change of an engine pushes a new entry; the old one
is dropped when it reaches the top, so each event costs O(log engines), amortised.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import TypeVar

from rollick.types import EngineLoad, SampleId

LOW_CACHE = 0.85
"""Below this share of the cache a limit grows."""
HIGH_CACHE = 0.95
"""Above this share of the cache a limit shrinks, before the engine must preempt requests."""
GROWTH = 0.125
"""How much a limit grows for each request that ends: by an eighth in the time of one generation,
since a further request fills its part of the cache only when it is long."""
SHRINK = 0.75
MIN_LIMIT_USE = 0.75
"""A limit grows only if this share of it was used: an idle engine does not test its limit."""
MEAN_WINDOW = 256
"""Requests over which the mean length is taken."""
MAX_MEAN_LENGTHS = 8.0
"""A request counts in the mean as at most this many mean lengths."""
MAX_DRIFT = 1.25
"""All engines' loads are recomputed when the mean length has changed by this factor."""


_Key = TypeVar("_Key", str, int)


class RouterError(AssertionError):
    """An impossible call: a bug in rollick, not a mistake of the user."""


@dataclass(slots=True, eq=False)
class _EngineState:
    """An engine, its last load snapshot, and what has changed since."""

    number: int
    load: EngineLoad
    """The last snapshot."""
    limit: float = inf
    weight: float = 1.0
    held: dict[SampleId, int] = field(default_factory=dict[SampleId, int])
    """Our requests on the engine, with the tokens reserved for each."""
    tokens: int = 0
    """The sum of `held`."""
    num_others: int = 0
    """Requests of the last snapshot that are not ours."""
    ended: int = 0
    """Our requests that ended since the last snapshot."""
    ended_tokens: int = 0
    peak: int = 0
    """The most requests held at once since the last snapshot."""
    grown_limit: float = 0.0
    """The limit to which it grew before `was_full`."""
    was_full: bool = False
    """Whether the cache has ever been nearly full."""
    just_shrunk: bool = False
    """Whether nothing has ended since the limit shrank."""
    is_active: bool = True
    entry: int = -1
    """Number of its current heap entry; older entries are outdated."""

    @property
    def integer_limit(self) -> float:
        """The limit rounded down, or infinite."""
        return self.limit if self.limit == inf else int(self.limit)

    @property
    def would_queue(self) -> bool:
        """Whether one request more would wait inside the engine."""
        return len(self.held) >= self.integer_limit

    def start_limit(self, mean: float) -> None:
        """Until the cache has been nearly full once, the limit is the slots, or the requests of
        mean length that fit the cache."""
        if not self.was_full:
            load = self.load
            cached = load.kv_capacity / mean if load.kv_capacity and mean else inf
            self.limit = max(1.0, min(float(load.slots) or inf, cached), self.grown_limit)

    def capacity(self, engine_queue: float) -> float:
        """How many of our requests it may hold. A stale snapshot must not block it."""
        slots, extra = self.load.slots, engine_queue * self.weight
        return slots + int(extra * slots) if slots and self.limit >= slots else self.integer_limit

    def fill_ratio(self, mean: float) -> float:
        """Expected KV tokens relative to the capacity of an engine with its weight; requests of
        others count as mean ones."""
        load = self.load
        expected = max(self.tokens + self.num_others * mean, load.kv_tokens - self.ended_tokens)
        return expected / (self.weight * (load.kv_capacity or max(1, load.slots) * mean))


class Router:
    """Engines by number, and which of our requests each one holds."""

    def __init__(
        self,
        *,
        engine_queue: float = 1.0,
        margin: float = 0.25,
        mean_tokens: float = 0.0,
        remembered: int = 1 << 20,
    ) -> None:
        """`engine_queue` times its slots is what an engine is sent beyond its slots; a group stays
        together while its engine is at most `margin` (of a capacity) fuller than the emptiest.
        `mean_tokens` is the expected length of a request before any was seen (0: unknown), and
        `remembered` the number of sessions, and of groups, whose engine is remembered."""
        self._engine_queue = engine_queue
        self._margin = margin
        self._remembered = remembered
        self._mean = mean_tokens
        self._num_requests = MEAN_WINDOW if mean_tokens else 0
        self._loads_mean = mean_tokens or 1.0
        """The mean length with which the loads in the heap were computed (see MAX_DRIFT)."""
        self._engines: dict[int, _EngineState] = {}
        self._engine_of: dict[SampleId, _EngineState] = {}
        self._engine_of_session: OrderedDict[str, _EngineState] = OrderedDict()
        self._engine_of_group: OrderedDict[int, _EngineState] = OrderedDict()
        self._heap: list[tuple[bool, float, int, int, _EngineState]] = []
        self._entries = count()

    def add(self, engine: int, load: EngineLoad) -> None:
        if engine in self._engines:
            raise RouterError(f"engine {engine} was added already")
        state = _EngineState(engine, load, num_others=load.running + load.waiting)
        state.start_limit(self._mean)
        self._engines[engine] = state
        self._rank(state)

    def remove(self, engine: int) -> frozenset[SampleId]:
        """Remove an engine; returns the requests it held, which may be chosen for again."""
        state = self._engines.pop(engine, None)
        if state is None:
            return frozenset()
        state.is_active = False
        for uid in state.held:
            del self._engine_of[uid]
        return frozenset(state.held)

    def choose(self, uid: SampleId, *, session: str | None, tokens: int) -> int | None:
        """Reserve `tokens` (prompt and predicted) on an engine; None if all are full. In this
        order: the engine that has the session's cache while it has room, the group's engine while
        it is at most `margin` fuller than another, an engine with a free slot, any with room in
        its queue; of several the least full, of equals the first."""
        if uid in self._engine_of:
            raise RouterError(f"{uid} is on engine {self._engine_of[uid].number} already")
        state = self._choose_engine(uid.group, session)
        if state is None:
            return None
        self._engine_of[uid] = state
        state.held[uid] = tokens = max(1, tokens)
        state.tokens += tokens
        state.peak = max(state.peak, len(state.held))
        self._update_mean(tokens)
        self._rank(state)
        if session is not None:
            self._remember(self._engine_of_session, session, state)
        first = self._engine_of_group.get(uid.group)
        first = first if first and first.is_active else state
        self._remember(self._engine_of_group, uid.group, first)
        return state.number

    def release(self, uid: SampleId, *, tokens: int, load: EngineLoad | None = None) -> None:
        """A request ended; `load` is its engine's snapshot. Ignored if the engine was removed."""
        state = self._engine_of.pop(uid, None)
        if state is None:
            return
        state.tokens -= state.held.pop(uid)
        state.ended += 1
        state.ended_tokens += tokens
        if load is not None:
            self._update_load(state, load)
        self._rank(state)

    def set_weight(self, engine: int, weight: float) -> None:
        """Give an engine less work than one with weight 1."""
        state = self._engines[engine]
        if weight != state.weight:
            state.weight = weight
            self._rank(state)

    def end_session(self, session: str) -> None:
        self._engine_of_session.pop(session, None)

    def end_group(self, group: int) -> None:
        self._engine_of_group.pop(group, None)

    @property
    def has_room(self) -> bool:
        """Whether `choose` would return an engine."""
        return self._least() is not None

    def in_flight(self, engine: int) -> int:
        """How many of our requests an engine holds; 0 if it was removed."""
        return len(self._engines[engine].held) if engine in self._engines else 0

    def limit(self, engine: int) -> float:
        """Requests that an engine is to decode at once, a whole number of at least 1; infinite
        while nothing is known of its size, 0 if it was removed."""
        return self._engines[engine].integer_limit if engine in self._engines else 0

    def _update_load(self, state: _EngineState, load: EngineLoad) -> None:
        old, state.load = state.load, load
        if old.kv_capacity and load.kv_capacity:
            self._adapt(state, old)
        else:
            state.grown_limit, state.was_full = 0.0, False
            state.start_limit(self._mean)
        state.num_others = max(0, load.running + load.waiting - len(state.held))
        state.ended = state.ended_tokens = 0
        state.peak = len(state.held)

    def _choose_engine(self, group: int, session: str | None) -> _EngineState | None:
        session_engine = None if session is None else self._engine_of_session.get(session)
        if session_engine is not None and self._has_room(session_engine):
            return session_engine
        least, group_engine = self._least(), self._engine_of_group.get(group)
        if least is None or group_engine is None or not self._has_room(group_engine):
            return least
        if group_engine.would_queue and not least.would_queue:
            return least
        difference = group_engine.fill_ratio(self._loads_mean) - least.fill_ratio(self._loads_mean)
        return group_engine if difference <= self._margin else least

    def _has_room(self, state: _EngineState) -> bool:
        return state.is_active and len(state.held) < state.capacity(self._engine_queue)

    def _least(self) -> _EngineState | None:
        heap = self._heap
        while heap:
            *_, entry, state = heap[0]
            if state.is_active and entry == state.entry:
                return state
            heappop(heap)
        return None

    def _rank(self, state: _EngineState) -> None:
        """Push the engine's present load to the heap, unless it is full."""
        state.entry = next(self._entries)
        if not self._has_room(state):
            return
        fill = state.fill_ratio(self._loads_mean)
        heappush(self._heap, (state.would_queue, fill, state.number, state.entry, state))
        # Old entries of loaded engines never reach the top: remove them before they are many.
        if len(self._heap) > 64 + 4 * len(self._engines):
            self._heap = [e for e in self._heap if e[4].is_active and e[3] == e[4].entry]
            heapify(self._heap)

    def _update_mean(self, tokens: int) -> None:
        self._num_requests = min(self._num_requests + 1, MEAN_WINDOW)
        counted = min(tokens, MAX_MEAN_LENGTHS * self._mean) if self._mean else tokens
        self._mean += (counted - self._mean) / self._num_requests
        least, most = self._loads_mean / MAX_DRIFT, self._loads_mean * MAX_DRIFT
        if least <= self._mean <= most and self._num_requests > 1:
            return
        self._loads_mean = self._mean
        for state in self._engines.values():
            state.start_limit(self._mean)
            self._rank(state)

    def _adapt(self, state: _EngineState, old: EngineLoad) -> None:
        load, max_limit = state.load, state.load.slots or inf
        fill = load.kv_tokens / load.kv_capacity
        preempted = load.preempted > old.preempted
        state.just_shrunk = state.just_shrunk and not state.ended
        # A smaller limit takes effect only when requests have ended: until then it is kept.
        is_effective = len(state.held) <= state.capacity(self._engine_queue)
        if preempted or fill > HIGH_CACHE:
            if is_effective and (preempted or not state.just_shrunk):
                state.limit = max(1.0, min(state.limit, max_limit) * SHRINK)
                state.was_full = state.just_shrunk = True
        elif fill < LOW_CACHE and state.ended and state.peak >= MIN_LIMIT_USE * state.integer_limit:
            state.grown_limit = state.limit = state.limit + GROWTH * state.ended
        state.grown_limit = min(state.grown_limit, max_limit)
        state.limit = min(state.limit, max_limit)

    def _remember(
        self, engines: OrderedDict[_Key, _EngineState], key: _Key, state: _EngineState
    ) -> None:
        engines[key] = state
        engines.move_to_end(key)
        if len(engines) > self._remembered:
            engines.popitem(last=False)
