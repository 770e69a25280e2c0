"""The slot cache's memory and prefixes, and the table of running rows."""

from __future__ import annotations

import numpy as np
import torch

from rollick.infer.native.cache import BLOCK, SlotCache
from rollick.infer.native.rows import Job, Rows
from rollick.models.cached_attention import plan_spans
from rollick.types import Request, SampleId, Sampling, StopReason, frozen_array


def _job(index: int, *ids: int, session: str | None = None) -> Job:
    prompt = frozen_array(ids, np.int32)
    return Job(Request(SampleId(0, index), prompt, Sampling(), stream=index, session=session))


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


def test_slots_are_copied_and_swapped_up_to_a_length():
    cache = SlotCache()
    cache.reserve(slots=3, length=4)
    like = torch.zeros(1, 1, 1, 1)
    keys, _ = cache.layer(0, like, like)
    keys[:, 0, :3, 0] = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    cache.copy(0, [1, 2], length=2)
    assert keys[:, 0, :3, 0].tolist() == [[1, 2, 3], [1, 2, 6], [1, 2, 9]]
    cache.swap(1, 2, length=3)
    assert keys[:, 0, :3, 0].tolist() == [[1, 2, 3], [1, 2, 9], [1, 2, 6]]


def test_the_row_that_shares_most_is_found_as_far_as_it_is_held():
    rows = Rows(slots=4, max_length=8)
    rows.put(rows.place(None), _job(0, 5, 6, 7), version=0)
    rows.put(rows.place(None), _job(1, 5, 6, 7, 8, 9), version=0)
    wanted = np.asarray([5, 6, 7, 8, 1], np.int32)
    # The last token of a context is never held: row 0 has two of these, row 1 has four.
    assert rows.longest_prefix(wanted) == (1, 4)
    rows.held[1] = 1
    assert rows.longest_prefix(wanted) == (0, 2)
    assert rows.longest_prefix(np.asarray([6, 6, 7], np.int32)).shared == 0
    rows.forget_held()
    assert rows.longest_prefix(wanted).shared == 0


def test_an_ended_row_is_held_until_another_sequence_takes_it():
    rows = Rows(slots=2, max_length=8)
    rows.put(rows.place(None), _job(0, 5, 6, 7), version=0)
    rows.take(0, StopReason.STOP)
    context = np.asarray([5, 6, 7], np.int32)
    assert rows.longest_prefix(context) == (0, 2)
    rows.put(rows.place(None), _job(1, 9, 9), version=0)
    assert rows.longest_prefix(context).shared == 0


def test_what_a_session_leaves_is_swapped_behind_the_running_rows():
    rows = Rows(slots=3, max_length=8)
    for job in (_job(0, 5, 6, 7, session="a"), _job(1, 8, 8)):
        rows.put(rows.place(None), job, version=0)
    rows.take(0, StopReason.STOP)
    assert rows.close_holes() == [(1, 0, 2, True)]
    assert rows.count == 1
    assert rows.longest_prefix(np.asarray([5, 6, 7], np.int32)) == (1, 2)
    assert rows.tokens[0, :2].tolist() == [8, 8]
    assert rows.refuge(1, avoid=None) == 2
    assert rows.refuge(1, avoid=2) is None


def test_holes_are_closed_by_moving_the_last_rows():
    rows = Rows(slots=4, max_length=8)
    jobs = [_job(index, 10 + index) for index in range(4)]
    for job in jobs:
        rows.put(rows.place(None), job, version=0)
    assert rows.free == 0
    rows.take(0, StopReason.STOP)
    rows.take(3, StopReason.STOP)
    assert rows.close_holes() == [(2, 0, 0, False)]
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
