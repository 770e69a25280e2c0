"""How a batch is cut, and which of its tokens count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollick.testing.batches import random_batch
from rollick.train.microbatch import counted_tokens, microbatches, pack, plan_microbatches
from rollick.types import SampleId


def test_parts_are_filled_longest_first_and_a_long_sample_goes_alone():
    assert plan_microbatches([3, 9, 4, 3], tokens=7) == [[1], [2, 0], [3]]


def test_parts_can_be_cut_in_the_given_order():
    assert plan_microbatches([3, 9, 4, 3], tokens=7, keep_order=True) == [[0], [1], [2, 3]]


def test_no_samples_make_no_parts():
    assert plan_microbatches([], tokens=7) == []


@given(st.lists(st.integers(1, 30), max_size=20), st.integers(1, 40), st.booleans())
def test_every_sample_is_in_one_part_that_fits(lengths: list[int], tokens: int, keep: bool):
    parts = plan_microbatches(lengths, tokens=tokens, keep_order=keep)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[place] for place in part) <= tokens


def test_a_first_token_never_counts_even_if_its_mask_says_so():
    batch = replace(random_batch([3, 2]), loss_mask_N=np.array([1, 0, 1, 1, 1], bool))
    places, samples = counted_tokens(batch)
    assert places.tolist() == [2, 4]
    assert samples.tolist() == [0, 1]


def test_a_sample_without_a_counted_token_is_in_no_micro_batch():
    batch = replace(random_batch([2, 2]), loss_mask_N=np.array([1, 0, 0, 1], bool))
    assert microbatches(batch, tokens=100, by_uid=False) == [[1]]


def test_the_deterministic_order_is_that_of_the_ids():
    uids = (SampleId(2, 0), SampleId(0, 1), SampleId(0, 0))
    batch = replace(random_batch([3, 9, 4]), uids=uids)
    assert microbatches(batch, tokens=100, by_uid=True) == [[2, 1, 0]]
    assert microbatches(batch, tokens=100, by_uid=False) == [[1, 2, 0]]


def test_a_token_is_predicted_by_the_row_before_it_at_its_samples_temperature():
    batch = random_batch([3, 4], prompt=2)
    packed = pack(batch, device="cpu", deterministic=False)
    assert packed.places_T.tolist() == [2, 5, 6]
    assert packed.rows_T.tolist() == [1, 4, 5]
    assert packed.targets_T.tolist() == batch.token_ids_N[[2, 5, 6]].tolist()
    assert packed.temperature_T.tolist() == [1.0, 1.25, 1.25]
    assert packed.sequence_T.tolist() == [0, 1, 1]


def test_greedy_samples_have_their_log_probs_at_temperature_one():
    batch = replace(random_batch([3]), temperature_B=np.zeros(1, np.float32))
    assert pack(batch, device="cpu", deterministic=False).temperature_T.tolist() == [1.0]


def test_a_deterministic_pack_has_whole_tiles_of_rows():
    packed = pack(random_batch([5, 30]), device="cpu", deterministic=True)
    assert len(packed.token_ids_N) == 64
    assert packed.layout.lengths == (5, 30, 29)
    assert packed.places_T.max() == 34
