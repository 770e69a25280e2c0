"""Batch: samples taken out of it keep their tokens and their weight in the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollick.data.batch import Batch
from rollick.types import SampleId


def batch_of(lengths: list[int]) -> Batch:
    """Token number n of the batch is n in every stream; sample b has temperature b."""
    total = sum(lengths)
    numbers = np.arange(total)
    return Batch(
        token_ids_N=numbers.astype(np.int32),
        lengths_B=np.array(lengths, np.int32),
        uids=tuple(SampleId(b // 2, b % 2) for b in range(len(lengths))),
        group_B=np.arange(len(lengths), dtype=np.int32) // 2,
        temperature_B=np.arange(len(lengths), dtype=np.float64),
        loss_mask_N=numbers % 2 == 0,
        logprobs_N=-numbers.astype(np.float32),
        versions_N=numbers.astype(np.int32),
        advantages_N=numbers.astype(np.float64),
        weights_N=np.full(total, 1.0 / max(total, 1)),
    )


def test_offsets_say_where_each_sample_begins_and_where_the_last_ends():
    batch = batch_of([2, 3, 1])
    assert (batch.samples, batch.tokens) == (3, 6)
    assert batch.offsets_B1.tolist() == [0, 2, 5, 6]


def test_taken_samples_come_in_the_order_asked_for_with_all_their_streams():
    taken = batch_of([2, 3, 1]).take([2, 0])
    assert taken.token_ids_N.tolist() == [5, 0, 1]
    assert taken.versions_N.tolist() == [5, 0, 1]
    assert taken.loss_mask_N.tolist() == [False, True, False]
    assert taken.lengths_B.tolist() == [1, 2]
    assert taken.temperature_B.tolist() == [2.0, 0.0]
    assert taken.uids == (SampleId(1, 0), SampleId(0, 0))
    assert taken.old_logprobs_N is None
    assert taken.logprobs_N.dtype == np.float32


def test_weights_of_taken_samples_stay_those_of_the_whole_batch():
    assert batch_of([2, 3, 1]).take([1]).weights_N.tolist() == [1 / 6] * 3


def test_annotations_are_taken_along():
    batch = batch_of([2, 1])
    numbers = np.array([10.0, 11.0, 12.0])
    both = batch.with_old_logprobs(numbers).with_reference_logprobs(numbers + 10)
    taken = both.take([1])
    assert taken.old_logprobs_N is not None
    assert taken.reference_logprobs_N is not None
    assert (taken.old_logprobs_N.tolist(), taken.reference_logprobs_N.tolist()) == ([12], [22])
    assert batch.old_logprobs_N is None


def test_taking_no_sample_gives_an_empty_batch():
    empty = batch_of([2, 3]).take([])
    assert (empty.samples, empty.tokens, empty.uids) == (0, 0, ())
    assert empty.token_ids_N.dtype == np.int32


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
def test_any_split_of_a_batch_holds_every_token_once(lengths: list[int], data: st.DataObject):
    order = data.draw(st.permutations(range(len(lengths))))
    cut = data.draw(st.integers(0, len(lengths)))
    batch = batch_of(lengths)
    parts = [batch.take(order[:cut]), batch.take(order[cut:])]
    tokens = sorted(token for part in parts for token in part.token_ids_N.tolist())
    assert tokens == list(range(sum(lengths)))
    assert sum(part.weights_N.sum() for part in parts) == pytest.approx(batch.weights_N.sum())
