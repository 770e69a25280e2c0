"""The router: which engine a sample goes to. Pure; the scheduler counts and acts.

An engine has `slots` sequences that decode together; what is sent beyond that queues inside the
engine, so that a slot that falls free is refilled without a trip to the controller. Only a short
queue is kept there: samples that wait with the controller can still go to whichever engine is
done first.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollick.types import EngineLoad

QUEUE_FACTOR = 2
"""An engine is sent this many times its slots: as many queue there as decode."""


def choose_engine(
    loads: Sequence[EngineLoad], in_flight: Sequence[int], *, home: int | None = None
) -> int | None:
    """The engine for the next sample, or None if all are full.

    `in_flight` is how many of our samples each engine has; `home` the engine of the sample's group,
    where its prompt is in the cache already. In this order: home while it has a free slot, any
    engine with a free slot, home while its queue has room, any engine with room in its queue.
    Of several, the one with the least load; of equals, the first.
    """
    for factor in (1, QUEUE_FACTOR):
        able = [
            number
            for number, load in enumerate(loads)
            if in_flight[number] < capacity(load, factor=factor)
        ]
        if home in able:
            return home
        if able:
            return min(able, key=lambda number: _busy(loads[number], in_flight[number]))
    return None


def capacity(load: EngineLoad, *, factor: int = QUEUE_FACTOR) -> float:
    """Samples that an engine is sent at the most; no limit before it has told its slots."""
    return load.slots * factor if load.slots else float("inf")


def _busy(load: EngineLoad, in_flight: int) -> int:
    # A snapshot knows of others' requests too, but lags; ours are counted exactly. Whether an
    # engine is full is decided by our count alone: a stale snapshot must not block for ever.
    return max(in_flight, load.running + load.waiting)
