"""Python's cyclic garbage collector, kept from walking through all samples again and again.

Samples in flight form no cycles: they are freed when nobody refers to them. But a full collection
visits every one of them, and Python makes one whenever its live objects have grown by a quarter.
With a million samples in flight that doubles the cost of a sample, and each collection stops the
event loop for seconds. So while a rollout is open, collections are rare; cycles that die young are
still found by the small ones.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

RARELY = (50_000, 50, 200)
"""See gc.set_threshold: new objects before a small collection, small ones before a middle one,
middle ones before a full one."""
OBJECTS = 32
"""New objects for each sample in flight before a small collection: more than twice the 13 or so
that a sample has, so that samples that come and go in equal numbers cause none, and few enough that
garbage in cycles stays in proportion to what is in use."""


@contextmanager
def rare_collections(samples: int = 0) -> Generator[None]:
    """Inside, with that many samples in flight, collections are rare, at least as rare as outside;
    afterwards all is as before."""
    before = gc.get_threshold()
    rarely = (max(RARELY[0], OBJECTS * samples), *RARELY[1:])
    gc.set_threshold(*(max(now, then) for now, then in zip(before, rarely, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
