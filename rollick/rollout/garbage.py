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


@contextmanager
def rare_collections() -> Generator[None]:
    """Inside, collections are rare, at least as rare as outside; afterwards all is as before."""
    before = gc.get_threshold()
    gc.set_threshold(*(max(now, rarely) for now, rarely in zip(before, RARELY, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
