"""The router: which engine a request goes to, and how many an engine is sent. Pure.

    choose(uid) -> engine    reserves the tokens that the request is expected to hold there
    release(uid)             gives them back
    push(engine, load)       a snapshot came: corrects the load, adapts the engine's limit
    add, remove              engines come and go; what a lost one held is named

An engine decodes `slots` sequences together. What is sent beyond them queues inside the engine, so
that a slot that falls free is refilled without a trip to the controller. Only a short queue is kept
there: requests that wait with the controller can still go to whichever engine is done first.

Where the cache is smaller than what the slots can fill, the *limit* holds: it grows with each
request that ends while the cache has air, and shrinks when the cache presses. An engine runs
whatever it is sent, up to its slots, so below its slots it is sent no more than the limit.

The least loaded engine is on top of a heap. A change of an engine pushes a new entry and leaves the
old one to be dropped when it comes up, so each event costs O(log engines), amortised. The router
knows nothing of tasks, time or order of requests (queue.py has that).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import TypeVar

from rollick.types import EngineLoad, SampleId

AIRY = 0.85
"""Below this share of the cache a limit grows."""
PRESSING = 0.95
"""Above this share of the cache a limit shrinks, before the engine must throw requests out."""
GROWTH = 0.125
"""What a limit grows for each request that ends: an eighth of it in the time of one generation,
since the cache shows what a further request costs only when that request is old."""
SHRINK = 0.75
NEARLY_USED = 0.75
"""A limit grows only if this share of it was used: an idle engine says nothing about its limit."""
MEAN_OVER = 256
"""Requests over which the mean length is taken."""
OUTLIER = 8.0
"""A request counts in the mean as at most this many mean ones, so that one cannot move it far."""
DRIFT = 1.25
"""Loads are computed anew for all engines when the mean length has changed by this factor."""


_Key = TypeVar("_Key", str, int)


class RouterError(AssertionError):
    """A call that cannot happen: an error of ours, not of the user's."""


@dataclass(slots=True, eq=False)
class _Engine:
    """What we know of one engine. `others` is how many requests its snapshot had beyond ours;
    `left` and `left_tokens` went since then, and `peak` is the most it held since then. `grown` is
    how far the limit grew before the cache `pressed` for the first time; `shrunk` says that nothing
    has ended since the limit shrank."""

    number: int
    load: EngineLoad
    limit: float = inf
    held: dict[SampleId, int] = field(default_factory=dict[SampleId, int])
    tokens: int = 0
    others: int = 0
    left: int = 0
    left_tokens: int = 0
    peak: int = 0
    grown: float = 0.0
    pressed: bool = False
    shrunk: bool = False
    alive: bool = True
    entry: int = -1

    @property
    def at_once(self) -> float:
        """The limit as a whole number (or infinite)."""
        return self.limit if self.limit == inf else int(self.limit)

    @property
    def queues(self) -> bool:
        """Whether one request more would wait inside the engine."""
        return len(self.held) >= self.at_once

    def start_limit(self, mean: float) -> None:
        """Until the cache has pressed for the first time, the limit goes by the mean length."""
        if not self.pressed:
            self.limit = max(first_limit(self.load, mean), self.grown)

    def room(self, queue: float) -> float:
        """How many of our requests it may hold. A stale snapshot must not block for ever, so
        whether it is full is decided by our own count alone."""
        slots = self.load.slots
        return slots + int(queue * slots) if slots and self.limit >= slots else self.at_once

    def fill(self, mean: float) -> float:
        """Expected KV tokens relative to the capacity; requests of others count as mean ones."""
        load = self.load
        expected = max(self.tokens + self.others * mean, load.kv_tokens - self.left_tokens)
        return expected / (load.kv_capacity or max(1, load.slots) * mean)


