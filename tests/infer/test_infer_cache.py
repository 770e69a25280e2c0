"""The slot cache's memory and prefixes, and the table of running rows."""

from __future__ import annotations

import numpy as np
import torch

from rollick.infer.native.cache import BLOCK, SlotCache
from rollick.infer.native.rows import Job, Rows
from rollick.models.cached_attention import plan_spans
from rollick.types import Request, SampleId, Sampling, StopReason, frozen_array


def _job(index: int, *ids: int) -> Job:
    return Job(Request(SampleId(0, index), frozen_array(ids, np.int32), Sampling(), stream=index))


def test_the_cache_takes_memory_for_what_is_used_and_keeps_it_while_growing():
    cache = SlotCache()
    cache.reserve(slots=2, length=10)
    like = torch.zeros(1, 3, 1, 4)
    keys, _ = cache.layer(0, like, like)
    assert keys.shape == (2, 3, BLOCK, 4)
    keys[1, :, 5] = 7
    cache.reserve(slots=3, length=BLOCK + 1)
    grown, _ = cache.layer(0, like, like)
    assert grown.shape == (4, 3, 2 * BLOCK, 4)
    assert (grown[1, :, 5] == 7).all()
    assert (grown[2:] == 0).all()
    assert cache.bytes == 2 * grown.nbytes
    cache.free()
    assert cache.bytes == 0


def test_a_prefix_is_held_until_its_slot_gets_another_one():
    cache = SlotCache()
    cache.hold(0, b"a")
    cache.hold(1, b"a")
    cache.hold(1, b"b")
    assert cache.holder(b"b") == 1
    assert cache.holder(b"a") is None
    cache.move(1, 3, length=0)
    assert cache.holder(b"b") == 3
    cache.forget_all()
    assert cache.holder(b"b") is None


def test_holes_are_closed_by_moving_the_last_rows():
    rows = Rows(slots=4, max_length=8)
    jobs = [_job(index, 10 + index) for index in range(4)]
    for job in jobs:
        rows.put(rows.place(None), job, version=0)
    assert rows.free == 0
    rows.take(0, StopReason.STOP)
    rows.take(3, StopReason.STOP)
    assert rows.close_holes() == [(2, 0)]
    assert rows.count == 2
    assert rows.jobs[:2] == [jobs[2], jobs[1]]
    assert rows.tokens[0, 0] == 12


def test_a_hole_that_is_preferred_is_taken_first():
    rows = Rows(slots=3, max_length=8)
    for index in range(3):
        rows.put(rows.place(None), _job(index, 1), version=0)
    rows.take(0, StopReason.STOP)
    rows.take(1, StopReason.STOP)
    assert rows.place(0) == 0
    assert rows.place(0) == 1


def test_rows_of_unlike_lengths_attend_in_parts():
    assert plan_spans([7, 0, 3]) == [(0, 3, 8)]
    assert plan_spans([8] * 4, rows=2) == [(0, 4, 16)]
    assert plan_spans([0, 0, 0, 0, 0, 79], rows=2) == [(0, 2, 8), (2, 4, 8), (4, 6, 80)]
