"""The slot cache's memory and prefixes, and the table of sequences."""

from __future__ import annotations

import numpy as np
import torch

from rollick.infer.native.sequence_table import EngineRequest, SequenceTable
from rollick.infer.native.slot_cache import BLOCK, SlotCache
from rollick.models.attention.slot_cache import plan_spans
from rollick.types import Request, SampleId, Sampling, StopReason, frozen_array


def _make_request(index: int, *ids: int, session: str | None = None) -> EngineRequest:
    prompt = frozen_array(ids, np.int32)
    return EngineRequest(
        Request(SampleId(0, index), prompt, Sampling(), stream=index, session=session)
    )


def test_the_cache_allocates_on_demand_and_keeps_its_content_while_growing():
    cache = SlotCache()
    cache.reserve(slots=2, length=10)
    template = torch.zeros(1, 3, 1, 4)
    keys, _ = cache.layer(0, template, template)
    assert keys.shape == (2, 3, BLOCK, 4)
    keys[1, :, 5] = 7
    cache.reserve(slots=3, length=BLOCK + 1)
    grown, _ = cache.layer(0, template, template)
    assert grown.shape == (4, 3, 2 * BLOCK, 4)
    assert (grown[1, :, 5] == 7).all()
    assert (grown[2:] == 0).all()
    assert sum(tensor.nbytes for tensor in cache.tensors()) == 2 * grown.nbytes
    cache.free()
    assert list(cache.tensors()) == []


def test_slots_are_copied_and_swapped_up_to_a_length():
    cache = SlotCache()
    cache.reserve(slots=3, length=4)
    template = torch.zeros(1, 1, 1, 1)
    keys, _ = cache.layer(0, template, template)
    keys[:, 0, :3, 0] = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    cache.copy(0, [1, 2], length=2)
    assert keys[:, 0, :3, 0].tolist() == [[1, 2, 3], [1, 2, 6], [1, 2, 9]]
    cache.swap(1, 2, length=3)
    assert keys[:, 0, :3, 0].tolist() == [[1, 2, 3], [1, 2, 9], [1, 2, 6]]


def test_the_row_with_the_longest_cached_prefix_is_found():
    table = SequenceTable(slots=4, max_length=8)
    table.start(table.allocate_row(None), _make_request(0, 5, 6, 7), version=0)
    table.start(table.allocate_row(None), _make_request(1, 5, 6, 7, 8, 9), version=0)
    context = np.asarray([5, 6, 7, 8, 1], np.int32)
    # The last token of a context is not cached: row 0 has two of these tokens, row 1 has four.
    assert table.longest_prefix(context) == (1, 4)
    table.cached[1] = 1
    assert table.longest_prefix(context) == (0, 2)
    assert table.longest_prefix(np.asarray([6, 6, 7], np.int32)).length == 0
    table.forget_prefixes()
    assert table.longest_prefix(context).length == 0


def test_an_ended_row_stays_cached_until_another_sequence_takes_it():
    table = SequenceTable(slots=2, max_length=8)
    table.start(table.allocate_row(None), _make_request(0, 5, 6, 7), version=0)
    table.finish(0, StopReason.STOP)
    context = np.asarray([5, 6, 7], np.int32)
    assert table.longest_prefix(context) == (0, 2)
    table.start(table.allocate_row(None), _make_request(1, 9, 9), version=0)
    assert table.longest_prefix(context).length == 0


def test_a_sessions_prefix_is_swapped_out_of_the_running_rows():
    table = SequenceTable(slots=3, max_length=8)
    for request in (_make_request(0, 5, 6, 7, session="a"), _make_request(1, 8, 8)):
        table.start(table.allocate_row(None), request, version=0)
    table.finish(0, StopReason.STOP)
    assert table.compact() == [(1, 0, 2, True)]
    assert table.count == 1
    assert table.longest_prefix(np.asarray([5, 6, 7], np.int32)) == (1, 2)
    assert table.tokens[0, :2].tolist() == [8, 8]
    assert table.spare_slot(1, avoid=None) == 2
    assert table.spare_slot(1, avoid=2) is None


def test_compacting_moves_the_last_rows_into_holes():
    table = SequenceTable(slots=4, max_length=8)
    requests = [_make_request(index, 10 + index) for index in range(4)]
    for request in requests:
        table.start(table.allocate_row(None), request, version=0)
    assert table.num_free == 0
    table.finish(0, StopReason.STOP)
    table.finish(3, StopReason.STOP)
    assert table.compact() == [(2, 0, 0, False)]
    assert table.count == 2
    assert table.requests[:2] == [requests[2], requests[1]]
    assert table.tokens[0, 0] == 12


def test_the_preferred_hole_is_allocated_first():
    table = SequenceTable(slots=3, max_length=8)
    for index in range(3):
        table.start(table.allocate_row(None), _make_request(index, 1), version=0)
    table.finish(0, StopReason.STOP)
    table.finish(1, StopReason.STOP)
    assert table.allocate_row(0) == 0
    assert table.allocate_row(0) == 1


def test_rows_of_different_lengths_attend_in_spans():
    assert plan_spans([7, 0, 3]) == [(0, 3, 8)]
    assert plan_spans([8] * 4, rows=2) == [(0, 4, 16)]
    assert plan_spans([0, 0, 0, 0, 0, 79], rows=2) == [(0, 2, 8), (2, 4, 8), (4, 6, 80)]