class Router:
    """Engines by number, and which of our requests each one holds."""

    def __init__(
        self,
        *,
        queue: float = 1.0,
        margin: float = 0.25,
        mean_tokens: float = 0.0,
        remembered: int = 1 << 20,
    ) -> None:
        """`queue` times its slots is what an engine is sent beyond its slots; a group stays
        together while its engine is at most `margin` (of a capacity) fuller than the emptiest.

        `mean_tokens` is the expected length of a request before any was seen (0: unknown), and
        `remembered` the number of sessions, and of groups, whose engine is kept in mind.
        """
        self._queue = queue
        self._margin = margin
        self._remembered = remembered
        self._mean = mean_tokens
        self._seen = MEAN_OVER if mean_tokens else 0
        self._unit = mean_tokens or 1.0
        self._engines: dict[int, _Engine] = {}
        self._engine_of: dict[SampleId, _Engine] = {}
        self._sessions: OrderedDict[str, _Engine] = OrderedDict()
        self._homes: OrderedDict[int, _Engine] = OrderedDict()
        self._heap: list[tuple[bool, float, int, int, _Engine]] = []
        self._entries = count()

    def add(self, engine: int, load: EngineLoad) -> None:
        """An engine can be sent requests from now on. One that was removed comes back empty."""
        if engine in self._engines:
            raise RouterError(f"engine {engine} is there already")
        state = _Engine(engine, load, others=load.running + load.waiting)
        state.start_limit(self._mean)
        self._engines[engine] = state
        self._rank(state)

    def remove(self, engine: int) -> frozenset[SampleId]:
        """An engine is gone; what it held is free to be chosen for again. Empty if unknown."""
        state = self._engines.pop(engine, None)
        if state is None:
            return frozenset()
        state.alive = False
        for uid in state.held:
            del self._engine_of[uid]
        return frozenset(state.held)

    def push(self, engine: int, load: EngineLoad) -> None:
        """Take a snapshot; release what it reports as ended before. One of an engine that was
        removed comes too late and is ignored."""
        state = self._engines.get(engine)
        if state is None:
            return
        self._correct(state, load)
        self._rank(state)

    def choose(self, uid: SampleId, *, session: str | None, tokens: int) -> int | None:
        """Reserve `tokens` (prompt and predicted) on an engine; None if all are full.

        In this order: the engine that has the session's cache while it has room, the group's engine
        while it is hardly fuller than another, an engine with a free slot, any with room in its
        queue; of several the least full, of equals the first.
        """
        if uid in self._engine_of:
            raise RouterError(f"{uid} is on engine {self._engine_of[uid].number} already")
        state = self._place(uid.group, session)
        if state is None:
            return None
        self._reserve(state, uid, max(1, tokens))
        if session is not None:
            self._remember(self._sessions, session, state)
        home = self._homes.get(uid.group)
        self._remember(self._homes, uid.group, home if home and home.alive else state)
        return state.number

    def release(self, uid: SampleId, *, tokens_drawn: int, load: EngineLoad | None = None) -> None:
        """A request ended, after this many tokens; `load` is its engine's snapshot, if there is one
        (see `push`). Of no effect if its engine was removed."""
        state = self._engine_of.pop(uid, None)
        if state is None:
            return
        state.tokens -= state.held.pop(uid)
        state.left += 1
        state.left_tokens += tokens_drawn
        if load is not None:
            self._correct(state, load)
        self._rank(state)

    def end_session(self, session: str) -> None:
        """No request of this session comes any more."""
        self._sessions.pop(session, None)

    def end_group(self, group: int) -> None:
        """No request of this group comes any more."""
        self._homes.pop(group, None)

    def engine_of(self, uid: SampleId) -> int | None:
        """Where a request is; None if nowhere."""
        state = self._engine_of.get(uid)
        return None if state is None else state.number

    @property
    def has_room(self) -> bool:
        """Whether `choose` would give an engine."""
        return self._least() is not None

    def in_flight(self, engine: int) -> int:
        """How many of our requests an engine holds; 0 if it is not there."""
        state = self._engines.get(engine)
        return 0 if state is None else len(state.held)

    def limit(self, engine: int) -> float:
        """Requests that an engine is to decode at once, a whole number of at least 1; infinite
        while nothing is known of its size, 0 if it is not there."""
        state = self._engines.get(engine)
        return 0 if state is None else state.at_once

    def _correct(self, state: _Engine, load: EngineLoad) -> None:
        """Believe a snapshot: what is known of the engine's load, and its limit, follow it."""
        old, state.load = state.load, load
        if old.kv_capacity and load.kv_capacity:
            self._adapt(state, old)
        else:
            state.grown, state.pressed = 0.0, False
            state.start_limit(self._mean)
        state.others = max(0, load.running + load.waiting - len(state.held))
        state.left = state.left_tokens = 0
        state.peak = len(state.held)

    def _place(self, group: int, session: str | None) -> _Engine | None:
        sticky = None if session is None else self._sessions.get(session)
        if sticky is not None and self._has_room(sticky):
            return sticky
        least, home = self._least(), self._homes.get(group)
        if least is None or home is None or not self._has_room(home):
            return least
        if home.queues and not least.queues:
            return least
        apart = home.fill(self._unit) - least.fill(self._unit)
        return home if apart <= self._margin else least

    def _has_room(self, state: _Engine) -> bool:
        return state.alive and len(state.held) < state.room(self._queue)

    def _least(self) -> _Engine | None:
        heap = self._heap
        while heap:
            _, _, _, entry, state = heap[0]
            if state.alive and entry == state.entry:
                return state
            heappop(heap)
        return None

    def _rank(self, state: _Engine) -> None:
        """Put an engine where its load says; a full one is in the heap no more."""
        state.entry = next(self._entries)
        if not self._has_room(state):
            return
        fill = state.fill(self._unit)
        heappush(self._heap, (state.queues, fill, state.number, state.entry, state))
        # Old entries of engines that stay loaded never come up: cleared before they are many.
        if len(self._heap) > 64 + 4 * len(self._engines):
            self._heap = [item for item in self._heap if item[4].alive and item[3] == item[4].entry]
            heapify(self._heap)

    def _reserve(self, state: _Engine, uid: SampleId, tokens: int) -> None:
        self._engine_of[uid] = state
        state.held[uid] = tokens
        state.tokens += tokens
        state.peak = max(state.peak, len(state.held))
        self._learn(tokens)
        self._rank(state)

    def _learn(self, tokens: int) -> None:
        self._seen = min(self._seen + 1, MEAN_OVER)
        counted = min(tokens, OUTLIER * self._mean) if self._mean else tokens
        self._mean += (counted - self._mean) / self._seen
        if self._unit / DRIFT <= self._mean <= self._unit * DRIFT and self._seen > 1:
            return
        self._unit = self._mean
        for state in self._engines.values():
            state.start_limit(self._mean)
            self._rank(state)

    def _adapt(self, state: _Engine, old: EngineLoad) -> None:
        """Set the limit by what the snapshot tells beyond the old one."""
        load, most = state.load, state.load.slots or inf
        fill = load.kv_tokens / load.kv_capacity
        thrown_out = load.preempted > old.preempted
        state.shrunk = state.shrunk and not state.left
        # A smaller limit acts only when requests have ended: until then nothing more is concluded.
        acts = len(state.held) <= state.room(self._queue)
        if thrown_out or fill > PRESSING:
            if acts and (thrown_out or not state.shrunk):
                state.limit = max(1.0, min(state.limit, most) * SHRINK)
                state.pressed = state.shrunk = True
        elif fill < AIRY and state.left and state.peak >= NEARLY_USED * state.at_once:
            state.grown = state.limit = state.limit + GROWTH * state.left
        state.grown = min(state.grown, most)
        state.limit = min(state.limit, most)

    def _remember(self, kept: OrderedDict[_Key, _Engine], key: _Key, state: _Engine) -> None:
        kept[key] = state
        kept.move_to_end(key)
        if len(kept) > self._remembered:
            kept.popitem(last=False)


def first_limit(load: EngineLoad, mean_tokens: float) -> float:
    """The limit of an engine before its cache has told anything: its slots, or what its cache holds
    of mean requests, whichever is known and smaller."""
    slots = float(load.slots) or inf
    if not (load.kv_capacity and mean_tokens):
        return slots
    return max(1.0, min(slots, load.kv_capacity / mean_tokens))
